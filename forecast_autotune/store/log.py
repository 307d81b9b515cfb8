"""One log file: JSON Lines that only grow, read by following its end."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from forecast_autotune.errors import RecordError
from forecast_autotune.file_access import MAX_RECORD_BYTES, open_regular
from forecast_autotune.records import SCHEMA, Measurement, Problem
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.store.files import (
    StoreNotes,
    acquire_lock,
    decode,
    encode,
    host_name,
    release_lock,
    write_all,
)

MAX_LOG_BYTES = 256 * 1024 * 1024
"""The most bytes read of a log: half a million rows of usual length, of one kernel on one host."""
MAX_LOG_LINES = 1_000_000
"""The most lines read of a log; as records of the shortest kind they take 650 MB."""
_MAX_LOGS = 100
"""The most logs of one host, each larger than a host has ever filled."""
_MARKS = ("cleared", "compacted")
_CHUNK = 4 * 1024 * 1024
_MAX_SHOWN_LINES = 3
"""Bad lines of a log with a reason in the note; the rest are counted, so that garbage cannot flood a terminal."""

_HEAD = 64
"""Bytes at the start of a log that tell it from the one before `clear`, whose inode it may have."""


def mark_line(word: Literal["cleared", "compacted"]) -> bytes:
    """A first line that tells a log from the one before it, which other processes may have read."""
    return encode({"type": word, "schema": SCHEMA, "id": os.urandom(8).hex()})


def is_mark(raw: bytes) -> bool:
    """Whether a line was made by `mark_line`."""
    return raw.startswith(tuple(f'{{"type":"{word}"'.encode() for word in _MARKS))


def _own_paths(folder: Path) -> Iterator[Path]:
    for number in range(1, _MAX_LOGS):
        yield folder / f"log-{host_name()}{f'.{number}' if number > 1 else ''}.jsonl"


def own_logs(folder: Path) -> list[Path]:
    """This host's logs in a kernel's folder, in the order in which they are filled."""
    return [path for path in _own_paths(folder) if path.is_file()]


def own_log(folder: Path) -> Path:
    """Where this host adds rows: the first of its logs that is not full; anything but a file takes no rows."""
    for path in _own_paths(folder):
        if is_writable_log(path):
            break
    return path


def is_writable_log(path: Path) -> bool:
    """Whether rows may be added there: a file with room for them, or nothing yet."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return not path.is_symlink()
    except OSError:
        return False
    return stat.S_ISREG(state.st_mode) and state.st_size < MAX_LOG_BYTES // 2


