"""A trace file in Chrome's JSON array format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing show.

The array is open while the program runs: every event is one write within one page, which a kill does not cut, so that
a file whose program was killed lacks nothing but the closing bracket, which those who read the format do without.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

from forecast_autotune.printable import LONGEST_NAME, printable
from forecast_autotune.telemetry.exporter import Attributes

LARGEST_FILE = 64 << 20
"""Bytes after which spans are left out."""
_END = b"\n]\n"
_PAGE_BYTES = 4096
"""A write is done page by page, and a kill may come between two. Linux has no smaller pages."""
_FIRST_LANE = 1 << 30
"""Thread ids of lanes: above those of Linux."""


class TraceFile:
    """Writes what one process does; a process that was forked from it writes a file of its own."""

    def __init__(self, path: Path, limit: int = LARGEST_FILE, *, at_once: bool = True) -> None:
        """Begin the file, `at_once` or with the first event: most processes of a program have none.

        Another process that writes to `path` keeps it: then this one's has its id in the name. Raises OSError where
        neither can be written.
        """
        self._wanted, self._limit = path.absolute(), limit
        self._mutex = threading.RLock()
        self._pid, self._file, self._closed = 0, -1, True
        if at_once:
            self._open()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_mutex)

    def _open(self) -> None:
        self._closed = True  # until there is a file
        self._pid, self._size, self._full = os.getpid(), 0, False
        self._named: set[int] = set()
        self._lanes: dict[str, list[tuple[int, float]]] = {}
        self._lane_count = 0
        self._totals: dict[str, float] = {}
        self.path, self._file = _open_alone(self._wanted)
        self._closed = False
        rank = os.environ.get("RANK", "")
        name = Path(sys.argv[0] if sys.argv else "").name or "python"
        self._write(self._meta("process_name", 0, f"{name}{f' (rank {rank})' if rank else ''}"))
        if rank.isascii() and rank.isdigit() and len(rank) < 9:
            self._write(
                {"name": "process_sort_index", "ph": "M", "pid": self._pid, "args": {"sort_index": int(rank)}}
            )

    def _renew_mutex(self) -> None:
        self._mutex = threading.RLock()  # another thread may have held it when this process was forked

    def begin(self, name: str, attributes: Attributes) -> object:
        """As `TelemetryExporter`; the token is the process whose file has the beginning, if it was written."""
        with self._mutex:
            self._open_own()
            return self._pid if self._write(self._event("B", name, attributes)) else None

    def end(self, token: object, attributes: Attributes, failed: bool) -> None:
        """As `TelemetryExporter`."""
        if token == os.getpid():
            with self._mutex:
                self._write(
                    self._event("E", "", {**attributes, **({"failed": True} if failed else {})}), True
                )

    def record(self, name: str, lane: str, begin_s: float, end_s: float, attributes: Attributes) -> None:
        """As `TelemetryExporter`; of spans of a lane that overlap each has a row of its own."""
        with self._mutex:
            self._open_own()
            event = self._event("X", name, attributes)
            event["ts"], event["dur"] = _microseconds(begin_s), _microseconds(end_s - begin_s)
            event["tid"] = self._row(lane, begin_s, end_s)
            self._write(event)

    def count(self, counter: str, amount: float, attributes: Attributes) -> None:
        """As `TelemetryExporter`; the file shows sums over this process."""
        with self._mutex:
            self._open_own()
            self._totals[counter] = self._totals.get(counter, 0) + amount
            event = self._event("C", counter, {counter: round(self._totals[counter], 3)})
            self._write(event)

    def close(self) -> None:
        """Close the array: from here on the file is JSON."""
        with self._mutex:
            if self._pid != os.getpid():
                return
            if not self._closed:
                self._closed = True
                with contextlib.suppress(
                    OSError
                ):  # without its end it is what a killed program leaves behind
                    if os.write(self._file, _END) < len(_END):
                        os.ftruncate(self._file, self._size)
                os.close(self._file)

    def _open_own(self) -> None:
        """Begin the file of this process, unless that was done."""
        if self._pid != os.getpid():
            if self._file >= 0:
                os.close(self._file)  # of the process that this one was forked from
                self._file = -1
            self._open()

    def _event(self, phase: str, name: str, attributes: Attributes) -> dict[str, Any]:
        thread = threading.get_native_id()
        if thread not in self._named:
            self._named.add(thread)
            self._write(self._meta("thread_name", thread, threading.current_thread().name))
        event: dict[str, Any] = {"name": name, "cat": "forecast_autotune", "ph": phase}
        event |= {"ts": _microseconds(time.perf_counter()), "pid": self._pid, "tid": thread}
        if not name:
            del event["name"]
        if attributes:
            event["args"] = dict(attributes)
        return event

    def _meta(self, name: str, thread: int, value: str) -> dict[str, Any]:
        shown = {"name": printable(value, LONGEST_NAME)}
        return {"name": name, "ph": "M", "pid": self._pid, "tid": thread, "args": shown}

    def _row(self, lane: str, begin_s: float, end_s: float) -> int:
        rows = self._lanes.setdefault(lane, [])
        for number, (thread, busy_until) in enumerate(rows):
            if busy_until <= begin_s:
                rows[number] = thread, end_s
                return thread
        thread = _FIRST_LANE + self._lane_count
        self._lane_count += 1
        rows.append((thread, end_s))
        self._write(self._meta("thread_name", thread, f"{lane} {len(rows)}"))
        return thread

    def _write(self, event: dict[str, Any], beyond_limit: bool = False) -> bool:
        """Whether it was written. Raises OSError, and leaves whole events behind."""
        if self._closed or (self._full and not beyond_limit):
            return False
        text = json.dumps(_without_inf(event), separators=(",", ":"))
        raw = ((",\n" if self._size else "[\n") + text).encode()
        if not self._full and self._size + len(raw) > self._limit:
            self._full = True
            self._write(
                {
                    "name": f"the trace is full: no more than {self._limit:,} bytes are written",
                    **{"ph": "i", "s": "g", "ts": _microseconds(time.perf_counter())},
                    **{"pid": self._pid, "tid": threading.get_native_id()},
                },
                beyond_limit=True,
            )
            return beyond_limit and self._write(event, beyond_limit=True)
        left = -self._size % _PAGE_BYTES
        if left < len(raw) <= _PAGE_BYTES:
            self._append(b" " * left)
        self._append(raw)
        return True

    def _append(self, raw: bytes) -> None:
        """Raises OSError, and leaves behind what was there."""
        written = 0
        try:
            while written < len(raw):
                written += os.write(self._file, raw[written:])
        except OSError:
            with contextlib.suppress(OSError):  # half an event would spoil all of them
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(raw)


def _without_inf(event: dict[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    if not args:
        return event
    finite = {k: v if not isinstance(v, float) or abs(v) < float("inf") else str(v) for k, v in args.items()}
    return {**event, "args": finite}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _open_alone(path: Path) -> tuple[Path, int]:
    """A file that no other process writes to: `path`, else the same with this process's id. Raises OSError."""
    own = path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
    for place in (path, own):
        file = os.open(place, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        if _lock(file):
            break
        os.close(file)
    else:
        raise BlockingIOError(f"other processes write to {path} and {own}: name another file")
    if stat.S_ISREG(os.fstat(file).st_mode):
        os.ftruncate(file, 0)
    return place, file


def _lock(file: int) -> bool:
    """Whether this process alone may write; where there are no locks, it is taken for granted."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
