"""Where a command's words go: one JSON object or rich text on stdout, everything else on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PIPE_WIDTH = 132
"""Columns when nobody's terminal says how wide it is."""


class Usage(Exception):
    """The command was called wrongly; exit status 2."""


class Failure(Exception):
    """The command could not do what was asked; exit status 1."""


class Output:
    """The two streams of one command. With `as_json`, stdout carries one JSON object only."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @cached_property
    def console(self) -> Console:
        """Rich text on stdout."""
        return _console(stderr=False)

    @cached_property
    def errors(self) -> Console:
        """Rich text on stderr: progress, questions, remarks."""
        return _console(stderr=True)

    def emit(self, data: Mapping[str, Any], *shown: RenderableType) -> None:
        """Print `data` as JSON, or what is `shown` to a person."""
        if self.as_json:
            print(json.dumps(data, allow_nan=False, default=str))
            return
        for part in shown:
            self.console.print(part)

    def remark(self, text: str) -> None:
        """One line to stderr."""
        self.errors.print(text, highlight=False, markup=False, soft_wrap=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            """Leave it to `main`: rich would exit with 1, as if the command had failed."""
            raise BrokenPipeError

    stream = sys.stderr if stderr else sys.stdout
    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        # A µ that the terminal cannot show must not end the command.
        stream.reconfigure(errors="replace")
    wide = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Quiet(stderr=stderr, width=wide, highlight=False)
