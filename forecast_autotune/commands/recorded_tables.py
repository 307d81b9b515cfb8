"""The tables of a command's arguments, or those inside the package."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import CommandError
from forecast_autotune.tuning.replays.replay import load, shipped_tables

if TYPE_CHECKING:
    from forecast_autotune.records.table import Table


def load_tables(options: argparse.Namespace) -> list[Table]:
    """Raises `CommandError` when there are none, and `RecordError` for a file that is no table."""
    paths = [Path(name) for name in options.tables] or shipped_tables()
    if not paths:
        raise CommandError(
            "this installation ships no recorded tables: give TABLE files, for example of `export`"
        )
    return load(paths)
