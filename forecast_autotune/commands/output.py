"""Where a command's words go: one JSON object or rich text on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from forecast_autotune.commands.count_line import CountLine
from forecast_autotune.printable import printable, without_controls

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

_PIPE_WIDTH = 132
"""Columns when nobody's terminal says how wide it is."""


class UsageError(Exception):
    """The command was called wrongly; exit status 2."""


class CommandError(Exception):
    """The command could not do what was asked; exit status 1."""


def output_path(option: str, name: str, *suffixes: str) -> Path:
    """The path of a file to write. Raises `UsageError` for another suffix and for a directory that is not there."""
    path = Path(name).expanduser()
    special = path.exists() and not path.is_file()  # a device or a pipe has no suffix
    if not path.name.lower().endswith(suffixes) and not special:
        *first, last = suffixes
        rule = f"{', '.join(first)} or {last}" if first else last
        raise UsageError(f"{option} {name}: the name must end in {rule}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {name}: there is no directory {path.parent}")
    return path


class Output:
    """The two streams of one command. With `as_json`, stdout carries one JSON object only."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.stage = "starting"
        """Where the command stands: its last remark, or more than that."""

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
            self.console.print(printable(part, lines=True) if isinstance(part, str) else part)

    def remark(self, text: str) -> None:
        """One line to stderr."""
        self.stage = text
        with contextlib.suppress(OSError):  # a full disk below it must not end the command
            self.at_work.say(printable(text))

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int, str], None]]:
        """A `CountLine` on stderr; the result moves it: (done, total, what)."""
        text = f"{label} ..."

        def done(count: int, total: int, what: str) -> None:
            nonlocal text
            text = f"{label}: {count}/{total} {what}".rstrip()

        with CountLine(self.errors, lambda: text):
            yield done

    @cached_property
    def at_work(self) -> CountLine:
        """Shows the `stage` below the remarks: in place on a terminal, elsewhere after a minute without a line."""
        return CountLine(self.errors, lambda: self.stage, between=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console
    from rich.segment import Segment

    stream = sys.stderr if stderr else sys.stdout
    has_micro = _can_show(stream, "µ")

    class CommandConsole(Console):
        def on_broken_pipe(self) -> None:
            """Leave it to `main`: rich would exit with 1, as if the command had failed."""
            raise BrokenPipeError

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            """No printed text reaches a terminal with control characters in it."""
            for segment in super().render(renderable, options):
                if segment.control is None and not segment.text.isprintable():
                    segment = Segment(without_controls(segment.text), segment.style)
                if not has_micro and "µ" in segment.text:
                    segment = Segment(segment.text.replace("µ", "u"), segment.style)
                yield segment

    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        # A name that the terminal cannot show must not end the command.
        stream.reconfigure(errors="replace")
    wide = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return CommandConsole(stderr=stderr, width=wide, highlight=False, markup=False, emoji=False)


def _can_show(stream: TextIO, character: str) -> bool:
    try:
        character.encode(stream.encoding or "utf-8")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


_TORCH = "install torch for your GPU: https://pytorch.org/get-started"
_REQUIRED = ("filelock", "numpy", "platformdirs", "rich", "threadpoolctl")
_REINSTALL = "pip install --force-reinstall forecast-autotune"
_EXTRAS = {
    "triton": "triton",
    "pyarrow": "train",
    "lightgbm": "eval",
    "sklearn": "eval",
    "jinja2": "llm",
    "openai": "llm",
    "mcp": "mcp",
    "fsspec": "remote",
    "redis": "remote",
    "opentelemetry": "telemetry",
    "transformers": "transformers",
    "safetensors": "transformers",
    "vllm": "vllm",
    "peft": "train",
    "trl": "train",
    "datasets": "train",
    "accelerate": "train",
}


def remedy_of(package: str) -> str | None:
    """How to get an optional package, named as it is imported; None for one that no extra brings."""
    if package == "torch":
        return _TORCH
    extra = _EXTRAS.get(package)
    return None if extra is None else f"pip install 'forecast-autotune[{extra}]'"


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # something refuses it, or stands in its place
        return False


def require_packages(command: str, *names: str) -> None:
    """Raises `CommandError` naming those that are not installed, and how to get them."""
    if missing := [name for name in names if not is_installed(name)]:
        remedies = "; ".join(dict.fromkeys(remedy_of(name) or f"pip install {name}" for name in missing))
        raise CommandError(f"{command} needs {' and '.join(missing)}, not installed here: {remedies}")


def missing_package_text(error: ImportError) -> str | None:
    """An import that failed for want of another package as one line; None where it is something else."""
    package = (error.name or "").partition(".")[0]
    remedy = _REINSTALL if package in _REQUIRED else remedy_of(package)
    return None if remedy is None else f"this needs {package}, not installed here: {remedy}"
