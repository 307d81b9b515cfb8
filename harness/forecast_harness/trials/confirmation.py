"""The confirmation of a search's finalists: its contests, how long it may take, and its fresh lanes.

`judge.SandboxJudge.confirm` goes through the finalists; which contests are held is the kind of target's.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from forecast_harness.sandbox.api import SandboxError, SandboxLane
from forecast_harness.sandbox.lane_pools import Closable, close_lanes
from forecast_harness.trials.protocol import LaneFailure
from forecast_harness.trials.race import RaceRules

CONTESTS = 2
"""Contests of a finalist and the seed, each in processes of its own: it is faster where both say so, and the last one's
ratio is the one that counts, which was not selected for being large. A finalist that is not faster in one has no
other."""
_CONTEST_SHARE, _LEAST_CONTEST_S = 1 / 6, 2.0
"""The share of a confirmation's seconds for one contest: there are two, and the finalist is verified. A contest gets
two seconds in any case."""
_GRACE_S = 5.0
"""A confirmation is ended so long after its time is over."""
_LEAST_S = 120.0
"""No confirmation is ended before: the gain of a whole search hangs on it. An interpreter runs one program after the
other, and cases of a captured call of 100 MiB take seconds each."""
_GIVE_UP_AGAIN_S = 0.2


class ConfirmationLimit:
    """The limit of one confirmation, which begins now; without `seconds` there is none."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._began = seconds, time.perf_counter()
        self._most = None if seconds is None else max(seconds + _GRACE_S, _LEAST_S)
        self.is_over = False
        """Whether it was ended."""

    @property
    def spent(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._began

    @property
    def left(self) -> float:
        """Seconds until it should end."""
        return math.inf if self._seconds is None else self._seconds - self.spent

    def rules(self, usual: RaceRules) -> RaceRules:
        """The rules of each contest, with the seconds that it may last."""
        if self._seconds is None:
            return usual
        seconds = max(_LEAST_CONTEST_S, _CONTEST_SHARE * self._seconds)
        return replace(usual, seconds=min(usual.seconds, seconds), wall=min(usual.wall, seconds))

    def must_end(self, count: int) -> bool:
        """Whether there is no time for another finalist, which needs as long as these did on average.

        There always is for the first.
        """
        if self._seconds is None or not count:
            return False
        return self.spent * (count + 1) / count > self._seconds

    @contextmanager
    def enforced(self, give_up: Callable[[], None]) -> Iterator[None]:
        """Call `give_up`, again and again, once the body has taken too long."""
        if self._most is None:
            yield
            return
        finished = threading.Event()

        def watch() -> None:
            while not finished.wait(max(_GIVE_UP_AGAIN_S, (self._most or 0.0) - self.spent)):
                self.is_over = True
                give_up()

        watching = threading.Thread(target=watch, name="confirmation-limit", daemon=True)
        watching.start()
        try:
            yield
        finally:
            finished.set()
            watching.join()


T = TypeVar("T", bound=Closable)


class EarlyOpener(Generic[T]):
    """Opens an object at once, in the background; the first call waits for that object, each later one opens another.

    Its thread lives until `close`: processes may end with the thread that began them.
    """

    def __init__(self, make: Callable[[], T], give_up: Callable[[], None] = lambda: None) -> None:
        """`give_up` has what `make` is at fail soon; it may be called several times, also between two of its steps."""
        self._make, self._give_up = make, give_up
        self._opening = ThreadPoolExecutor(1, "early-opener")
        self._first: Future[T] = self._opening.submit(make)
        self._lock = threading.Lock()
        self._is_taken = False

    def __call__(self) -> T:
        """The next object. Raises what opening it raises."""
        with self._lock:
            is_first, self._is_taken = not self._is_taken, True
        return self._first.result() if is_first else self._make()

    @property
    def failure(self) -> BaseException | None:
        """Why the first could not be opened, as soon as that is known."""
        is_known = self._first.done() and not self._first.cancelled()
        return self._first.exception() if is_known else None

    def close(self) -> None:
        """End the opening, even if a thread waits for it, and close an object that nobody has taken."""
        if not self._first.cancel():
            while wait([self._first], 0.0).not_done:
                self._give_up()
                wait([self._first], _GIVE_UP_AGAIN_S)
            with self._lock:
                is_ours, self._is_taken = not self._is_taken, True
            if is_ours and self._first.exception() is None:
                self._first.result().close()
        self._opening.shutdown()


@dataclass
class ConfirmationLanes:
    """Lanes that no candidate has run in."""

    verifying: list[SandboxLane]
    """The first for the first kind of call; others for other kinds, as far as they could be opened."""
    racing: list[SandboxLane]
    """One for each contest that is made ready while a finalist is verified; without them one lane does it all."""

    def give_up(self) -> None:
        """End the jobs of these lanes."""
        for lane in (*self.verifying, *self.racing):
            lane.give_up()

    def close(self) -> None:
        """End all processes of these lanes."""
        close_lanes([*self.verifying, *self.racing])


class ConfirmationOpener:
    """Opens the lanes of a confirmation in the background, once `prepare` is called."""

    def __init__(self, open_lane: Callable[[], SandboxLane]) -> None:
        self._open_lane = open_lane
        self._verifying: list[EarlyOpener[SandboxLane]] = []
        self._racing: list[EarlyOpener[SandboxLane]] = []

    def prepare(self, verifying: int, racing: int) -> None:
        """Begin to open so many lanes, unless some are being opened already."""
        if not self._verifying:
            self._verifying = [EarlyOpener(self._open_lane) for _ in range(verifying)]
            self._racing = [EarlyOpener(self._open_lane) for _ in range(racing)]

    def take(self) -> ConfirmationLanes:
        """The lanes that were prepared, or one lane. Raises `LaneFailure` where not even the first can be opened."""
        (first, *others), racing = self._verifying or [EarlyOpener(self._open_lane)], self._racing
        self._verifying, self._racing = [], []
        try:
            return ConfirmationLanes([first(), *_open_lanes(others)], _open_lanes(racing))
        finally:
            close_lanes([first, *others, *racing])

    def close(self) -> None:
        """Close the lanes that nobody has taken."""
        openers, self._verifying, self._racing = [*self._verifying, *self._racing], [], []
        close_lanes(openers)


def _open_lanes(openers: list[EarlyOpener[SandboxLane]]) -> list[SandboxLane]:
    results = []
    for opener in openers:
        with suppress(LaneFailure, SandboxError):
            results.append(opener())
    return results
