"""The confirmation of a search's finalists: its contests, and how long it may take.

`judge.SandboxJudge.confirm` goes through the finalists; which contests are held is the kind of target's.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from forecast_harness.trials.race import RaceRules

CONTESTS = 2
"""Contests of a finalist and the seed, each in processes of its own: it is faster where both say so, and the last one's
ratio is the one that counts, which was not selected for being large. A finalist that is not faster in one has no
other."""
_CONTEST_SHARE, _LEAST_CONTEST_S = 1 / 6, 2.0
"""The share of a confirmation's seconds for one contest: there are two, and the finalist is verified. A contest gets
two seconds in any case."""
_GRACE_S = 5.0
"""Beyond its seconds, after which a confirmation is ended."""
_LEAST_S = 120.0
"""Before which none is ended: the gain of a whole search hangs on it. An interpreter runs one program after the other,
and cases of a captured call of 100 MiB take seconds each."""
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
        """How long each contest may last."""
        if self._seconds is None:
            return usual
        each = max(_LEAST_CONTEST_S, _CONTEST_SHARE * self._seconds)
        return replace(usual, seconds=min(usual.seconds, each), wall=min(usual.wall, each))

    def must_end(self, done: int) -> bool:
        """Whether there is no time for another finalist, which needs as long as the `done` ones did on average.

        There always is for the first.
        """
        if self._seconds is None or not done:
            return False
        return self.spent * (done + 1) / done > self._seconds

    @contextmanager
    def enforced(self, give_up: Callable[[], None]) -> Iterator[None]:
        """Call `give_up`, again and again, once the body has taken too long."""
        if self._most is None:
            yield
            return
        done = threading.Event()

        def watch() -> None:
            while not done.wait(max(_GIVE_UP_AGAIN_S, (self._most or 0.0) - self.spent)):
                self.is_over = True
                give_up()

        watching = threading.Thread(target=watch, name="confirmation-limit", daemon=True)
        watching.start()
        try:
            yield
        finally:
            done.set()
            watching.join()
