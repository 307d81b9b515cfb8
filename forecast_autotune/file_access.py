"""Files that anybody may have put there, opened with care, and results written to what a path is.

A FIFO without a writer, a device without an end or a file of many gigabytes in the place of a small one must
cost an error, not a process that hangs or runs out of memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MAX_RECORD_BYTES = 16 * 1024 * 1024
"""The most bytes of a file or line that holds one record. The largest that real kernels made, with their IR, has 4 MB;
JSON of nothing but brackets takes thirty times its bytes in memory, and stays below half a gigabyte."""
PIPE_WAIT_S = 10.0
"""How long the other end of a named pipe may take to open; a shell opens both ends at once."""

_PART = ".part"
_CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
"""Opening a FIFO does not wait for its other end, and a terminal does not become ours. Regular files ignore both."""
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)


def open_regular(path: Path, mode: str) -> BinaryIO:
    """`open(path, mode, buffering=0)` for regular files alone, by whatever links they are reached.

    `mode` is one of binary ones. Raises `IsADirectoryError` for a folder, and `OSError` for pipes, devices and
    sockets, none of which is waited for, and for whatever else `open` refuses.
    """
    stream: BinaryIO = open(path, mode, buffering=0, opener=_open_carefully)  # type: ignore[assignment]  # noqa: SIM115
    return stream


def _open_carefully(path: str, flags: int) -> int:
    # Before it is opened, which alone can set a device going, and after, as it may have been replaced.
    with contextlib.suppress(FileNotFoundError):
        _refuse_irregular(path, Path(path).stat().st_mode)
    descriptor = os.open(path, flags | _CAREFUL, 0o666)
    try:
        _refuse_irregular(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_irregular(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder where a file belongs", path)
    raise OSError(errno.EINVAL, f"is {_kind_name(mode)} where a file belongs", path)


def _kind_name(mode: int) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "no regular file")


def read_regular(path: Path, limit: int = MAX_RECORD_BYTES) -> bytes:
    """All bytes of a regular file. Raises `OSError` as `open_regular` does, and for more than `limit` bytes."""
    with open_regular(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        # One byte more than is allowed, as the size may be out of date, and is 0 for files of /proc.
        data = stream.read(limit + 1) if size <= limit else b""
        while data and len(data) <= limit and (more := stream.read(limit + 1 - len(data))):
            data += more
    if size > limit or len(data) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit} bytes, the most that is read of it", str(path))
    return data


def space_remedy(error: OSError) -> str:
    """The remedy for a store that cannot be written: room on a full disk, otherwise another place."""
    room = "free space there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return f"{room}name a writable directory in FORECAST_AUTOTUNE_CACHE_DIR or --store"


def misplaced_file(folder: Path) -> str:
    """The kind of thing that stands where a folder belongs; empty where it is a folder, or nothing."""
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError:
        return "a link to nothing" if folder.is_symlink() else ""
    except NotADirectoryError:
        return ""  # what is above it is told of
    except OSError as error:
        return f"something that cannot be opened ({error.strerror})"
    return "" if stat.S_ISDIR(mode) else "a file" if stat.S_ISREG(mode) else _kind_name(mode)


# --- reading what a user names ---


@contextlib.contextmanager
def open_named_input(path: Path) -> Iterator[BinaryIO]:
    """A regular file or a pipe that a user named, to be read once.

    Raises `OSError` for folders, devices and sockets, and for a pipe that nobody writes to within `PIPE_WAIT_S`.
    """
    mode = path.stat().st_mode
    if not stat.S_ISFIFO(mode):
        with open_regular(path, "rb") as stream:
            yield stream
        return
    descriptor = os.open(path, os.O_RDONLY | _CAREFUL)
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        import select

        if not select.select([descriptor], [], [], PIPE_WAIT_S)[0]:
            raise OSError(
                errno.ETIMEDOUT, f"is a named pipe that nobody wrote to for {PIPE_WAIT_S:.0f} s", str(path)
            )
        os.set_blocking(descriptor, True)
        yield pipe


# --- writing what a user names ---


@contextlib.contextmanager
def open_named_output(path: Path) -> Iterator[BinaryIO]:
    """A stream to what a path is: a device or a pipe is written to, a file replaced once all is written.

    A symbolic link stays, and its target is replaced. Where the block raises, a file is as it was. Raises
    `OSError` where nothing can be written, and for a pipe that nobody reads from within `PIPE_WAIT_S`; it names `path`.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder: name a file", str(path))
    if mode is not None and (not stat.S_ISREG(mode) or _is_descriptor(path)):
        with _named_errors(path), os.fdopen(_open_to_write(path, mode), "wb") as stream:
            yield stream
        return
    with _named_errors(path), _replaced(Path(os.path.realpath(path)), mode) as stream:
        yield stream


@contextlib.contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """Give errors of writing the name that the user knows: those of a stream have none, those of a part another one."""
    try:
        yield
    except OSError as error:
        if error.filename is None or str(error.filename).endswith(_PART):
            error.filename = str(path)
        raise


def _is_descriptor(path: Path) -> bool:
    """Whether a path is a name of one of a process's open files, such as /dev/stdout: that file is not ours."""
    for _ in range(40):
        if os.path.realpath(path.parent).startswith("/proc/"):
            return True
        if not path.is_symlink():
            return False
        path = path.parent / path.readlink()
    return False


def _open_to_write(path: Path, mode: int) -> int:
    flags = os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOCTTY", 0)
    if not stat.S_ISFIFO(mode):
        return os.open(path, flags)
    end = time.monotonic() + PIPE_WAIT_S
    while True:
        try:
            descriptor = os.open(path, flags | _CAREFUL)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > end:
                raise OSError(
                    errno.ETIMEDOUT,
                    f"is a named pipe that nobody read from for {PIPE_WAIT_S:.0f} s",
                    str(path),
                ) from error
            time.sleep(0.02)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


@contextlib.contextmanager
def _replaced(path: Path, mode: int | None) -> Iterator[BinaryIO]:
    # Under a new name each time, so that no two writers share it and nobody can have put a link there.
    part = path.with_name(f".{os.urandom(8).hex()}{_PART}")
    try:
        with part.open("xb") as stream:
            if mode is not None:
                part.chmod(stat.S_IMODE(mode))
            yield stream
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
