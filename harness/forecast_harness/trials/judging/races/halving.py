"""The order of a race: rungs of successive halving, then fresh blocks of the winner. Knows no device."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from forecast_harness.clocks.paired_comparison import PairedClock, SignTest, measure_block
from forecast_harness.trials.judging.races.rules import RaceRules, standard_error
from forecast_harness.verify.timing_job import ContestantRejected

C = TypeVar("C", bound=PairedClock)


class HalvingRace:
    """Runs blocks and counts what they cost."""

    def __init__(self, rules: RaceRules, rng: random.Random) -> None:
        self._rules, self._rng = rules, rng
        self.spent = 0.0
        """Seconds of launches."""

    def run_rungs(
        self,
        clocks: dict[int, C],
        drop: Callable[[int, ContestantRejected], None],
        retire: Callable[[int], None] = lambda n: None,
    ) -> dict[int, float]:
        """Drop the slower half, with twice the blocks each time, until at most one clock is left.

        `drop` is told of one that was caught, `retire` of one that is slower; both are removed from
        `clocks`. Successive halving (Karnin, Koren and Somekh 2013; Jamieson and Talwalkar 2016). Returns the
        median difference of each when it was last timed.
        """
        ranking: dict[int, float] = {}
        blocks = self._rules.rung
        while len(clocks) > 1:
            for n in list(clocks):
                try:
                    ranking[n] = statistics.median(self._measure_block(clocks[n]) for _ in range(blocks))
                except ContestantRejected as found:
                    del clocks[n]
                    drop(n, found)
            order = sorted(clocks, key=lambda n: (-ranking[n], n))
            for n in order[-(-len(order) // 2) :] if len(order) > 1 else []:
                del clocks[n]
                retire(n)
            blocks *= 2
        return ranking

    def time_winner(self, clock: PairedClock) -> tuple[list[float], str]:
        """Fresh blocks of the winner until it is known well enough, and why that was.

        Blocks of the race are left out: they were selected for being fast. Raises `ContestantRejected`.
        """
        rules, found = self._rules, list[float]()
        faster, slower = SignTest(0.0), SignTest(0.0)
        began, since = self.spent, time.perf_counter()
        while True:
            found.append(self._measure_block(clock))
            faster.add(found[-1])
            slower.add(-found[-1])
            n = len(found)
            if n == rules.first and max(found) < -rules.hopeless:
                return found, "hopeless"
            if n >= rules.least:
                if slower.reached(rules.alpha):
                    return found, "slower"
                if standard_error(found) <= rules.precise * math.log(2):
                    return found, "precise"
                if faster.reached(rules.alpha) and n >= 2 * rules.least:
                    return found, "faster"
            late = time.perf_counter() - since >= rules.wall
            if n >= rules.most or late or self.spent - began >= rules.seconds:
                return found, "budget"

    def _measure_block(self, clock: PairedClock) -> float:
        difference, taken = measure_block(clock, self._rng)
        self.spent += taken
        return difference
