"""Lanes that have nothing to do, for whoever waits for one."""

from __future__ import annotations

import threading
from collections import deque

from forecast_harness.sandbox.lane import SandboxLane


class FreeLanes:
    """Some lanes are kept for quick jobs, which need not wait for long ones; any other lane does either."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: deque[SandboxLane] = deque()
        self._others: deque[SandboxLane] = deque()
        self._own: set[SandboxLane] = set()
        """Lanes that are kept for quick jobs, free or not."""
        self._none_comes = False

    def keep(self, lane: SandboxLane) -> None:
        """Add a lane for quick jobs alone."""
        with self._changed:
            self._own.add(lane)
        self.put(lane)

    def put(self, lane: SandboxLane) -> None:
        """A lane is free: a new one, or one that has done its job."""
        with self._changed:
            (self._kept if lane in self._own else self._others).append(lane)
            self._changed.notify_all()

    def end(self) -> None:
        """No lane comes any more: nobody waits for one."""
        with self._changed:
            self._none_comes = True
            self._changed.notify_all()

    def take(self, *, quick: bool = False) -> SandboxLane | None:
        """The lane that has been free the longest; waits for one. None where none comes."""
        with self._changed:
            self._changed.wait_for(lambda: (quick and self._kept) or self._others or self._none_comes)
            if quick and self._kept:
                return self._kept.popleft()
            return self._others.popleft() if self._others else None
