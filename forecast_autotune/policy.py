"""Forecasts -> Plan: what to measure next, and when to stop. Sees no clock, no store, no model."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.listing import Listed
from forecast_autotune.measuring import Spent
from forecast_autotune.numerics import median
from forecast_autotune.records import Candidate, Outcome, digest
from forecast_autotune.results import Measurement, Plan
from forecast_autotune.settings import Budget
from forecast_autotune.surrogates.base import Array, Forecasts

REFUSED = 0.9
"""A candidate whose probability of failing is at least this is refused before compiling."""


@dataclass(frozen=True)
class State:
    """All a policy may look at."""

    forecasts: Forecasts
    measured: Mapping[Candidate, Measurement]
    """Labels known of this problem's candidates, stored ones included."""
    new: int = 0
    """How many were measured for this decision."""
    round: int = 0
    workers: int = 1
    tolerance: float = 0.02
    risk: float = 0.10
    budget: Budget = Budget()
    spent: Spent = Spent()
    audit: float = 0.0
    audited: bool = False
    """The audit share of this decision has been drawn."""
    seed: int = 0
    ready: Collection[Candidate] = ()
    """Candidates that an earlier decision has compiled: measuring them costs little."""
    problem: str = ""
    """The problem's id: two problems with equally many candidates must not draw the same audits."""

    def best(self) -> float:
        """log2(milliseconds) of the incumbent; +inf when nothing has run."""
        return min((math.log2(m.ms) for m in self.measured.values() if m.ok), default=math.inf)

    def pending(self) -> npt.NDArray[np.intp]:
        """Rows not measured, without the refused ones unless nothing else is left to try."""
        unknown = ~Listed.of(self.forecasts.candidates).among(self.measured)
        fit = unknown & (self.forecasts.p_fail < REFUSED)
        if not fit.any() and math.isinf(self.best()):
            return np.flatnonzero(unknown)
        return np.flatnonzero(fit)

    def stuck(self) -> bool:
        """Every candidate tried so far failed by its own fault: no limit may end the decision here.

        A launch needs a config that works, so until there is one, candidates are tried one by one as
        Triton would. Faults of the harness end that: more of them would follow.
        """
        faults = any(m.outcome is Outcome.INFRASTRUCTURE for m in self.measured.values())
        return math.isinf(self.best()) and not faults

    def room(self) -> int:
        """How many more candidates the budget allows (all when there is no limit, one when stuck)."""
        least = int(self.stuck())
        if exhausted(self.budget, self.spent):
            return least
        limit = self.budget.measurements
        return len(self.forecasts) if limit is None else max(least, limit - self.new)


def exhausted(budget: Budget, spent: Spent) -> bool:
    """Whether the seconds of a budget are used up."""
    return (budget.seconds is not None and spent.wall_s >= budget.seconds) or (
        budget.gpu_seconds is not None and spent.timing_s >= budget.gpu_seconds
    )


class Policy(Protocol):
    """Decides what to measure next. A pure function of the state: same state, same plan."""

    @property
    def name(self) -> str:
        """Short name, for reports."""
        ...

    def plan(self, state: State) -> Plan:
        """The next round; an empty `measure` ends the decision."""
        ...


def stated_risk(state: State, rows: npt.NDArray[np.intp], samples: Array) -> float:
    """P(some candidate of `rows` is faster than the incumbent by more than the tolerance).

    `samples` [k, len(rows)] are joint draws of log2(milliseconds), +inf where the draw failed. The
    share of draws is weighed by the surrogate and then calibrated. 1.0 while nothing has been measured.
    """
    best = state.best()
    if math.isinf(best):
        return 1.0
    if not len(rows):
        return 0.0
    share = float((samples.min(axis=1) < best - math.log2(1 + state.tolerance)).mean())
    return state.forecasts.calibrate(state.forecasts.weigh(share))


