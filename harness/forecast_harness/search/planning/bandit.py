"""Which arms (proposer and style) a batch's proposals are asked of: Thompson sampling on gain per cost.

For an arm with n proposals, of which the measured ones gained g_i = max(0, -log2_ratio) each against the
incumbent of its time (0 for a proposal that was no news, was not chosen, failed or was slower):

    mean = (sum g + m0) / (n + 1)          m0 = the best arm's mean, or `PRIOR_GAIN`: an untried arm looks good
    sd   = sqrt(v / ((n + k) / 2 + 1))     v  = pooled mean of g^2, at least `MIN_GAIN_SD`^2; k were measured
    cost = 1 + seconds of proposing per proposal / seconds of judging per measurement

A slot goes to the arm with the highest draw of N(mean, sd) / cost (times cost, where the draw is a loss).
Draws come from a generator seeded with the digest of what the caller names, so a replay allots alike. Cost is
in measurements: an arm whose proposals cost nothing next to a measurement has cost 1, whatever it asks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from forecast_autotune.records import digest
from forecast_harness.search.history.batches import ArmStats

PRIOR_GAIN = 0.05
"""What a proposal of an arm that nothing is known of may gain, in log2: 3.5 %."""
MIN_GAIN_SD = 0.02
"""Smallest standard deviation of a single gain: below it an arm would never be tried again."""


def allocate(arms: Sequence[str], stats: Mapping[str, ArmStats], n: int, seed: object) -> dict[str, int]:
    """How many of `n` proposals each arm is asked for; only arms with one or more, in the order of `arms`.

    While there are arms that were never asked, each of them gets its share of the slots first.
    """
    if not arms or n <= 0:
        return {}
    chance = random.Random(digest("bandit", seed))
    count = dict.fromkeys(arms, 0)
    fresh = [a for a in arms if stats.get(a, ArmStats()).requests == 0]
    share = n // len(arms)
    for arm in fresh:
        count[arm] = share
    for _ in range(n - share * len(fresh)):
        draws = {a: _sample_value(a, arms, stats, chance) for a in arms}
        count[max(arms, key=lambda a: draws[a])] += 1
    return {a: c for a, c in count.items() if c}


def expected_gain(stats: ArmStats, hope: float = PRIOR_GAIN) -> float:
    """Expected gain (log2) of one more proposal; `hope` counts as one that was seen."""
    return (stats.gain + hope) / (stats.proposals + 1)


def relative_cost(stats: ArmStats, seconds: float) -> float:
    """What one proposal and its measurement cost, in measurements of `seconds` each."""
    if stats.proposals == 0 or seconds <= 0.0:
        return 1.0
    return 1.0 + stats.spent.wall_seconds / stats.proposals / seconds


def _sample_value(
    arm: str, arms: Sequence[str], stats: Mapping[str, ArmStats], chance: random.Random
) -> float:
    known = [stats[a] for a in arms if a in stats]
    own = stats.get(arm, ArmStats())
    measured = sum(s.measured for s in known)
    seconds = sum(s.seconds for s in known) / measured if measured else 0.0
    proposals = sum(s.proposals for s in known)
    pooled = sum(s.squares for s in known) / proposals if proposals else 0.0
    hope = max([s.gain / s.proposals for s in known if s.proposals and s.measured], default=PRIOR_GAIN)
    sd = math.sqrt(max(pooled, MIN_GAIN_SD**2) / ((own.proposals + own.measured) / 2 + 1))
    draw = chance.gauss(expected_gain(own, max(hope, 1e-4)), sd)
    return draw / relative_cost(own, seconds) if draw > 0.0 else draw * relative_cost(own, seconds)
