"""The lines of a file that a user named, unpacked if need be, within bounds that a bomb does not pass."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import MAX_RECORD_BYTES, open_named_input

MAX_BYTES = 512 * 1024 * 1024
"""The most bytes of a file, unpacked. Four times the largest of the project's corpora; its texts fit into memory."""
MAX_LINES = 500_000
"""The most lines of a file. Eight times the most in the corpora; as many of the shortest rows take half a gigabyte."""
MAX_STREAM_BYTES, MAX_STREAM_LINES = 16 * 1024**3, 100_000_000
"""The same for a file whose rows are read one by one, and never held together."""
MAX_LINE_BYTES = MAX_RECORD_BYTES
MAX_DOCUMENT_BYTES = 96 * 1024 * 1024
"""The most bytes of a file that is one JSON value, unpacked: it is held as bytes, as text and as values at once."""
MAX_RATIO = 200
"""Bytes per compressed byte. Tables have 10 to 85, a bomb has a thousand."""
JUDGED_BYTES = 64 * 1024 * 1024
"""Unpacked bytes up to which any ratio is accepted: a small file of one row repeated may have a high one."""
_CHUNK = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_XZ = b"\xfd7zXZ\0"

Refuse: TypeAlias = Callable[[RecordError], None]
"""Callback for each row that is left out, with its file and line; without one, the first ends the reading."""


def refuse_row(error: RecordError, refuse: Refuse | None) -> None:
    """Report a row that is left out, in `MAX_REASON` characters; raises the error where there is no callback."""
    if len(message := str(error)) > MAX_REASON:
        error = RecordError(message[:MAX_REASON])
    if refuse is None:
        raise error
    refuse(error)


MAX_REASON = 400
"""Most characters of a message on a row that is left out: it may quote megabytes of the row."""
MAX_REFUSED = 10_000
"""Most rows of a file that are left out one by one; a file with more of them is no table."""


class CutOffError(RecordError):
    """Compressed bytes that end early or are damaged; lines unpacked before them are sound."""


class _CountedBytes:
    """A binary stream that counts the bytes read."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.count = 0
        self._head = b""

    def peek(self) -> bytes:
        """The first six bytes, which stay unread: a pipe cannot go back."""
        while len(self._head) < 6 and (more := self._stream.read(6 - len(self._head))):
            self._head += more
        return self._head

    def read(self, size: int = -1) -> bytes:
        """As a stream's."""
        end = len(self._head) if size < 0 else size
        data, self._head = self._head[:end], self._head[end:]
        data += self._stream.read(size if size < 0 else size - len(data)) or b""
        self.count += len(data)
        return data


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    if str(path) != "-":
        with open_named_input(path) as stream:
            yield stream
    elif sys.stdin is None:
        raise RecordError("-: standard input is closed: give a file, or pipe a table in")
    elif hasattr(sys.stdin, "buffer"):
        yield sys.stdin.buffer
    else:  # replaced by something that is text already
        yield io.BytesIO(sys.stdin.read().encode("utf-8", "replace"))


@contextlib.contextmanager
def unpacked(path: Path, *, streamed: bool = False) -> Iterator[Callable[[int], bytes]]:
    """A function that reads a file, compressed by gzip or xz or not, or standard input (`-`), chunk by chunk.

    Reading raises `RecordError` for more than `MAX_BYTES` (`MAX_STREAM_BYTES` if `streamed`) or `MAX_RATIO` and for
    damaged compressed bytes, and opening `OSError` for what is neither a file nor a pipe.
    """
    import gzip
    import zlib

    most = MAX_STREAM_BYTES if streamed else MAX_BYTES
    with _opened(path) as stream:
        if str(path) != "-" and os.fstat(stream.fileno()).st_size > most:
            raise RecordError(_too_large(path, most, ""))
        raw = _CountedBytes(stream)
        head = raw.peek()
        damage: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error)
        is_packed, read_some = True, raw.read
        # `read1` returns the bytes before the damage; `read` would drop them.
        if head.startswith(_GZIP):
            read_some = gzip.GzipFile(fileobj=raw, mode="rb").read1  # type: ignore[call-overload]
        elif head == _XZ:
            import lzma

            read_some = lzma.LZMAFile(raw).read1  # type: ignore[arg-type]  # noqa: SIM115 - closes nothing
            damage = (EOFError, lzma.LZMAError)
        else:
            is_packed = False
        total = 0

        def read(size: int) -> bytes:
            nonlocal total
            try:
                data: bytes = read_some(size)
            except damage as error:
                raise CutOffError(f"{path}: unreadable or cut off: {error}") from error
            total += len(data)
            if total > most:
                raise RecordError(_too_large(path, most, " once unpacked" if is_packed else ""))
            if is_packed and total > max(JUDGED_BYTES, MAX_RATIO * raw.count):
                raise RecordError(
                    f"{path}: {raw.count} compressed bytes hold more than {total} bytes, which is no table: at most "
                    f"{MAX_RATIO} bytes per compressed byte are read; unpack it first if it is meant"
                )
            return data

        yield read


