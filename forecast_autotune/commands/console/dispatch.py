"""From words to an exit status: parse, run, and turn whatever happens into one line on stderr."""

from __future__ import annotations

import errno
import signal
import sys
import warnings
from typing import TextIO

from forecast_autotune.commands.console.extras import missing_package_text
from forecast_autotune.commands.console.interruption import InterruptHandlers, restore_python_handler
from forecast_autotune.commands.console.streams import StandardStreams, write_error_line
from forecast_autotune.commands.output import CommandError, UsageError
from forecast_autotune.commands.run_arguments import split_run
from forecast_autotune.errors import ForecastAutotuneError, RecordError, SettingsError
from forecast_autotune.printable import printable

_BROKEN_PIPE = 141
"""What a shell reports for a program ended by SIGPIPE."""
_BAD_INPUT = 2


def dispatch(arguments: list[str]) -> int:
    """Run one command; see `forecast_autotune.commands.main`."""
    shown = warnings.showwarning
    with StandardStreams() as streams, InterruptHandlers() as interrupts:
        text: str | None = None
        try:
            status = _run(arguments, streams, interrupts)
            streams.flush()
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            if interrupts.received is None and sys.flags.dev_mode and _failure(error) is None:
                raise
            status, text = _failure(error) or _unexpected(error)
            if error is streams.flush():
                text = None  # told below
        finally:
            warnings.showwarning = shown
        return _reported(status, text, streams, interrupts)


def _reported(status: int, text: str | None, streams: StandardStreams, interrupts: InterruptHandlers) -> int:
    """Say what went wrong, if anything did, and return the exit status."""
    lost = streams.flush()
    if interrupts.received is not None and status:
        name = signal.Signals(interrupts.received).name
        if text is not None:  # else the command has said so itself
            write_error_line(
                f"forecast-autotune: {'interrupted' if name == 'SIGINT' else f'ended by {name}'}"
            )
        return 128 + interrupts.received
    if isinstance(lost, BrokenPipeError):
        return _BROKEN_PIPE
    if lost is not None:
        status = status or 1
        text = text or f"error: standard output: {lost.strerror}: not all of it was written"
    if text is not None:
        write_error_line(f"forecast-autotune: {printable(text)}")
    return status


def _run(arguments: list[str], streams: StandardStreams, interrupts: InterruptHandlers) -> int:
    from forecast_autotune.commands import registry
    from forecast_autotune.commands.console import grammar

    is_program = arguments[:1] == ["run"]
    # Everything behind SCRIPT is the script's own, also what looks like our options.
    arguments, rest = split_run(arguments) if is_program else (arguments, [])
    try:
        options = grammar.build().parse_args(arguments)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    options.rest = rest
    if is_program:
        # A program that is run keeps Python's own streams, signals and form of warnings.
        streams.release()
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
