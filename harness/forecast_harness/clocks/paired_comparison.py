"""Candidate against incumbent: interleaved pairs, dropped early if hopeless, promoted only on evidence."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import rounded

INCUMBENT, CANDIDATE = 0, 1


class PairedClock(Protocol):
    """Times single launches of two contestants."""

    def sample(self, which: int, fresh: bool) -> float:
        """Seconds of one launch of `INCUMBENT` or `CANDIDATE`, over all workloads their geometric mean.

        `fresh`: with new inputs; otherwise with those of the launch before, for the other contestant.
        """


class TrialClock(PairedClock, Protocol):
    """The questions that the stages of a trial put to a clock, in this order: the runner's, or a sandboxed cell's.

    A clock has a baseline (`INCUMBENT`) and a source on trial (`CANDIDATE`) at all calls of a target. An error
    that it raises, with the contestant's number, ends the trial of either.
    """

    @property
    def seconds(self) -> Mapping[Any, Sequence[float]]:
        """All times that count, by contestant and call."""

    @property
    def checks(self) -> int:
        """How often results were compared with the right ones."""

    def place(self) -> None:
        """Place the inputs of every call, load both contestants, and launch each until a launch is like the next."""

    def check(self) -> None:
        """Launch the source on trial once at every call, and compare its results with the right ones."""


_BET_LOG_FACTORS = tuple((math.log(1 + 0.1 * n), math.log(1 - 0.1 * n)) for n in range(1, 10))
"""Factors of the capital (as logarithms) on a win and on a loss, for bettors that believe in
probabilities of 0.55, 0.6, ..., 0.95; each manages an equal share of the starting capital."""


@dataclass
class SignTest:
    """Evidence that differences exceed `margin` more often than not, valid after every block.

    An e-process on the signs of paired differences. If the candidate is not faster, a block's log-ratio is positive
    with probability at most 1/2 whatever came before: the order within each block is drawn by a fair coin, so drift and
    neighbours favour nobody. A bettor against that starts with 1 and stakes a share of the capital on "positive"; the
    capital is a non-negative supermartingale, and by Ville's inequality it ever reaches 1/alpha with probability at
    most alpha, however often one looks and whenever one stops (Ville 1939; Ramdas et al., Game-theoretic statistics and
    safe anytime-valid inference, Statistical Science 2023).
    """

    margin: float = 0.0
    wins: int = 0
    losses: int = 0

    def add(self, difference: float) -> None:
        """Take one block's difference; one equal to the margin is no evidence for anybody."""
        if difference > self.margin:
            self.wins += 1
        elif difference < self.margin:
            self.losses += 1

    @property
    def log_evidence(self) -> float:
        """Natural logarithm of the bettor's capital, 0 at the start."""
        logs = [self.wins * win + self.losses * loss for win, loss in _BET_LOG_FACTORS]
        top = max(logs)
        return top + math.log(sum(math.exp(v - top) for v in logs) / len(logs))

    def reached(self, alpha: float) -> bool:
        """Whether the evidence refutes "not more often than not" at level `alpha`, now.

        Valid after every block: `alpha` bounds the probability that it is ever wrongly true.
        """
        return self.log_evidence >= -math.log(alpha)


_HOPELESS_CONFIDENCE, _BLOCKS_PER_LOOK = 0.99, 10
"""Confidence with which a gain is out of reach, and blocks between looks at that."""


class ComparisonOutcome(StrEnum):
    """The end of a duel."""

    FASTER = "faster"
    SLOWER = "slower"
    UNDECIDED = "undecided"
    """The budget was spent: no difference beyond the margin could be shown."""


@dataclass(frozen=True)
class StoppingRules(Record, label="rules"):
    """Rules on the cost of a duel, and on the difference that counts."""

    alpha: float = 0.05
    """Highest probability that an equal candidate is ever called faster."""
    margin: float = 0.005
    """A gain (natural log of the ratio of times) below this is not worth a promotion."""
    first: int = 3
    """Blocks after which a hopeless candidate is dropped."""
    second: int = 10
    """Blocks after which a candidate that is clearly slower is dropped."""
    least: int = 20
    """Blocks before a promotion, so that no lucky streak is called a median."""
    enough: int = 40
    """Blocks after which a candidate is dropped whose gain is clearly below the margin."""
    most: int = 400
    hopeless: float = math.log(1.3)
    seconds: float = 60.0
    """Most seconds of launches, both contestants together."""
    wall: float | None = None
    """Most seconds of the whole comparison: the work between short launches takes longer than they do."""


DEFAULT_RULES = StoppingRules()


