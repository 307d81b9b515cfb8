"""Runs Python and our command line in processes of their own, and reads what commands print."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

Capture = pytest.CaptureFixture[str]


def shown(capture: Capture) -> dict[str, Any]:
    """The one JSON object on stdout."""
    data = json.loads(capture.readouterr().out)
    assert isinstance(data, dict)
    return data


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, check=False, **options
    )


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return python("-m", "forecast_autotune", *arguments, **options)


def command_options(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.Action]]:
    """Every option of every command, with the words that call the command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from command_options(inner, (*words, name))
        elif action.option_strings:
            yield words, action
