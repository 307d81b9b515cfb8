"""What a server remembers of one job and of one cell that are running."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forecast_harness.sandbox.containment import linux
from forecast_harness.sandbox.jobs import ResourceLimits, printable

_TAIL_BYTES = 8 << 10
_DISK_CHECK_INTERVAL_S = 1.0
_MOST_ENTRIES = 20_000


@dataclass(slots=True)
class RunningJob:
    """A judge and its place."""

    pid: int
    number: int
    channel: socket.socket
    place: str
    limits: ResourceLimits
    code: int | None = None
    why: str = ""
    tails: tuple[str, str] = ("", "")
    """stdout and stderr of the cell that ended last."""
    left: int = 0
    """Processes that survived SIGKILL: they hang in a driver."""
    deadline: float = 0.0

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.limits.trusted_s


@dataclass(slots=True)
class RunningCell:
    """A keeper and what lies below it."""

    pid: int
    number: int
    limits: ResourceLimits
    out: int
    err: int
    status: int
    place: str = ""
    """The scratch directory's parent where no sized file system limits it, else empty."""
    name: str = ""
    """Under which a later job may ask for it; empty for a cell that ends with its job."""
    ends: tuple[socket.socket, ...] = ()
    """The judge's of its channels, where there may be another judge."""
    rests: bool = False
    """Whether no job has it now."""
    why: str = ""
    closed: set[int] = field(default_factory=set)
    began: float = field(default_factory=time.monotonic)
    _tails: dict[int, bytes] = field(default_factory=dict)
    _counted: float = 0.0

    def keep_tail(self, stream: int, block: bytes) -> None:
        """Remember the end of a stream."""
        self._tails[stream] = (self._tails.get(stream, b"") + block)[-_TAIL_BYTES:]

    def tail(self, stream: int) -> str:
        """What is remembered of it."""
        return printable(self._tails.get(stream, b"").decode(errors="replace"))

    def exceeded(self, now: float, warm_bytes: int, own: int) -> str:
        """Which limit is exceeded, if any.

        `warm_bytes`: private memory that every fork of the server begins with; `own`: how many processes at
        the top of the tree are ours.
        """
        if now - self.began > self.limits.wall_s:
            return "timeout"
        tree = [self.pid, *linux.descendants(self.pid)][own:]
        facts = [linux.memory_and_threads(pid) for pid in tree]
        if sum(threads for _, threads in facts) > self.limits.processes:
            return "processes"
        grown = sum(max(0, held - warm_bytes) for held, _ in facts)
        if grown > self.limits.memory_bytes and _proportional_memory(tree) > self.limits.memory_bytes:
            return "memory"
        if self.place and now - self._counted > _DISK_CHECK_INTERVAL_S:
            self._counted = now
            if _stored_bytes(self.place) > self.limits.output_bytes:
                return "storage"
        return ""

    def report(self) -> dict[str, Any]:
        """How it ended, for the judge. Reads and closes the status pipe."""
        os.set_blocking(self.status, False)
        try:
            line = os.read(self.status, 4096).partition(b"\n")[0]
        except BlockingIOError:  # somebody still holds the other end
            line = b""
        os.close(self.status)
        said = json.loads(line) if line else {}
        return {"cell": self.number, "why": self.why, **said}


def _proportional_memory(pids: list[int]) -> int:
    """Private memory of processes in bytes, pages that they share with each other counted once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            name, _, rest = line.partition(":")
            if name in ("Pss_Anon", "Pss_Shmem"):
                total += int(rest.split()[0]) * 1024
    return total


def _stored_bytes(place: str) -> int:
    """Bytes of all files below a directory; a huge number when there are too many to count."""
    total = count = 0
    for folder, _, files in os.walk(place):
        for name in files:
            count += 1
            if count > _MOST_ENTRIES:
                return 1 << 62
            try:
                total += Path(folder, name).lstat().st_blocks * 512
            except OSError:
                continue
    return total