@dataclass(frozen=True)
class ComparisonResult(
    Record,
    label="comparison",
    order=(
        "outcome",
        "gain",
        "interval",
        "blocks",
        "evidence",
        "seconds",
        "reason",
        "differences",
        "own_gain",
    ),
    derived={
        "gain": lambda result: round(result.gain, 5),
        "interval": lambda result: [round(end, 5) for end in result.interval()],
        "blocks": lambda result: len(result.differences),
    },
):
    """A duel's end. Differences are natural logs of incumbent's over candidate's time, one per block."""

    outcome: ComparisonOutcome
    differences: tuple[float, ...] = field(metadata=json_option(write=rounded(6)))
    evidence: float = field(metadata=json_option(write=lambda capital: float(f"{min(capital, 1e9):.4g}")))
    """The bettor's capital against "not faster by the margin"."""
    seconds: float = field(metadata=json_option(write=rounded(4)))
    reason: str
    own_gain: float | None = None
    """The gain by the clocks of the contestants' own processes, where another clock decided."""

    @property
    def gain(self) -> float:
        """Median difference as a ratio of times minus 1: 0.02 is 2 % faster; of two clocks the smaller one."""
        result = math.expm1(statistics.median(self.differences))
        return result if self.own_gain is None else min(result, self.own_gain)

    def with_own_gain(self, gain: float | None, margin: float) -> ComparisonResult:
        """The same end, with the gain by the contestants' own clocks: a faster candidate is faster by both.

        `margin` is the least gain that counts, as a natural logarithm.
        """
        if gain is None:
            return self
        if self.outcome is not ComparisonOutcome.FASTER or gain > math.expm1(margin):
            return replace(self, own_gain=gain)
        reason = f"faster by the judge's clock, and by {gain:.1%} by its own"
        return replace(self, own_gain=gain, outcome=ComparisonOutcome.UNDECIDED, reason=reason)

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """A distribution-free confidence interval for `gain`, for a number of blocks fixed beforehand."""
        low, high = sign_interval(self.differences, level)
        return math.expm1(low), math.expm1(high)


def run_comparison(
    clock: PairedClock,
    rules: StoppingRules = DEFAULT_RULES,
    seed: int = 0,
    *,
    too_long: Callable[[], bool] = lambda: False,
) -> ComparisonResult:
    """Run blocks until the rules end it, or until `too_long` says after a block that it has gone on for too long.

    A block is four launches, ABBA or BAAB by a coin; its difference is the mean log of the incumbent's two
    times minus the candidate's. Linear drift within a block cancels, slower drift meets both alike.
    """
    rng = random.Random(seed)
    faster, slower = SignTest(rules.margin), SignTest(0.0)
    result: list[float] = []
    seconds, began = 0.0, time.perf_counter()

    def end(outcome: ComparisonOutcome, reason: str) -> ComparisonResult:
        return ComparisonResult(
            outcome, tuple(result), math.exp(min(faster.log_evidence, 700.0)), seconds, reason
        )

    while True:
        difference, block_s = measure_block(clock, rng)
        seconds += block_s
        result.append(difference)
        faster.add(difference)
        slower.add(-difference)
        n = len(result)
        if n == rules.first and max(result) < -rules.hopeless:
            return end(ComparisonOutcome.SLOWER, f"all of the first {n} blocks are beyond 1.3 times slower")
        if n >= rules.second and slower.reached(rules.alpha):
            return end(ComparisonOutcome.SLOWER, f"slower in {slower.wins} of {n} blocks")
        # A contestant that is called faster is so within its interval, too.
        if n >= rules.least and faster.reached(rules.alpha) and sign_interval(result, 0.95)[0] > 0.0:
            return end(
                ComparisonOutcome.FASTER,
                f"faster by more than {rules.margin:.1%} in {faster.wins} of {n} blocks",
            )
        # Looking often ends a few too many, and promotes none: only promotions need to be rare by chance.
        if (
            n >= rules.enough
            and n % _BLOCKS_PER_LOOK == 0
            and sign_interval(result, _HOPELESS_CONFIDENCE)[1] < rules.margin
        ):
            return end(
                ComparisonOutcome.UNDECIDED, f"a gain of {rules.margin:.1%} is out of reach after {n} blocks"
            )
        is_late = rules.wall is not None and time.perf_counter() - began >= rules.wall
        if n >= rules.most or seconds >= rules.seconds or is_late or too_long():
            return end(
                ComparisonOutcome.UNDECIDED, f"no difference was shown in {n} blocks and {seconds:.3g} s"
            )


def measure_block(clock: PairedClock, rng: random.Random) -> tuple[float, float]:
    """Run one block; its difference, and the seconds of its launches."""
    order = (INCUMBENT, CANDIDATE, CANDIDATE, INCUMBENT)
    if rng.random() < 0.5:
        order = (CANDIDATE, INCUMBENT, INCUMBENT, CANDIDATE)
    times: tuple[list[float], list[float]] = ([], [])
    for position, which in enumerate(order):
        times[which].append(clock.sample(which, position % 2 == 0))
    sums = [sum(math.log(t) for t in side) for side in times]
    return (sums[INCUMBENT] - sums[CANDIDATE]) / 2, sum(map(sum, times))


def sign_interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """Order statistics that hold the median with probability at least `level`; all of it for few values."""
    ascending = sorted(values)
    n, tail, rank = len(ascending), 0.0, 0
    for k in range(n // 2 + 1):
        tail += math.comb(n, k) * 0.5**n
        if 2 * tail > 1 - level:
            break
        rank = k + 1
    low = max(0, rank - 1)
    return ascending[low], ascending[n - 1 - low]