@dataclass(frozen=True)
class RiskBounded:
    """Measure the candidates that most probably beat the incumbent; stop when the risk is accepted.

    The batch is chosen greedily by expected improvement over joint samples (the sampled form of
    q-EI, Ginsbourger et al. 2010), so near-copies of a chosen candidate add little and the batch
    spreads by itself, which also lets a wrong forecast be escaped.
    """

    first: float = 0.03
    """Share of candidates in the first round. Small: what a round teaches is worth more than its size."""
    least: int = 3
    """Fewest candidates in the first round."""
    share: float = 0.30
    """Share of candidates measured at most, unless the budget says otherwise. Few decisions get there: half
    end within 0.16, as their risk is accepted (recorded replays)."""
    floor: int = 8
    """... but never capped below this many."""
    many: int = 100
    """Beyond this many candidates both shares count for the fourth root of the rest: a denser grid over the
    same ground holds more near-copies, not more secrets."""
    cheap: float = 3.0
    """Factor on the gain of a candidate that is compiled already: expected improvement per cost."""
    draws: int = 2048
    """Joint draws per plan. A quarter of them leave the small chances that late rounds live on to luck."""
    glance: int = 512
    """... while nothing has been measured: the first compilation waits, and nothing is so fine there."""
    considered: int = 256
    """Joint draws are taken for the most promising rows only; the rest cannot win."""
    name: str = "risk"

    def of(self, share: float, candidates: int) -> int:
        """A share of the candidates as a number, with the fourth-root rule beyond `many`."""
        n = candidates
        return math.ceil(share * min(n, self.many * math.sqrt(math.sqrt(n / self.many))))

    def cap(self, state: State) -> int:
        """Most measurements for this decision."""
        if state.budget.measurements is not None:
            return state.budget.measurements
        return max(self.floor, self.of(self.share, len(state.forecasts)))

    def plan(self, state: State) -> Plan:
        """One round; see the class."""
        rows, samples = self._promising(state)
        risk = stated_risk(state, rows, samples)
        seen = sum(m.ok for m in state.measured.values())
        total = len(state.forecasts)
        room = min(state.room(), max(self.cap(state) - state.new, int(state.stuck())), len(rows))
        if not len(rows):
            return Plan((), "every candidate that can launch is measured", risk)
        enough = min(self.least, total)
        if seen >= enough and risk <= state.risk:
            return self._audit(state, risk, rows)
        if room <= 0:
            return Plan((), f"budget reached with {risk:.0%} risk left", risk)
        if state.new == 0 and not seen:
            wanted = max(self.least, self.of(self.first, total))
            reason = "first look: the best forecasts, without near-copies"
        else:
            wanted = max(1, self.of(self.first / 2, total))
            if total > self.many:
                # A long list takes many rounds, and none should leave cores idle.
                wanted = max(wanted, min(state.workers, self.of(2 * self.first, total)))
            reason = f"{risk:.0%} risk that a better one is untried"
        wanted = min(wanted, room)
        names = state.forecasts.candidates
        weight = np.array([self.cheap if names[int(i)] in state.ready else 1.0 for i in rows])
        picked = self._greedy(state, samples, weight, min(max(wanted, state.workers), len(rows)))
        measure, later = picked[:wanted], picked[wanted:]
        return Plan(
            tuple(names[rows[i]] for i in measure),
            reason,
            risk,
            prefetch=tuple(names[rows[i]] for i in later),
        )

    def _promising(self, state: State) -> tuple[npt.NDArray[np.intp], Array]:
        forecasts, rows = state.forecasts, state.pending()
        if len(rows) > self.considered:
            optimistic = forecasts.optimistic()[rows]
            rows = np.sort(rows[np.argsort(optimistic, kind="stable")[: self.considered]])
        if not len(rows):
            return rows, np.zeros((1, 0))
        draws = self.draws if state.measured else min(self.draws, self.glance)
        samples = forecasts.samples(rows, draws, state.seed)
        failing = np.random.default_rng(state.seed + 1).random(samples.shape) < forecasts.p_fail[rows]
        return rows, np.where(failing, np.inf, samples)

    def _greedy(self, state: State, samples: Array, weight: Array, count: int) -> list[int]:
        best = state.best()
        # Before the first measurement every draw competes with its own typical candidate.
        finite = np.where(np.isfinite(samples), samples, np.nanmax(samples[np.isfinite(samples)], initial=0))
        bar = np.full(len(samples), best) if math.isfinite(best) else median(finite, axis=1)
        columns = np.ascontiguousarray(samples.T)
        gain = weight * np.maximum(0.0, bar - columns).mean(axis=1)
        known = np.zeros(len(gain), dtype=np.intp)
        """How many picks each gain takes into account."""
        picked: list[int] = []
        while len(picked) < count:
            choice = int(np.argmax(gain))
            if gain[choice] > 0.0 and known[choice] < len(picked):
                # A lower bar only ever lowers a gain (lazy greedy, Minoux 1978): most need no second look.
                gain[choice] = weight[choice] * np.maximum(0.0, bar - columns[choice]).mean()
                known[choice] = len(picked)
                continue
            if gain[choice] <= 0.0:
                # Nothing is expected to improve: take the best forecasts left, in order.
                order = np.argsort(finite.mean(axis=0), kind="stable")
                choice = next(int(i) for i in order if int(i) not in picked)
            picked.append(choice)
            gain[choice] = -1.0
            bar = np.minimum(bar, columns[choice])
        return picked

    def _audit(self, state: State, risk: float, rows: npt.NDArray[np.intp]) -> Plan:
        done = f"{risk:.0%} risk of more than {state.tolerance:.1%} regret is accepted"
        if state.audit <= 0 or state.audited:
            return Plan((), done, risk)
        drawn = np.random.default_rng([state.seed, int(digest(state.problem), 16)])
        chance = drawn.random(len(state.forecasts))
        names = tuple(state.forecasts.candidates[int(i)] for i in rows if chance[i] < state.audit)
        names = names[: state.room()]
        if not names:
            return Plan((), done, risk)
        return Plan(names, f"audit of {len(names)} trusted candidates", risk, (), names, state.audit)


