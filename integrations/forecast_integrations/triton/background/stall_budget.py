"""How much launch time the timing of candidates may take: so many milliseconds a second, saved up for one second."""

from __future__ import annotations

import time
from collections.abc import Callable


class StallBudget:
    """A process's milliseconds for timing. What a launch took too much is paid back before the next one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self.clock = clock
        self._spent_ms = 0.0
        self._at = clock()

    def left_ms(self, ms_per_second: float) -> float:
        """Milliseconds to spend now: at most one second's, below zero after a launch that took too much."""
        now = self.clock()
        self._spent_ms = max(0.0, self._spent_ms - ms_per_second * (now - self._at))
        self._at = now
        return ms_per_second - self._spent_ms

    def charge(self, ms: float) -> None:
        """Note milliseconds as spent, or given back where they are below zero."""
        self._spent_ms = max(0.0, self._spent_ms + ms)
