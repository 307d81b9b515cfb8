"""What threads of one device share: the judge of host code, and whether what they are at is still asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forecast_harness.trials.judging.lane_judge import HostJudge
from forecast_harness.trials.protocol import LaneFailure

_GIVE_UP_AGAIN_S = 0.2
"""After which the judge of host code is told again to give up, where it was between two jobs of its sandbox."""
_LAST_JOB_S = 5.0
"""How long a job of host code may take after the end."""


class WorkUnderWay:
    """Ends jobs of other threads: each asks `check` before what is long or uses the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._own = threading.local()
        self._ended = threading.Event()
        self.given_up = 0
        """How often all that was under way was given up; a thread compares it with what it was when it began."""

    def begin(self) -> None:
        """This thread begins a job."""
        self._own.given_up = self.given_up

    def check(self) -> None:
        """Raises `LaneFailure` where nobody waits for this thread's job any more."""
        if self._ended.is_set():
            raise LaneFailure("the lanes are closed", self._device)
        if getattr(self._own, "given_up", self.given_up) != self.given_up:
            raise LaneFailure("given up", self._device)

    def give_up(self) -> None:
        """Have all jobs that have begun fail at their next check."""
        self.given_up += 1

    def end(self) -> None:
        """Have all jobs fail, also those that begin later."""
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether no job is to go on."""
        return self._ended.is_set()


class SharedHostJudge:
    """A judge of host code that is made when it is needed, and used by one thread at a time."""

    def __init__(self, make: Callable[[], HostJudge], work: WorkUnderWay) -> None:
        self._make, self._work = make, work
        self._mutex = threading.Lock()
        self._judge: HostJudge | None = None
        self._held_since = 0
        """What `given_up` was when its present job began."""
        self.is_timing = False
        """Whether it may be using the device for a time that counts."""

    @contextmanager
    def held(self, *, timing: bool) -> Iterator[HostJudge]:
        """The judge for one job, which may use the device's clock if `timing`. Raises `LaneFailure`."""
        while not self._mutex.acquire(timeout=_GIVE_UP_AGAIN_S):
            self._work.check()
            if self._held_since != self._work.given_up:
                self.give_up()
        try:
            self._held_since = self._work.given_up
            self._work.check()
            if self._judge is None:
                self._judge = self._make()
            self.is_timing = timing
            yield self._judge
        finally:
            self.is_timing = False
            self._mutex.release()

    def give_up(self) -> None:
        """End its job, if it has one."""
        if (judge := self._judge) is not None:
            judge.give_up()

    def close(self) -> None:
        """End it; another is made when it is needed.

        After the end of all work it is ended even if it is at a job, which it may be for a while before.
        """
        held = self._mutex.acquire(timeout=_LAST_JOB_S if self._work.has_ended else -1)
        try:
            judge, self._judge = self._judge, None
        finally:
            if held:
                self._mutex.release()
        if judge is not None:
            judge.close()