@dataclass(frozen=True)
class Exhaustive:
    """Measure everything, the refused candidates too: an oracle must not depend on a forecast."""

    name: str = "exhaustive"

    def plan(self, state: State) -> Plan:
        """All unmeasured candidates the budget allows, best forecast first."""
        left = [
            int(i) for i in state.forecasts.order() if state.forecasts.candidates[i] not in state.measured
        ]
        names = tuple(state.forecasts.candidates[i] for i in left[: state.room()])
        risk = 0.0 if not left else 1.0
        done = "budget reached before everything was measured" if left else "everything is measured"
        return Plan(names, "measure everything" if names else done, risk)


@dataclass(frozen=True)
class Fixed:
    """A baseline that ignores the forecasts: `count` candidates at random or in the user's order."""

    count: int
    random: bool = False

    @property
    def name(self) -> str:
        """`random` or `first`."""
        return "random" if self.random else "first"

    def plan(self, state: State) -> Plan:
        """All of them in one round."""
        total = len(state.forecasts)
        order = np.random.default_rng(state.seed).permutation(total) if self.random else np.arange(total)
        wanted = [state.forecasts.candidates[int(i)] for i in order[: self.count]]
        left = [c for c in wanted if c not in state.measured][: state.room()]
        if not left and state.stuck():
            # All of the fixed choice failed: go on in the same order until something runs.
            rest = (state.forecasts.candidates[int(i)] for i in order)
            left = [c for c in rest if c not in state.measured][:1]
        return Plan(tuple(left), f"{self.name} {self.count}" if left else "the fixed choice is measured", 1.0)
