"""A command as a process: words, streams and an exit status; every failure becomes one line on stderr."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from forecast_autotune.commands.interruption import InterruptHandlers, restore_python_handler
from forecast_autotune.commands.output import CommandError, UsageError, missing_package_text
from forecast_autotune.errors import ForecastAutotuneError, RecordError, SettingsError
from forecast_autotune.printable import printable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class StandardDescriptor(io.RawIOBase):
    """The descriptor of a standard stream. After the first write that fails, all others are dropped."""

    def __init__(self, descriptor: int, *, raising: bool) -> None:
        self._descriptor = descriptor
        self._raising = raising
        """Whether the first failure is raised where it is met; it is remembered in any case."""
        self.error: OSError | None = None

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of it, waiting where nothing fits at the moment; returns its size in bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while self.error is None and done < len(view):
            try:
                done += os.write(self._descriptor, view[done:])
            except BlockingIOError:  # whoever shares the pipe or terminal with us may have set it so
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.error = error
                if self._raising:
                    raise
        return len(view)


class StandardStreams:
    """Inside of the `with` block, `sys.stdout` and `sys.stderr` go through `StandardDescriptor`.

    Streams that somebody else put in their places are left as they are. A descriptor that the caller closed is
    taken, so that no file that is opened later gets its number, and with it the output. Text that stderr cannot take
    is dropped: a full disk below it must not end the command, whose result goes to stdout.
    """

    def __init__(self) -> None:
        self._before: tuple[TextIO, TextIO] | None = None
        self._stdout: StandardDescriptor | None = None

    def __enter__(self) -> StandardStreams:
        self._before = sys.stdout, sys.stderr
        if sys.stdout is sys.__stdout__:
            self._stdout = StandardDescriptor(1, raising=True)
            if sys.stdout is None and not _take_descriptor(1, os.O_RDONLY):
                self._stdout.error = OSError(errno.EBADF, os.strerror(errno.EBADF))
            sys.stdout = _text_stream(self._stdout, sys.stdout)
        if sys.stderr is sys.__stderr__:
            errors = StandardDescriptor(2, raising=False)
            if sys.stderr is None and not _take_descriptor(2, os.O_WRONLY):
                errors.error = OSError(errno.EBADF, os.strerror(errno.EBADF))
            sys.stderr = _text_stream(errors, sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Put the streams back that were there before. Raises what writing the rest of the output raises."""
        if self._before is None:
            return
        before, self._before = self._before, None
        try:
            self.flush()
        finally:
            sys.stdout, sys.stderr = before

    def flush(self) -> OSError | None:
        """Write what is still buffered; the first error that stdout met, None where all was written."""
        with contextlib.suppress(ValueError):  # closed by somebody
            if self._stdout is None:
                sys.stdout.flush()
                return None
            with contextlib.suppress(OSError):  # remembered
                sys.stdout.flush()
        return None if self._stdout is None else self._stdout.error


def _text_stream(raw: StandardDescriptor, old: TextIO | None) -> TextIO:
    """A text stream over a descriptor, encoded as the one that Python made for it."""
    errors = "backslashreplace"
    if isinstance(old, io.TextIOWrapper) and old.errors not in (None, "strict"):
        errors = str(old.errors)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if old is None else old.encoding,
        errors=errors,
        line_buffering=raw.isatty() or raw.fileno() == 2,
    )


def _take_descriptor(number: int, flags: int) -> bool:
    """Open the null device under this number; False where something else was opened there meanwhile.

    Opened the wrong way round, it refuses a write as a closed one does.
    """
    with contextlib.suppress(OSError):
        os.fstat(number)
        return False
    opened = os.open(os.devnull, flags)
    if opened != number:
        os.dup2(opened, number, inheritable=False)
        os.close(opened)
    return True


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
            ours, rest = list(arguments[:position]), list(arguments[position + 1 :])
            return [*ours, *rest[:1]], rest[1:]
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
    from forecast_autotune.commands import grammar, registry

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
