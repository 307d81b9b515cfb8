"""Stop and resume all processes of a candidate as one, from the first process of its cell.

A signal to a process alone would miss those that it is about to start. In a process namespace of its own one
`kill(-1)` reaches everybody: the kernel sends it under the lock that a fork needs, so none slips through.
"Stopped" is then checked by the kernel's account of processor time, which is exact to the nanosecond: a
process that wakes itself (a timer may send it SIGCONT) has used some, however it managed to.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from forecast_harness.sandbox.containment import linux
from forecast_harness.sandbox.wire import map_shared

STOP, CHECK, RESUME, SHARE, COPY = b"S", b"?", b"C", b"M", b"R"
"""Questions: `STOP` is answered by a report at once, and by the number of processes that go on once all others
stand still; `CHECK` by the number of processes that have not stood still since; `RESUME` and `SHARE` by nothing.
`SHARE` comes with a descriptor and a size, `COPY` with places `[address, bytes, offset]` in JSON: memory of the
stopped cell is copied to offsets in the shared memory; the answer is the number of places that it does not have."""

_MOST_SETTLING_S = {True: 10.0, False: 2.0}
"""Seconds until processes that go on are counted, with a namespace and without. With one, none can be started any
more, and the rest only wait for a processor, on which they will stop."""
_PASS_S = 0.0003
_LATE_NS, _MOST_LATE = 100_000, 3
"""A process that another one takes the processor from within its last instructions before it stands still counts as
stopped, and needs some microseconds more when it gets one: so little, so often in a cell's life, is none of its doing.
Not more: it gains nothing by it."""
_STANDING_STATES = "TtZXD"
"""Stopped, traced, dead, or within a system call after which it will stop."""


class ProcessStopper:
    """Stops and resumes all processes of a cell but its first, in which this runs."""

    def __init__(self, own_namespace: bool, cell: int) -> None:
        """`own_namespace`: whether this is the first process of a process namespace of its own; `cell`: the
        process that answers the judge."""
        self._alone, self._cell = own_namespace, cell
        self._memory: mmap.mmap | None = None
        self._times: dict[int, int] = {}
        self._waiting: frozenset[int] = frozenset()
        self._late = 0

    def answer(self, request: bytes, descriptors: Sequence[int], channel: socket.socket) -> None:
        """Answer a question of the judge, on the other end of `channel`."""
        question, rest = request[:1], request[1:]
        if question == SHARE:
            self._memory = map_shared(descriptors[0], int(rest))
            os.close(descriptors[0])
        elif question == COPY:
            channel.send(b"%d" % sum(not self._copy(*place) for place in json.loads(rest)))
        elif question == STOP:
            self._signal(signal.SIGSTOP)
            channel.send(b"stopped")
            channel.send(b"%d" % self._settle())
        elif question == CHECK:
            channel.send(b"%d" % self._count_running())
        elif question == RESUME:
            self._signal(signal.SIGCONT)

    def _copy(self, address: int, size: int, offset: int) -> bool:
        if self._memory is None or not 0 <= offset <= offset + size <= len(self._memory):
            return False
        return linux.read_process_memory(
            self._cell, address, memoryview(self._memory)[offset : offset + size]
        )

    def _signal(self, number: signal.Signals) -> None:
        if self._alone:
            with contextlib.suppress(ProcessLookupError):  # nobody is left
                os.kill(-1, number)
            return
        for pid in linux.descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, number)

    def _processes(self) -> list[int]:
        own = os.getpid()
        if not self._alone:
            return linux.descendants(own)
        names = [place.name for place in Path("/proc").iterdir()]
        return [int(name) for name in names if name.isdigit() and int(name) != own]

    def _settle(self) -> int:
        """Wait until all stand still; the number that do not, as they fork faster than they can be stopped."""
        before: dict[int, int] | None = None
        running: list[int] = []
        limit = time.monotonic() + _MOST_SETTLING_S[self._alone]
        while time.monotonic() < limit:
            states = {pid: linux.task_states(pid) for pid in self._processes()}
            running = [pid for pid, result in states.items() if set(result) - set(_STANDING_STATES)]
            self._times = {pid: linux.processor_time_ns(pid) for pid, result in states.items() if result}
            self._waiting = frozenset(pid for pid, result in states.items() if "D" in result)
            if not running and self._times == before:  # seen twice, as a fork may fall between
                return 0
            before = self._times
            if running:
                if not self._alone:
                    self._signal(signal.SIGSTOP)
                time.sleep(_PASS_S)
        return max(1, len(running))

    def _count_running(self) -> int:
        """The number of processes that have used a processor since they were stopped, or are new."""
        count = 0
        for pid in self._processes():
            if pid in self._waiting or not set(linux.task_states(pid)) - set("ZX"):
                continue
            before, now = self._times.get(pid, -1), linux.processor_time_ns(pid)
            if before == now:
                continue
            if 0 <= before < now <= before + _LATE_NS and self._late < _MOST_LATE:
                self._late += 1
                self._times[pid] = now
            else:
                count += 1
        return count
