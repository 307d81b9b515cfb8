"""The store of a command that only reads or removes: one that was named has to be there."""

from __future__ import annotations

import argparse
from pathlib import Path

from forecast_autotune.commands.output import UsageError
from forecast_autotune.commands.stores.access import open_store
from forecast_autotune.settings import parse_user_directory
from forecast_autotune.store import Store


def open_named_store(options: argparse.Namespace, *, to_read: bool = True) -> Store:
    """As `open_store`. Raises `UsageError` for a folder of `--store` that is not there."""
    if options.store is not None:
        check_folder("--store", options.store)
    return open_store(options, to_read=to_read)


def check_folder(option: str, text: str) -> Path:
    """The folder that an option names. Raises `UsageError` where nothing is."""
    path = parse_user_directory(text)
    if not path.exists():
        raise UsageError(f"{option} {text}: there is no such folder")
    return path
