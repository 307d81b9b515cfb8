"""Invented times of two contestants."""

from __future__ import annotations

import math
import random
from collections.abc import Callable


class SimulatedPairedClock:
    """Invented times: log-normal noise, slow drift, bursts of a co-tenant.

    gain: how much shorter the candidate's true time is, 0.02 is 2 %; noise: standard deviation of the log
    of one launch; drift: amplitude of a slow wave that meets whoever runs then; burst: probability that a
    launch meets a co-tenant, which adds half of its time.
    """

    def __init__(
        self,
        seconds: float,
        gain: float = 0.0,
        *,
        noise: float = 0.02,
        drift: float = 0.0,
        burst: float = 0.0,
        seed: int = 0,
    ) -> None:
        self._seconds = (seconds, seconds * (1 - gain))
        self._noise, self._drift, self._burst = noise, drift, burst
        self._rng = random.Random(seed)
        self.spent = 0.0
        """Seconds of device time so far."""
        self._launches = 0

    def sample(self, which: int, fresh: bool) -> float:
        """Seconds of one invented launch."""
        self._launches += 1
        wave: Callable[[float], float] = math.sin
        log = self._rng.gauss(0, self._noise) + self._drift * wave(self._launches / 37)
        if self._rng.random() < self._burst:
            log += math.log(1.5)
        taken = self._seconds[which] * math.exp(log)
        self.spent += taken
        return taken
