"""Children that hang: a lock that another thread held when they were forked is never given back in them.

A process that compiles uses its processor. One that sleeps for ten seconds, together with all that it has started,
waits for something that will not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

HUNG_S = 10.0
"""Seconds of sleep after which a process counts as hung."""
_BUSY = "RDTt"
"""States in which Linux has a process that runs, waits for a disk, or was stopped by somebody."""


class HungProcesses:
    """Finds those that hang among leaders of process groups, from one look to the next. Only Linux tells."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._last: dict[int, tuple[int, float]] = {}
        """Processor ticks of each group, and since when they are so many."""

    def among(self, leaders: Iterable[int]) -> set[int]:
        """Leaders whose groups have slept since `HUNG_S` seconds ago. To be asked about once a second."""
        now = self._clock()
        used = processor_ticks(leaders)
        before, self._last = self._last, {}
        for leader, ticks in used.items():
            same = ticks is not None and leader in before and before[leader][0] == ticks
            self._last[leader] = (-1 if ticks is None else ticks, before[leader][1] if same else now)
        return {leader for leader, (_, since) in self._last.items() if now - since >= HUNG_S}


def processor_ticks(leaders: Iterable[int]) -> dict[int, int | None]:
    """Clock ticks that each process group has computed for; None where it is at work at this moment."""
    used: dict[int, int | None] = dict.fromkeys(leaders, 0)
    if not used:
        return used
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            stat = file.read_text()
        except OSError:
            continue  # it has ended meanwhile
        state, _, group, *rest = stat.rpartition(")")[2].split()
        pid = int(file.parent.name)
        leader = pid if pid in used else int(group)
        if (ticks := used.get(leader)) is not None:
            used[leader] = None if state in _BUSY else ticks + sum(map(int, rest[8:12]))
    return used
