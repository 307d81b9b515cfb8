"""The standard streams of a command: written whole, and never lost without a word.

Python loses output silently in places: a print to a closed stdout raises `AttributeError` or goes nowhere, a
large write to a slow pipe may be cut, and argparse swallows what writing its help raises. Here every write goes
through one class that remembers the first failure, so that `main` can report it, whoever met it.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

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
    taken, so that no file that is opened later gets its number, and with it what is printed. What stderr cannot
    take is dropped: a full disk below it must not end the command, whose result goes to stdout.
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
