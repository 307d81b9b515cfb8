"""The log of a search: JSON Lines that only grow, on the disk before anything relies on them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.records import codec
from forecast_autotune.records.json_fields import decode_json
from forecast_autotune.store.files import (
    acquire_lock,
    host_name,
    release_lock,
    write_atomically,
)
from forecast_harness.records import SearchContext
from forecast_harness.sandbox.jobs import Resource
from forecast_harness.search.events import Event, Started, from_json, to_json

_REMEDY = "nothing before it is lost: free space or make the folder writable, then start the search again"


class SearchLog(Resource):
    """A log that this process, and no other, may append to. Use as a context, or `close` it.

    Made by `SearchLog.create` or `SearchLog.open`; `read_log` is for those who only look.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        """Events in the log, oldest first, as they read from the disk."""
        self._lock = _take_log_lock(path)
        self._stream: int | None = None
        self._size = 0

    @classmethod
    def create(cls, path: Path, started: Started) -> SearchLog:
        """Start a log. Raises `StoreError` where it cannot be written, or holds events already."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{path.parent} cannot be made: {error}; name a folder that can be") from error
        log = cls(path)
        try:
            log._open_file()
            if log.events:
                raise StoreError(
                    f"{path} holds {len(log.events)} events of an earlier search: continue that one, or name "
                    "another folder"
                )
            log.append(started)
        except BaseException:
            log.close()
            raise
        return log

    @classmethod
    def open(cls, path: Path, context: SearchContext) -> SearchLog:
        """Continue a log; a last line that a kill cut short is dropped from the file.

        Raises `RecordError` where `context` is not the one that it was started with, listing what differs,
        or where a line is no event; `StoreError` where another process writes to it or it is not writable.
        """
        if not path.is_file():
            raise StoreError(f"{path} does not exist: there is no search to continue in {path.parent}")
        log = cls(path)
        try:
            log._open_file()
            started = log.events[0] if log.events else None
            if not isinstance(started, Started):
                raise RecordError(f"{path} does not begin with a `started` event: it is not a search's log")
            if differences := context_differences(started.context, context):
                text = "\n".join(f"  {line}" for line in differences)
                raise RecordError(
                    f"{path} was started with another context, so its results do not carry over:\n{text}\n"
                    "Search as before to continue it, or name another folder to start anew."
                )
        except BaseException:
            log.close()
            raise
        return log

    def append(self, event: Event) -> Event:
        """Write an event, and return it as it will be read: on the disk when this returns.

        Raises `RecordError` for values that JSON cannot hold and `StoreError` where the disk refuses; the
        log is as before then.
        """
        raw = encode(event)
        record = decode(raw)
        if self._stream is None:
            raise StoreError(f"{self.path} is closed")
        try:
            size = 0
            while size < len(raw):
                size += os.write(self._stream, raw[size:])
            os.fsync(self._stream)
        except OSError as error:
            self._truncate()
            raise StoreError(f"{self.path}: an event cannot be written ({error}); {_REMEDY}") from error
        self._size += len(raw)
        self.events.append(record)
        return record

    def close(self) -> None:
        """Let others write."""
        if self._stream is not None:
            os.close(self._stream)
            self._stream = None
        if self._lock is not None:
            _owner_file(self.path).unlink(missing_ok=True)
        release_lock(self._lock)
        self._lock = None

    def _open_file(self) -> None:
        try:
            self._stream = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            raw = self.path.read_bytes()
        except OSError as error:
            raise StoreError(f"{self.path} cannot be opened for writing ({error}); {_REMEDY}") from error
        self.events, self._size = parse_log(raw, self.path)
        if self._size < len(raw):
            self._truncate()

    def _truncate(self) -> None:
        """Cut what is behind the last whole event."""
        if self._stream is not None:
            try:
                os.ftruncate(self._stream, self._size)
                os.fsync(self._stream)
            except OSError as error:
                # A torn line would swallow the next one.
                os.close(self._stream)
                self._stream = None
                raise StoreError(
                    f"{self.path}: a torn line cannot be removed ({error}); {_REMEDY}"
                ) from error


def read_log(path: Path) -> tuple[Event, ...]:
    """The events of a log, for looking at: takes no lock, changes nothing, leaves out a torn last line.

    Raises `RecordError` for lines that are no events and `StoreError` for a file that cannot be read.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    return tuple(parse_log(raw, path)[0])


def encode(event: Event) -> bytes:
    """One event as a line: pure ASCII, so that no tear falls inside a character. Raises `RecordError`."""
    try:
        return json.dumps(to_json(event), separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(
            f"a {type(event).__name__} event holds JSON values only, no NaN and no objects: {error}"
        ) from error


def decode(raw: bytes) -> Event:
    """Read what `encode` wrote. Raises `RecordError`, also where an event breaks a rule of its class."""
    return from_json(json.loads(raw))


def parse_log(raw: bytes, path: Path) -> tuple[list[Event], int]:
    """Events of a log's bytes, and the length of their lines: a kill cut short the bytes behind it.

    Raises `RecordError` naming the first whole line that is no event.
    """
    end = raw.rfind(b"\n") + 1
    events: list[Event] = []
    for number, line in enumerate(raw[:end].split(b"\n")[:-1], 1):
        try:
            events.append(from_json(decode_json(line.decode("utf-8"))))
        except (ValueError, TypeError, RecursionError) as error:
            raise RecordError(
                f"{path}:{number}: not an event ({error}); the log was changed by hand or by a failing disk: "
                f"restore it, or cut it before line {number}"
            ) from error
    return events, end


def context_differences(before: SearchContext, after: SearchContext) -> list[str]:
    """The differences, one line per field: `settings.k: 4 in the log, 6 now`."""
    old, new = _flatten(codec.to_json(before)), _flatten(codec.to_json(after))
    return [
        f"{name}: {_value_text(old, name)} in the log, {_value_text(new, name)} now"
        for name in sorted(old.keys() | new.keys())
        if old.get(name, _ABSENT) != new.get(name, _ABSENT)
    ]


_ABSENT = object()


def _value_text(values: Mapping[str, Any], name: str) -> str:
    return json.dumps(values[name]) if name in values else "absent"


def _flatten(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            flat |= _flatten(inner, f"{before}{name}.")
        else:
            flat[before + name] = inner
    return flat


def _owner_file(path: Path) -> Path:
    return path.with_name(path.name + ".writer")


def _take_log_lock(path: Path) -> Any:
    """The lock of a log, which dies with its holder. Raises `StoreError` naming who has it."""
    try:
        lock = acquire_lock(path.with_name(path.name + ".lock"), 0.2, 0.02)
    except TimeoutError:
        try:
            who = _owner_file(path).read_text(encoding="utf-8")
        except OSError:
            who = "another process"
        raise StoreError(
            f"{path} is being written by {who}: wait for it or end it; to look on, use the report"
        ) from None
    if lock is None:
        raise StoreError(f"{path.parent} cannot be written, or its file system has no locks; {_REMEDY}")
    try:
        write_atomically(_owner_file(path), f"process {os.getpid()} on {host_name()}".encode())
    except OSError as error:
        release_lock(lock)
        raise StoreError(f"{path.parent} cannot be written ({error}); {_REMEDY}") from error
    return lock
