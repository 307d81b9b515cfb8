"""Lanes that have nothing to do, for whoever waits for one."""

from __future__ import annotations

import threading
from collections import deque

from forecast_harness.sandbox.lane import SandboxLane


class FreeLanes:
    """Some lanes are kept for quick jobs, which need not wait for long ones; any other lane does either.

    What is to be compiled next depends on quick jobs, so that they go first: a long one that waits is one of many.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: deque[SandboxLane] = deque()
        self._others: deque[SandboxLane] = deque()
        self._own: set[SandboxLane] = set()
        """Lanes that are kept for quick jobs, free or not."""
        self._quick_waiting = 0
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
            self._quick_waiting += quick
            try:
                self._changed.wait_for(lambda: self._none_comes or self._has_one(quick))
            finally:
                self._quick_waiting -= quick
            found = self._kept if quick and self._kept else self._others
            return found.popleft() if found else None

    def _has_one(self, quick: bool) -> bool:
        if quick:
            return bool(self._kept or self._others)
        return len(self._others) > max(0, self._quick_waiting - len(self._kept))
