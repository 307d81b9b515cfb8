"""A command as a process: words, streams and an exit status; every failure becomes one line on stderr."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from forecast_autotune.commands.interruption import InterruptHandlers, restore_python_handler
from forecast_autotune.commands.output import CommandError, UsageError, missing_package_text
from forecast_autotune.errors import ForecastAutotuneError, RecordError, SettingsError
from forecast_autotune.printable import printable


def _fill_closed_streams() -> bool:
    """Put the null device in the places of streams that the caller closed; whether stdout is one of them.

    Else the next file that is opened would get the number of one, and with it what is printed.
    """
    is_closed = sys.stdout is None
    if is_closed or sys.stderr is None:
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
            pass
        os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
    return is_closed


def _flush_stdout() -> OSError | None:
    """Flush stdout; returns the error, or None."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # Python would try again at its end, and tell of it in its own way.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return error
    except ValueError:  # closed by somebody
        pass
    return None


def write_error_line(text: str) -> None:
    """One line to stderr, wherever it leads; nowhere is no reason to fail."""
    if sys.stderr is not None:  # Python's own where it was closed
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


_VALUES = ("--mode", "--store", "--recording")


def split_run(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a `run` command line before the program's own arguments: (ours, theirs).

    The first word that is neither an option of ours nor an option's value is SCRIPT; `-m MODULE` ends
    our part likewise. argparse alone would take `run script.py --json` for our `--json`.
    """
    position = 1
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            ours, theirs = list(arguments[:position]), list(arguments[position + 1 :])
            return [*ours, *theirs[:1]], theirs[1:]
        if word == "-m":
            end = position + 2
        elif word in _VALUES:
            position += 2
            continue
        elif word.startswith("-") and word != "-" and not word.startswith("-m"):
            position += 1
            continue
        else:
            end = position + 1
        return list(arguments[:end]), list(arguments[end:])
    return list(arguments), []


_BROKEN_PIPE = 141
"""The exit status that a shell reports for a program ended by SIGPIPE."""
_BAD_INPUT = 2


def dispatch(arguments: list[str]) -> int:
    """Run one command; see `forecast_autotune.commands.main`."""
    show_warning, failure, text = warnings.showwarning, None, None
    is_closed = arguments[:1] != ["run"] and _fill_closed_streams()
    with InterruptHandlers() as interrupts:
        try:
            status = _run(arguments, interrupts)
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            if interrupts.received is None and sys.flags.dev_mode and _failure(error) is None:
                raise
            failure, (status, text) = error, _failure(error) or _unexpected(error)
        finally:
            warnings.showwarning = show_warning
        fault = OSError(errno.EBADF, os.strerror(errno.EBADF)) if is_closed else _flush_stdout()
        if isinstance(failure, BrokenPipeError):
            text = None  # whoever closed it wants to read no more
        elif fault is not None and isinstance(failure, OSError) and failure.filename is None:
            text = None  # told below
        return _reported(status, text, fault, interrupts)


def _reported(status: int, text: str | None, fault: OSError | None, interrupts: InterruptHandlers) -> int:
    """Report an error, if there is one, and return the exit status; `fault` is that of stdout."""
    if interrupts.received is not None and status:
        name = signal.Signals(interrupts.received).name
        if text is not None:  # else the command has said so itself
            write_error_line(
                f"forecast-autotune: {'interrupted' if name == 'SIGINT' else f'ended by {name}'}"
            )
        return 128 + interrupts.received
    if isinstance(fault, BrokenPipeError):
        return _BROKEN_PIPE
    if fault is not None:
        status = status or 1
        text = text or f"error: standard output: {fault.strerror}: not all of it was written"
    if text is not None:
        write_error_line(f"forecast-autotune: {printable(text)}")
    return status


def _run(arguments: list[str], interrupts: InterruptHandlers) -> int:
    from forecast_autotune.commands import grammar, registry

    is_program = arguments[:1] == ["run"]
    if not is_program and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    # Everything behind SCRIPT is the script's own, also what looks like our options.
    arguments, own_arguments = split_run(arguments) if is_program else (arguments, [])
    try:
        options = grammar.build().parse_args(arguments)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    options.rest = own_arguments
    if is_program:
        # A program that is run keeps Python's own signals and form of warnings.
        interrupts.release()
        restore_python_handler()
    else:
        warnings.showwarning = _show_warning
    return registry.run(options)


def _failure(error: BaseException) -> tuple[int, str] | None:
    """Exit status and line of an error that is no fault of this program; None for others."""
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, "interrupted"
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE, "error: nobody reads the output"
    if isinstance(error, UsageError | RecordError | SettingsError):
        return _BAD_INPUT, f"error: {error}"
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError | PermissionError):
        return _BAD_INPUT, f"error: {_os_error_text(error)}"
    if isinstance(error, ImportError) and (text := missing_package_text(error)) is not None:
        return 1, f"error: {text}"
    if isinstance(error, MemoryError):
        return 1, "error: out of memory: give this process more, or ask for less at a time"
    if isinstance(error, CommandError | ForecastAutotuneError):
        return 1, f"error: {error}"
    if isinstance(error, OSError):
        return 1, f"error: {_os_error_text(error)}"
    return None


_OS_REMEDIES = {
    errno.ENOSPC: "make room there, or write elsewhere",
    errno.EDQUOT: "make room there, or write elsewhere",
    errno.EROFS: "write elsewhere",
}


def _os_error_text(error: OSError) -> str:
    where = "" if error.filename is None else f"{error.filename}: "
    remedy = "" if error.errno not in _OS_REMEDIES else f": {_OS_REMEDIES[error.errno]}"
    return f"{where}{error.strerror or error}{remedy}"


def _unexpected(error: BaseException) -> tuple[int, str]:
    """A fault of this program: what, and where."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f"{trace.tb_frame.f_globals.get('__name__', '?')}:{trace.tb_lineno}"
        trace = trace.tb_next
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return (
        1,
        f"internal error: {what} ({place}): please report it, with the traceback that PYTHONDEVMODE=1 shows",
    )


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    if file is not None:
        print(f"forecast-autotune: warning: {message}", file=file)
    else:
        write_error_line(f"forecast-autotune: warning: {printable(message)}")
