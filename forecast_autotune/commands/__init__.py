"""The command line. `main` loads only what the command at hand needs."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

from forecast_autotune.commands.output import CommandError, UsageError
from forecast_autotune.commands.run_arguments import split_run
from forecast_autotune.errors import ForecastAutotuneError, RecordError, SettingsError

__all__ = ["main"]

_INTERRUPTED = 130
_BROKEN_PIPE = 141
"""What a shell reports for a program ended by SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done; 1: failed; 2: wrong usage or bad input; 130: interrupted; 141: nobody reads the output.
    `run` returns, or exits with, what the program it runs does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    shown = warnings.showwarning
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return _say("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _close_stdout()
        return _BROKEN_PIPE
    except (UsageError, RecordError, SettingsError) as error:
        return _say(f"error: {error}", 2)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError) as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _say(f"error: {where}{error.strerror or error}", 2)
    except (CommandError, ForecastAutotuneError, OSError) as error:
        return _say(f"error: {error}", 1)
    finally:
        warnings.showwarning = shown


def _dispatch(arguments: list[str]) -> int:
    from forecast_autotune.commands import grammar, registry

    if arguments[:1] == ["run"]:
        # Everything behind SCRIPT is the script's own, also what looks like our options.
        arguments, rest = split_run(arguments)
    else:
        rest = []
    try:
        options = grammar.build().parse_args(arguments)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    options.rest = rest
    if arguments[:1] != ["run"]:
        # One line each, like errors; a program that is run keeps Python's own form.
        warnings.showwarning = _show_warning
    return registry.run(options)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    print(f"forecast-autotune: warning: {message}", file=file or sys.stderr)


def _say(text: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(f"forecast-autotune: {text}", file=sys.stderr)
    return status


def _close_stdout() -> None:
    """Send what is still buffered nowhere, so that the interpreter's last flush cannot fail."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
