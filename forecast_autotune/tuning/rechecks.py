"""Checks of the claims of decisions: of untimed choices, and of stated risks.

A process draws some of the untimed decisions that it meets (`Settings.recheck_s`), times each choice beside the best
forecasts, and bets against it. The stakes are stored with the decision: every process continues where the last one
ended. A decision that is made anew, or audits trusted candidates, passes verdicts on stated risks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forecast_autotune.policy import TuningState
from forecast_autotune.records import Candidate, Decision, Measurement, Plan, RiskVerdict
from forecast_autotune.surrogates.calibration import CorrectedRisk, fit_correction
from forecast_autotune.surrogates.protocol import Forecasts
from forecast_autotune.tuning.measurer import Measurer

LEVEL = 0.05
"""Largest share of the choices within their tolerance that is ever replaced, however many comparisons there are."""
_STAKE = 0.8
"""Share of the capital that is bet on each comparison."""
MOST_RIVALS, ROUNDS = 3, 8
"""Forecasts besides the choice that are timed in a re-check, and comparisons with the fastest of them."""


def bet(count: int, doubt: float, slower: bool) -> tuple[int, float]:
    """The stakes after one more comparison in turns; `slower` if the choice lost by more than its tolerance.

    A choice within its tolerance loses at most half of the comparisons, so no bet gains on average. A bet begins before
    each comparison, the k-th with 1 / k (k + 1) of one unit, so that a late drift shows, too. All bets and the rest of
    the unit sum to a supermartingale: it ever reaches 1 / `LEVEL` with probability at most `LEVEL` (Ville 1939).
    """
    new_stake = 1.0 / ((count + 1) * (count + 2))
    return count + 1, (doubt + new_stake) * (1.0 + _STAKE if slower else 1.0 - _STAKE)


def is_refuted(count: int, doubt: float) -> bool:
    """Whether these stakes end a decision."""
    return doubt + 1.0 / (count + 1) >= 1.0 / LEVEL


class Rechecks:
    """The re-checks of this process."""

    spent_s = 0.0

    @staticmethod
    def draw(decision: Decision) -> bool:
        """Whether to re-check a stored, untimed decision now; the chance falls with the number of its re-checks."""
        return random.random() * (1 + decision.rechecks / ROUNDS) < 1.0

    @classmethod
    def judge(
        cls,
        decision: Decision,
        rivals: Sequence[Candidate],
        measurer: Measurer,
        keep: Callable[[Measurement], object],
        within_s: float,
    ) -> tuple[Decision, bool]:
        """Re-check for about `within_s`; returns the decision with the new stakes, and whether it is refuted."""
        begin = time.perf_counter()
        rival_ms: dict[Candidate, float] = {}
        fails = False
        for m in measurer.measure([decision.chosen, *rivals]):
            keep(m)
            if m.ok:
                rival_ms[m.candidate] = m.ms
            # A broken harness is no evidence against the choice.
            fails = fails or (m.candidate == decision.chosen and m.outcome.is_label and not m.ok)
        choice_ran = rival_ms.pop(decision.chosen, None) is not None
        state = decision.rechecks, decision.doubt
        for _ in range(ROUNDS if rival_ms and choice_ran else 0):
            pair = measurer.compare([decision.chosen, min(rival_ms, key=rival_ms.__getitem__)])
            if len(pair) < 2:
                break
            state = bet(*state, pair[0].ms > (1.0 + decision.tolerance) * pair[1].ms)
            if is_refuted(*state) or time.perf_counter() - begin > within_s:
                break
        cls.spent_s += time.perf_counter() - begin
        refuted, verdicts, claim = fails or is_refuted(*state), decision.verdicts, decision.shipped_risk
        if claim is not None and (refuted or state[0] > decision.rechecks == 0):
            share = 1.0 if refuted else len(rival_ms) / max(1, decision.candidates - 1)
            verdicts += (RiskVerdict(decision.surrogate, claim, decision.stated_risk, refuted, share),)
        count, doubt = state
        result = replace(decision, rechecks=count, doubt=doubt, verdicts=verdicts)
        # A refuted claim has its verdict: the decision that replaces this one must not check it again.
        return replace(result, shipped_risk=None) if refuted else result, refuted


MAX_VERDICTS = 16
"""Verdicts kept per problem, the newest: a problem that is audited daily must not outweigh all others."""


@dataclass(frozen=True)
class _RiskClaim:
    """A stated risk, with the candidates that would refute it."""

    surrogate: str
    shipped: float
    stated: float
    tolerance: float
    incumbent: Candidate
    trusted: frozenset[Candidate]


@dataclass
class RiskTracker:
    """The statements that one decision can check, and the correction that earlier ones have earned."""

    surrogate: str
    """`name/version`."""
    known_verdicts: Sequence[RiskVerdict]
    """Verdicts on any problem of this device class."""
    previous: Decision | None
    """The decision that is being made anew."""
    claims: list[_RiskClaim] = field(default_factory=list)

    def __post_init__(self) -> None:
        # One correction for each surrogate: and, as their risks are off by other factors, one for untimed choices.
        self.untimed = f"{self.surrogate}, untimed"
        self._correction, self._untimed_correction = (
            fit_correction([v for v in self.known_verdicts if v.surrogate == name])
            for name in (self.surrogate, self.untimed)
        )

    def correct(self, forecasts: Forecasts) -> Forecasts:
        """The forecasts with their risks corrected; unchanged while nothing has been seen."""
        if (risk := self._correction) is not None:
            forecasts = replace(forecasts, calibrate_risk=CorrectedRisk(forecasts.calibrate_risk, risk))
        if (risk := self._untimed_correction) is not None:
            forecasts = replace(forecasts, calibrate_untimed=CorrectedRisk(forecasts.calibrate_untimed, risk))
        return forecasts

    def shipped(self, risk: float, *, untimed: bool = False) -> float:
        """A stated risk before this store's correction."""
        correction = self._untimed_correction if untimed else self._correction
        return risk if correction is None else CorrectedRisk(float, correction).invert(risk)

    def claim_previous(self, candidates: Collection[Candidate], known: Collection[Candidate]) -> None:
        """Note the previous decision's claim about the candidates that are not `known`.

        Nothing is noted where it was a decision on another list of candidates.
        """
        old = self.previous
        if old is None or old.shipped_risk is None or old.candidates != len(candidates):
            return
        trusted = frozenset(candidates) - frozenset(known)
        if old.chosen in known and trusted:
            claim = _RiskClaim(
                old.surrogate, old.shipped_risk, old.stated_risk, old.tolerance, old.chosen, trusted
            )
            self.claims.append(claim)

    def claim_audited(self, plan: Plan, state: TuningState) -> None:
        """Note the claim of a plan that accepts the risk but audits some of the trusted candidates."""
        times = {c: m.ms for c, m in state.measured.items() if m.ok}
        if not plan.audit or not times:
            return
        names = state.forecasts.candidates
        trusted = frozenset(names[int(i)] for i in state.pending())
        best = min(times, key=times.__getitem__)
        claim = _RiskClaim(self.surrogate, self.shipped(plan.risk), plan.risk, state.tolerance, best, trusted)
        if claim not in self.claims:  # a plan may be made twice before it is carried out
            self.claims.append(claim)

    def verdicts(
        self,
        measured: Mapping[Candidate, Measurement],
        tried: Collection[Candidate],
        winner: Measurement,
    ) -> tuple[RiskVerdict, ...]:
        """Verdicts on this problem, earlier ones first.

        `measured` holds all labels, `tried` names those of this decision. A claim is refuted by the
        `winner` alone: it was timed side by side, and the fastest of many single timings is lucky.
        """
        verdicts = list(self.previous.verdicts) if self.previous is not None else []
        for claim in self.claims:
            sample = {c for c in claim.trusted if c in tried and c in measured}
            incumbent = measured.get(claim.incumbent)
            if not sample or incumbent is None or not incumbent.ok:
                continue
            beaten = winner.candidate in sample and winner.ms * (1.0 + claim.tolerance) < incumbent.ms
            share = len(sample) / len(claim.trusted)
            verdicts.append(RiskVerdict(claim.surrogate, claim.shipped, claim.stated, beaten, share))
        return tuple(verdicts[-MAX_VERDICTS:])
