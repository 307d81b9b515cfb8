"""Plan in rounds: measure what most probably wins, stop when the risk of stopping is accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forecast_autotune.numerics import DENSE, fast_median, sparse_count
from forecast_autotune.policy.state import TuningState, stated_risk
from forecast_autotune.records import Plan, digest
from forecast_autotune.surrogates.protocol import Array

USUAL_RISK = 0.10
"""The risk that is accepted by default, which prices and limits are stated for."""


class Outlook(NamedTuple):
    """The state as a plan sees it first."""

    rows: npt.NDArray[np.intp]
    """Candidates that may be measured, [n]."""
    samples: Array
    """Joint draws of their log2 times, [draws, n]; infinite where a draw fails."""
    risk: float
    """The risk of stopping now."""
    seen: int
    """Candidates that have a time."""
    room: int
    """Most candidates that may still be measured."""


def mean_gain(bar: float | Array, samples: Array, axis: int = 0) -> Array:
    """How far draws are below the bar, 0 where they are above it: the mean over the `axis` of the draws."""
    below = np.asarray(bar - samples)
    return np.asarray(np.maximum(0.0, below, out=below).mean(axis=axis))


def _without_failures(samples: Array) -> Array:
    """The draws with the slowest time of all in place of failures."""
    works = np.isfinite(samples)
    return np.where(works, samples, np.nanmax(samples[works], initial=0))


@dataclass(frozen=True)
class RiskBounded:
    """Measure the candidates that most probably beat the incumbent; stop when the risk is accepted.

    The batch is chosen greedily by expected improvement over joint samples (the sampled form of
    q-EI, Ginsbourger et al. 2010), so near-copies of a chosen candidate add little and the batch
    spreads by itself, which also lets a wrong forecast be escaped.
    """

    first: float = 0.03
    """Share of candidates in the first round. Small: information from a round is worth more than its size."""
    least: int = 3
    """Fewest candidates in the first round."""
    share: float = 0.30
    """Share of candidates measured at most for an accepted risk of 10 %, unless the budget says otherwise; for half the
    risk, twice as many. Few decisions get there: half end within 0.16, as their risk is accepted (recorded replays)."""
    floor: int = 8
    """The cap is never below this many measurements."""
    many: int = DENSE
    """Beyond this many candidates both shares count for the fourth root of the rest; see `sparse_count`."""
    cheap: float = 3.0
    """Factor on the gain of a candidate that is compiled already: expected improvement per cost."""
    draws: int = 2048
    """Joint draws per plan. Late rounds decide on small chances, which a quarter of the draws leaves to luck."""
    glance: int = 512
    """Joint draws while nothing has been measured: the first compilation waits for this plan."""
    considered: int = 256
    """Joint draws are taken for the most promising rows only; the rest cannot win."""
    name: str = "risk"

    def of(self, share: float, candidates: int) -> int:
        """A share of the candidates as a number, with the fourth-root rule beyond `many`."""
        return math.ceil(share * sparse_count(candidates, self.many))

    def cap(self, state: TuningState) -> int:
        """Most measurements for this decision."""
        if state.budget.measurements is not None:
            return state.budget.measurements
        share = min(1.0, self.share * max(1.0, USUAL_RISK / max(state.risk, 1e-3)))
        return max(self.floor, self.of(share, len(state.forecasts)))

    def batch(self, state: TuningState, seen: int, risk: float) -> int:
        """Candidates of the next round, where `seen` have a time and this is the risk of stopping."""
        total = len(state.forecasts)
        if state.new == 0 and not seen:
            return max(self.least, self.of(self.first, total))
        count = max(1, self.of(self.first / 2, total))
        if total > self.many:
            # A long list takes many rounds, and none should leave cores idle.
            count = max(count, min(state.workers, self.of(2 * self.first, total)))
        return count

    def weights(self, state: TuningState, rows: npt.NDArray[np.intp]) -> Array:
        """Factors on the expected gain of these candidates, [n]: cheap ones may gain less."""
        names = state.forecasts.candidates
        return np.array([self.cheap if names[int(i)] in state.ready else 1.0 for i in rows])

    def plan(self, state: TuningState) -> Plan:
        """One round; see the class."""
        rows, samples, risk, seen, room = self._outlook(state)
        total = len(state.forecasts)
        if not len(rows):
            return self.end(state, risk, 0)
        enough = min(self.least, total)
        if seen >= enough and risk <= state.risk:
            return self._audit(state, risk, rows)
        if room <= 0:
            return self.end(state, risk, len(rows))
        if state.new == 0 and not seen:
            reason = "first look: the best forecasts, without near-copies"
        else:
            reason = f"{risk:.0%} risk that a better one is untried"
        count = min(self.batch(state, seen, risk), room)
        names = state.forecasts.candidates
        weight = self.weights(state, rows)
        picks = self._greedy(state, samples, weight, min(max(count, state.workers), len(rows)))
        measure, later = picks[:count], picks[count:]
        return Plan(
            tuple(names[rows[i]] for i in measure),
            reason,
            risk,
            prefetch=tuple(names[rows[i]] for i in later),
        )

    def end(self, state: TuningState, risk: float, left: int) -> Plan:
        """The plan that ends a decision with `left` candidates untried: by the budget or by the default limit."""
        refused, limit = len(state.refused()), "budget"
        if not left:
            but = f" but {refused} that are expected to fail" if refused else ""
            return Plan((), f"every candidate is measured{but}", risk)
        if state.remaining_measurements() > 0:
            limit = f"default limit of {self.cap(state)} measurements (budget=Budget(measurements=N) sets another)"
        return Plan((), f"{limit} reached with {risk:.0%} risk left, {state.risk:.0%} accepted", risk)

    def _outlook(self, state: TuningState) -> Outlook:
        rows, samples = self._promising(state)
        room = min(
            state.remaining_measurements(),
            max(self.cap(state) - state.new, int(state.lacks_working_config())),
            len(rows),
        )
        seen = sum(m.ok for m in state.measured.values())
        return Outlook(rows, samples, stated_risk(state, rows, samples), seen, room)

    def _promising(self, state: TuningState) -> tuple[npt.NDArray[np.intp], Array]:
        forecasts, rows = state.forecasts, state.pending()
        if len(rows) > self.considered:
            optimistic = forecasts.optimistic()[rows]
            rows = np.sort(rows[np.argsort(optimistic, kind="stable")[: self.considered]])
        if not len(rows):
            return rows, np.zeros((1, 0))
        draws = self.draws if state.measured else min(self.draws, self.glance)
        return rows, forecasts.sampled_outcomes(rows, draws, state.seed)

    def _greedy(self, state: TuningState, samples: Array, weight: Array, count: int) -> list[int]:
        best = state.best()
        # Before the first measurement every draw competes with its own typical candidate.
        bar = (
            np.full(len(samples), best)
            if math.isfinite(best)
            else fast_median(_without_failures(samples), axis=1)
        )
        columns = np.ascontiguousarray(samples.T)
        gain = weight * mean_gain(bar, columns, axis=1)
        depth = np.zeros(len(gain), dtype=np.intp)
        """How many picks each gain takes into account."""
        picks: list[int] = []
        while len(picks) < count:
            choice = int(np.argmax(gain))
            if gain[choice] > 0.0 and depth[choice] < len(picks):
                # A lower bar only ever lowers a gain (lazy greedy, Minoux 1978): most need no second look.
                gain[choice] = weight[choice] * mean_gain(bar, columns[choice])
                depth[choice] = len(picks)
                continue
            if gain[choice] <= 0.0:
                # Nothing is expected to improve: take the best forecasts left, in order.
                order = np.argsort(_without_failures(samples).mean(axis=0), kind="stable")
                choice = next(int(i) for i in order if int(i) not in picks)
            picks.append(choice)
            gain[choice] = -1.0
            bar = np.minimum(bar, columns[choice])
        return picks

    def _audit(self, state: TuningState, risk: float, rows: npt.NDArray[np.intp]) -> Plan:
        reason = f"{risk:.0%} risk of more than {state.tolerance:.1%} regret is accepted"
        if state.audit <= 0 or state.audited:
            return Plan((), reason, risk)
        generator = np.random.default_rng([state.seed, int(digest(state.problem), 16)])
        chance = generator.random(len(state.forecasts))
        names = tuple(state.forecasts.candidates[int(i)] for i in rows if chance[i] < state.audit)
        names = names[: state.remaining_measurements()]
        if not names:
            return Plan((), reason, risk)
        return Plan(names, f"audit of {len(names)} trusted candidates", risk, (), names, state.audit)