def _too_large(path: Path, most: int, how: str) -> str:
    return f"{path}: more than {most} bytes{how}: split it into files of fewer kernels"


def bounded_refusals(path: Path, refuse: Refuse | None) -> Refuse | None:
    """The same callback, which raises `RecordError` beyond `MAX_REFUSED` rows of a file."""
    if refuse is None:
        return None
    count = 0

    def tell(error: RecordError) -> None:
        nonlocal count
        count += 1
        if count > MAX_REFUSED:
            raise RecordError(
                f"{path}: more than {MAX_REFUSED} rows break a rule, so it is not taken for a table"
            )
        refuse(error)

    return tell


def read_document(path: Path, head: int | None = None, limit: int = MAX_DOCUMENT_BYTES) -> str:
    """The text of a file, or of its first `head` bytes; unpacked, without a byte-order mark.

    Raises `RecordError` for more than `limit` bytes, for bytes that are no UTF-8 (a head may be anything) and
    as `unpacked` does, and `OSError` for a file that cannot be opened.
    """
    parts, total = [], 0
    with unpacked(path, streamed=head is not None) as read:
        while (head is None or total < head) and (data := read(_CHUNK if head is None else head - total)):
            parts.append(data)
            total += len(data)
            if total > limit:
                remedy = ": split it into files of fewer configs" if limit == MAX_DOCUMENT_BYTES else ""
                raise RecordError(f"{path}: more than {limit} bytes{remedy}")
    try:
        return b"".join(parts).decode("utf-8-sig", "strict" if head is None else "replace")
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: unreadable or cut off: {error}") from error


def csv_fields(line: str) -> list[str]:
    """The fields of one line of CSV. Each line by itself, so that a stray quote spoils no other row.

    Raises `csv.Error`.
    """
    import csv

    return next(csv.reader([line.rstrip("\r\n")]), [])


def numbered_lines(
    path: Path, refuse: Refuse | None = None, *, streamed: bool = False, end: bytes = b""
) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line without its end) of a file as `unpacked` reads it, a byte-order mark left out.

    Whole lines have `end` in place of their own end; a last one that may be cut off has none.
    A line of more than `MAX_LINE_BYTES` is refused. Raises `RecordError` for more than `MAX_LINES`, and
    as `unpacked` does; where compressed bytes are cut off, `refuse` is called, and the lines before count.
    """
    most = MAX_STREAM_LINES if streamed else MAX_LINES
    with unpacked(path, streamed=streamed) as read_chunk:
        number, tail, skipping = 0, b"", False
        while chunk := _next_chunk(read_chunk, refuse):
            *lines, tail = (tail + chunk).split(b"\n")
            for line in lines:
                number += 1
                if number > most:
                    raise RecordError(f"{path}: more than {most} lines: split it into files of fewer kernels")
                if not skipping:
                    yield number, (line if number > 1 else line.removeprefix(_BYTE_ORDER_MARK)) + end
                skipping = False
            if len(tail) > MAX_LINE_BYTES:
                if not skipping:
                    error = RecordError(f"{path}:{number + 1}: a line has at most {MAX_LINE_BYTES} bytes")
                    refuse_row(error, refuse)
                skipping, tail = True, b""
        if tail and not skipping:
            yield number + 1, tail if number else tail.removeprefix(_BYTE_ORDER_MARK)


def _next_chunk(read_chunk: Callable[[int], bytes], refuse: Refuse | None) -> bytes:
    try:
        return read_chunk(_CHUNK)
    except CutOffError as error:
        refuse_row(error, refuse)
        return b""
