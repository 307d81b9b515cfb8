"""The default policy: the least wall time until the answer, plus the price of its expected regret.

It sees more than `RiskBounded`: which candidates are compiled, which compile and for how long yet, how many workers
there are. Workers are never idle while something may win; a candidate that will compile long has to promise more; and
the decision waits for no candidate that is not worth its seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.policy.risk_bounded import USUAL_RISK, RiskBounded, mean_gain
from forecast_autotune.policy.state import TuningState
from forecast_autotune.records import Plan
from forecast_autotune.surrogates.protocol import Array

_PERCENT = math.log2(1.01)
_LEAST_GAIN = 1e-4
"""Expected gain, log2, below which a candidate cannot be said to have a chance."""


@dataclass(frozen=True)
class WallTime(RiskBounded):
    """Measure what promises most per second; stop when the risk is accepted and waiting does not pay.

    Where nothing is known of compilations (`TuningState.compile_s` is None), or the number of measurements is
    limited, it plans in rounds, as its base does.
    """

    percent_s: float = 0.6
    """Wall seconds that one per cent of a kernel's run time is worth at an accepted risk of 10 %."""
    fewest: int = 2
    """Fewest candidates to time. A third may be the one that compiles for seconds: its risk says whether to wait."""
    surprise: float = 0.45
    """log2 of run time that is lost where the stated risk comes true, after one timing; it falls with the root of their
    number. Tails of draws are too thin, most of all where little is timed that could show a forecast to be wrong."""
    timing_s: float = 0.02
    """Wall seconds of timing one candidate."""
    patience_s: float = 0.1
    """Seconds after which a plan that waits for compilations is made again: by then some should have ended."""
    name: str = "wall-time"

    def cap(self, state: TuningState) -> int:
        """Most measurements for this decision: whatever the limits, one for each worker."""
        limit = super().cap(state)
        return limit if state.budget.measurements is not None else max(limit, state.workers)

    def plan(self, state: TuningState) -> Plan:
        """Return the candidates to compile and time from now on; an empty `measure` ends the decision."""
        if (end := self._untimed(state)) is not None:
            return end
        if not self._by_time(state):
            # So many measurements and no more are worth most one after the other.
            return super().plan(state)
        rows, samples, risk, seen, room = self._outlook(state)
        if not len(rows):
            return self.end(state, risk, 0)
        assert state.compile_s is not None
        slow = state.slowdown is not None and bool((state.slowdown[rows] > 0).all())
        enough = seen >= (1 if slow else min(self.fewest, len(state.forecasts)))
        gain = self._gain(state, samples)
        stake = risk * (self.surprise / math.sqrt(max(1, seen)))
        pays = seen > 0 and self._waiting_pays(state, rows, samples, gain, stake)
        if enough and risk <= state.risk and not pays:
            return self._audit(state, risk, rows)
        if room <= 0:
            return self.end(state, risk, len(rows))
        names = state.forecasts.candidates
        is_ready = np.array([names[int(i)] in state.ready for i in rows])
        if is_ready.any() and not state.compiling and not state.spent.compiled:
            # Binaries of an earlier decision: they may be all that it takes.
            worth = is_ready & (not seen or gain * self._price(state) > self.timing_s)
            if worth.any():
                rows, samples, gain, is_ready = rows[worth], samples[:, worth], gain[worth], is_ready[worth]
        is_compiling = np.array([names[int(i)] in state.compiling for i in rows])
        # Every worker is one candidate's share of the clock while it compiles.
        cost = self.timing_s + state.compile_s[rows] / max(1, state.workers)
        # A compilation that may win goes on: a worker that began another at every plan would finish none.
        running = np.flatnonzero(is_compiling & (gain > _LEAST_GAIN) & (seen > 0))
        count = min(room, len(rows), max(int(is_ready.sum()) + state.workers, len(running)))
        picks = self._greedy(state, samples, 1.0 / cost, count)
        if missing := set(running.tolist()) - set(picks):
            fresh = [i for i in picks if not (is_compiling[i] or is_ready[i])]
            surplus = set(fresh[max(0, len(fresh) - len(missing)) :])
            picks = [i for i in picks if i not in surplus] + sorted(missing)
        if not seen:
            reason = "first look: the best forecasts, without near-copies"
        elif risk > state.risk:
            reason = f"{risk:.0%} risk that a better one is untried"
        else:
            reason = f"what it may gain is worth the seconds, at {risk:.0%} risk"
        return Plan(tuple(names[rows[i]] for i in picks), reason, risk, within_s=self.patience_s)

    @staticmethod
    def _untimed(state: TuningState) -> Plan | None:
        """The end before anything is timed, where the risk of the best forecast is accepted; else None."""
        forecasts = state.forecasts
        if state.measured or not forecasts.group or CandidateList.of(forecasts.candidates).sources > 1:
            return None  # something is known, or no calibration says how often the best of several sources is one
        risk = forecasts.untimed_risk(int(forecasts.order()[0]), state.tolerance, state.seed)
        reason = f"{risk:.0%} risk of more than {state.tolerance:.1%} regret is accepted untimed"
        return Plan((), reason, risk) if risk <= state.risk else None

    def _promising(self, state: TuningState) -> tuple[npt.NDArray[np.intp], Array]:
        rows, samples = super()._promising(state)
        slowdown = state.slowdown if self._by_time(state) else None
        return rows, samples if slowdown is None else samples + slowdown[rows]

    @staticmethod
    def _by_time(state: TuningState) -> bool:
        return state.compile_s is not None and state.budget.measurements is None

    @staticmethod
    def _gain(state: TuningState, samples: Array) -> Array:
        """Expected gain of each candidate by itself over the incumbent, log2; infinite before there is one."""
        best = state.best()
        return mean_gain(best, samples) if math.isfinite(best) else np.full(samples.shape[1], math.inf)

    def _price(self, state: TuningState) -> float:
        """Wall seconds for one log2 of run time: half the risk costs twice as much."""
        return self.percent_s / _PERCENT * USUAL_RISK / max(state.risk, 1e-3)

    def _waiting_pays(
        self, state: TuningState, rows: npt.NDArray[np.intp], samples: Array, gain: Array, stake: float
    ) -> bool:
        """Whether some horizon gains more run time, at its price, than the seconds until then.

        `gain` is that of each candidate by itself; `stake`, log2, a lower bound on the gain of all, beside the draws.
        """
        assert state.compile_s is not None
        best = state.best()
        if math.isinf(best):
            return True
        seconds = state.compile_s[rows]
        # A candidate that gains nothing by itself gains nothing beside others.
        some = np.flatnonzero(gain * self._price(state) > 1e-3)
        if not len(some):
            return False
        some = some[np.argsort(seconds[some], kind="stable")]
        names = state.forecasts.candidates
        free = max(0, state.workers - len(state.compiling))
        fresh = np.cumsum(
            [names[rows[i]] not in state.ready and names[rows[i]] not in state.compiling for i in some]
        )
        # The first of those that do not compile yet find a worker each; the others wait for one.
        waves = np.where(fresh > free, np.ceil((fresh - free) / max(1, state.workers)), 0.0)
        ends = np.maximum.accumulate(seconds[some] * (1.0 + waves))
        least = np.minimum.accumulate(samples[:, some], axis=1)
        gains = mean_gain(best, least)
        if not gains[-1] > 0.0:
            return False
        # Where forecasts are wrong they are so by more than their draws say, as recorded decisions show.
        price = self._price(state) * max(1.0, stake / float(gains[-1]))
        return bool((price * gains > ends + self.timing_s * np.arange(1, len(some) + 1)).any())
