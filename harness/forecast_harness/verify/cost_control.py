"""What takes seconds at large sizes: how often to do it, at moments nobody can foresee; where they went."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from forecast_harness.clocks.devices import device_count
from forecast_harness.sandbox.containment.confine import GPUS

_TYPICAL_LAUNCHES = 200
"""Launches of one workload in a duel that takes its time."""
_REMEMBERED_COSTS, _FEWEST_COSTS = 9, 3
_FEWEST_THREADS, _MOST_THREADS = 4, 8


class SamplingBudget:
    """One kind of work whose cost is found out by doing it."""

    def __init__(
        self, seconds: float, clock: Callable[[], float] = time.perf_counter, *, long_s: float = 1.0
    ) -> None:
        """`seconds`, by `clock`: what it may cost on average during 200 launches of a workload.

        `long_s`: seconds of a first time that count at once; what takes less is done a few times before.
        """
        self._allowed, self._clock, self._long_s = seconds, clock, long_s
        self._costs: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED_COSTS))

    def launch_share(self, name: str, usual: float) -> float:
        """The share of launches to do it at: `usual`, or less where it takes long.

        An independent coin per launch: a budget that could run out would tell when nothing is looked at any
        more.
        """
        cost = statistics.median(self._costs[name]) if self._costs[name] else 0.0
        if len(self._costs[name]) < _FEWEST_COSTS and cost < self._long_s:
            return usual  # the first time may have to learn what later ones know
        return min(usual, self._allowed / (_TYPICAL_LAUNCHES * cost)) if cost else usual

    def note(self, name: str, seconds: float) -> None:
        """It took so long the last time; the median of the latest times counts, as a few take much longer."""
        self._costs[name].append(seconds)

    @contextmanager
    def measure_cost(self, name: str) -> Iterator[None]:
        """Notice how long the body takes."""
        begin = self._clock()
        yield
        self.note(name, self._clock() - begin)


class PhaseTimer:
    """Seconds by kind of work."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, kind: str, seconds: float) -> None:
        """So many more of them."""
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    @contextmanager
    def phase(self, kind: str) -> Iterator[None]:
        """Count what the body takes, however it ends."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, time.perf_counter() - begin)

    def to_json(self) -> dict[str, float]:
        """All kinds, in milliseconds' precision."""
        return {kind: round(seconds, 3) for kind, seconds in sorted(self._seconds.items())}


@contextmanager
def use_more_cores() -> Iterator[None]:
    """Let torch use half of this device's share of the cores (at most 8) for a while: nobody is timed on it.

    Every other device of the machine may have a lane that does the same, or is timing. On few cores threads
    that wait for each other at every operation lose more than they gain.
    """
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) // (2 * max(1, device_count(), len(list(GPUS.glob("*")))))
    if cores >= _FEWEST_THREADS:
        torch.set_num_threads(min(_MOST_THREADS, cores))
    try:
        yield
    finally:
        torch.set_num_threads(before)
