"""One log file: JSON Lines that only grow, read by following its end."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import SCHEMA, Measurement, Problem
from forecast_autotune.records.json_fields import decode_json
from forecast_autotune.store.files import StoreNotes, acquire_lock, release_lock

MALFORMED = (ValueError, TypeError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""What reading a line of arbitrary bytes as a record can raise. `RecordError` is a ValueError."""

_MAX_SHOWN_LINES = 3
"""Bad lines named one by one per read; the rest are counted, so garbage cannot flood a terminal."""

_HEAD = 64
"""Bytes at the start of a log that tell it from the one before `clear`, whose inode it may have."""


def encode(data: Mapping[str, Any]) -> bytes:
    """One record as a line of bytes.

    Pure ASCII, so that no tear can fall inside a character. Raises `RecordError` for values that
    JSON cannot hold.
    """
    try:
        return json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        kind = data.get("type", "record")
        raise RecordError(
            f"a {kind} line holds only JSON values (no NaN, no infinity, no objects): {error}; "
            "convert what was put into its extra fields"
        ) from error


def decode(raw: bytes) -> dict[str, Any]:
    """Read one JSON object. Raises one of `MALFORMED` for anything else; runs nothing."""
    data = decode_json(raw.decode("utf-8"))
    if not isinstance(data, dict):
        raise RecordError(f"expected an object, got {data!r:.60}")
    return data


class LogFile:
    """What one log file holds, kept current by reading only what was appended since the last time."""

    def __init__(self, path: Path, notes: StoreNotes) -> None:
        self.path = path
        self.lock_path = path.with_name(path.name + ".lock")
        self._notes = notes
        self._reset()

    def _reset(self) -> None:
        self.problems: dict[str, Problem] = {}
        self.measurements: dict[str, list[Measurement]] = {}
        self._identity: tuple[int, int] | None = None
        self._head = b""
        self._offset = 0
        self._last = b""
        self._lines = 0
        self._torn = 0
        """Number of the unfinished last line that was already reported; 0: none."""

    def clear(self) -> None:
        """Empty the file for all readers; the caller holds its lock. Raises `OSError`."""
        with self.path.open("rb+", buffering=0) as stream:
            stream.truncate(0)
            stream.write(encode({"type": "cleared", "schema": SCHEMA, "id": os.urandom(8).hex()}))

    def refresh(self, *, locked: bool = False) -> None:
        """Read what was appended since the last call, by any process.

        `locked` says that the caller holds the log's lock. Lines that are no records are skipped and
        reported. An unreadable file is reported, and what was read of it before is kept.
        """
        try:
            rest = self._read_appended()
            if rest and not self._torn:
                self._resolve_tail(rest, locked)
        except FileNotFoundError:
            self._reset()
        except OSError as error:
            self._notes.add(f"{self.path}: cannot be read, its measurements are unknown here: {error}")

    def _resolve_tail(self, rest: bytes, locked: bool) -> None:
        """Judge text after the last newline: a write still under way, or torn by a kill?"""
        lock = None
        try:
            if not locked:
                # Writers hold the lock: whatever is unfinished while we have it stays unfinished.
                lock = acquire_lock(self.lock_path, 1.0, 0.002)
                rest = self._read_appended()
            if not rest:
                return
            error = self._index_line(rest, self._lines + 1)
            if error is None:  # torn exactly before its newline, and no proper prefix of an object is one
                self._advance(rest)
            else:
                self._torn = self._lines + 1
                self._notes.add(
                    f"{self.path}:{self._torn}: skipped a torn last line of {len(rest)} bytes ({error})"
                )
        except TimeoutError:
            return  # somebody is writing right now; the next read will see the whole line
        finally:
            release_lock(lock)

    def _read_appended(self) -> bytes:
        """Take in all complete lines behind our position; returns the text after the last newline."""
        with self.path.open("rb", buffering=0) as stream:
            stat = os.fstat(stream.fileno())
            head = stream.read(_HEAD)
            if self._identity != (stat.st_dev, stat.st_ino) or not head.startswith(self._head):
                self._reset()  # removed or cleared, and started anew
            self._identity, self._head = (stat.st_dev, stat.st_ino), head
            if stat.st_size == self._offset:
                return b""
            stream.seek(self._offset - len(self._last))
            data = stream.readall()
        if data[: len(self._last)] != self._last:
            # Shorter than before, or cut and grown again: a failed write that we had read was undone.
            self._reset()
            return self._read_appended()
        *lines, rest = data[len(self._last) :].split(b"\n")
        bad: list[str] = []
        for number, raw in enumerate(lines, self._lines + 1):
            if raw.strip() and (error := self._index_line(raw, number)) is not None and number != self._torn:
                bad.append(f"{self.path}:{number}: skipped a line that is no record ({error})")
        if lines:
            self._advance(data[len(self._last) : len(data) - len(rest)])
            self._lines += len(lines)
            self._torn = 0
        for text in bad[:_MAX_SHOWN_LINES]:
            self._notes.add(text)
        if len(bad) > _MAX_SHOWN_LINES:
            self._notes.add(
                f"{self.path}: skipped {len(bad) - _MAX_SHOWN_LINES} more lines that are no records"
            )
        return rest

    def _advance(self, read: bytes) -> None:
        self._offset += len(read)
        self._last = read[-1:]

    def _index_line(self, raw: bytes, number: int) -> str | None:
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
                self.problems.setdefault(problem.id, problem)
        except MALFORMED as error:
            return f"{type(error).__name__}: {error}"[:200]
        return None