class LogFile:
    """The records in one log file, kept current by reading only what was appended since the last time."""

    def __init__(self, path: Path, notes: StoreNotes, files: Callable[[Problem], bool]) -> None:
        self.path = path
        self.lock_path = self.lock_of(path)
        self._notes = notes
        self._files = files
        """Whether a problem belongs into this log's directory; records of other problems are misplaced."""
        self._reset()

    @staticmethod
    def lock_of(path: Path) -> Path:
        """The file whose lock writers of a log hold."""
        return path.with_name(path.name + ".lock")

    def _reset(self) -> None:
        self.problems: dict[str, Problem] = {}
        self.measurements: dict[str, list[Measurement]] = {}
        self._identity: tuple[int, int] | None = None
        self._head = b""
        self._offset = 0
        self._last = b""
        self._lines = 0
        self._bad_lines = 0
        """Whole lines that this release cannot read."""
        self._torn = 0
        """Number of the unfinished last line that was already reported; 0: none."""
        self._unread_size = -1
        """Size of the file when its end was beyond the limits; -1: all was read."""

    @property
    def unread_lines(self) -> int:
        """How many lines are no records to this release, after the last refresh."""
        return self._bad_lines + bool(self._torn)

    def clear(self) -> None:
        """Empty the file for all readers; the caller holds its lock. Raises `OSError`."""
        with open_regular(self.path, "rb+") as stream:
            stream.truncate(0)
            write_all(stream, mark_line("cleared"))

    def refresh(self, *, locked: bool = False) -> None:
        """Read what was appended since the last call, by any process.

        `locked` says that the caller holds the log's lock. Lines that are no records are skipped and
        reported. An unreadable file is reported, and its rows read before are kept.
        """
        try:
            tail = self._read_appended()
            if tail and not self._torn:
                self._resolve_tail(tail, locked)
        except FileNotFoundError:
            self._reset()
        except OSError as error:
            self._notes.add_unread(self.path, f"cannot be read, its measurements are unknown here: {error}")

    def _resolve_tail(self, tail: bytes, locked: bool) -> None:
        """Handle text after the last newline: a write still in progress, or one torn by a kill."""
        lock = None
        try:
            if not locked:
                # Writers hold the lock: whatever is unfinished while we have it stays unfinished.
                lock = acquire_lock(self.lock_path, 1.0, 0.002)
                tail = self._read_appended()
            if not tail:
                return
            error = self._index_line(tail)
            if error is None:  # torn exactly before its newline, and no proper prefix of an object is one
                self._advance(len(tail), tail[-1:])
            else:
                self._torn = self._lines + 1
                message = f"{self.path}:{self._torn}: skipped a torn last line of {len(tail)} bytes ({error})"
                self._notes.add(message, topic=str(self.path))
        except TimeoutError:
            return  # somebody is writing right now; the next read will see the whole line
        finally:
            release_lock(lock)

    def _read_appended(self) -> bytes:
        """Take in all complete lines behind our position; returns the text after the last newline."""
        with open_regular(self.path, "rb") as stream:
            state = os.fstat(stream.fileno())
            head = stream.read(_HEAD)
            if self._identity != (state.st_dev, state.st_ino) or not head.startswith(self._head):
                self._reset()  # removed or cleared, and started anew
            self._identity, self._head = (state.st_dev, state.st_ino), head
            if state.st_size in (self._offset, self._unread_size):
                return b""
            stream.seek(self._offset - len(self._last))
            if stream.read(len(self._last)) == self._last:
                return self._read_lines(stream, state.st_size)
        # Shorter than before, or cut and grown again: a failed write that we had read was undone.
        self._reset()
        return self._read_appended()

    def _read_lines(self, stream: BinaryIO, size: int) -> bytes:
        """Index every whole line from the stream's position, chunk by chunk; returns what follows the last."""
        tail, skipping, bad = b"", False, _BadLines()
        while not self._is_full(tail) and (chunk := stream.read(_CHUNK)):
            *lines, tail = (tail + chunk).split(b"\n")
            for number, raw in enumerate(lines, self._lines + 1):
                if skipping:
                    bad.add(number, f"more than {MAX_RECORD_BYTES} bytes")
                    skipping = False
                    self._bad_lines += 1
                elif raw and (error := self._index_line(raw)) is not None:
                    self._bad_lines += 1
                    if number != self._torn:
                        bad.add(number, error)
            if lines:
                self._advance(sum(map(len, lines)) + len(lines), b"\n")
                self._lines += len(lines)
                self._torn = 0
            if len(tail) > MAX_RECORD_BYTES:
                self._advance(len(tail), tail[-1:])
                tail, skipping = b"", True
        if skipping or self._is_full(tail):
            self._unread_size = size
            bad.add(
                self._lines + 1,
                f"longer than is read: {MAX_RECORD_BYTES} bytes a line, {MAX_LOG_BYTES} bytes and {MAX_LOG_LINES} "
                "lines a log; what follows is unknown here until it has a file of its own, as in log-more.jsonl",
            )
            tail = b""
        if bad.count:
            self._notes.add(f"{self.path}{bad}", topic=str(self.path))
        return tail

    def _is_full(self, tail: bytes) -> bool:
        """Whether the limits are reached by the part read so far, and `tail`."""
        return self._offset + len(tail) >= MAX_LOG_BYTES or self._lines >= MAX_LOG_LINES

    def _advance(self, count: int, last: bytes) -> None:
        self._offset += count
        self._last = last

    def _index_line(self, raw: bytes) -> str | None:
        """Index one line; returns what is wrong with it, or None."""
        try:
            data = decode(raw)
            kind = data.get("type")
            if kind == "measurement":
                measurement = Measurement.from_json(data)
                hash(measurement.candidate)  # a list where a number belongs would fail far from here
                self.measurements.setdefault(measurement.problem, []).append(measurement)
            elif kind == "problem":
                problem = Problem.from_json(data)
                if not self._files(problem):
                    raise RecordError(
                        f"a problem of {problem.kernel.name} on {problem.device.name} is filed elsewhere"
                    )
                first = self.problems.get(problem.id)
                # A later record is there because it has IR or facts that the first one has not.
                self.problems[problem.id] = problem if first is None else first.joined(problem)
            elif not is_mark(raw):
                self._bad_lines += 1  # of a type that a newer release has: passed over in silence
        except MALFORMED as error:
            return f"{type(error).__name__}: {error}"[:200] if raw.strip() else None
        return None


class _BadLines:
    """Lines that were skipped in one reading, as words behind the log's name."""

    def __init__(self) -> None:
        self.count = 0
        self._lines: list[tuple[int, str]] = []

    def add(self, number: int, error: str) -> None:
        self.count += 1
        if len(self._lines) < _MAX_SHOWN_LINES:
            self._lines.append((number, error))

    def __str__(self) -> str:
        if self.count == 1:
            return ":{}: skipped a line that is no record ({})".format(*self._lines[0])
        texts = "; ".join(f"line {number}: {error}" for number, error in self._lines)
        return f": skipped {self.count} lines that are no records ({texts}{'; ...' * (self.count > len(self._lines))})"
