"""Verdicts on stated risks: a decision checks earlier statements, and its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forecast_autotune.policy import TuningState
from forecast_autotune.records import Candidate, Decision, Measurement, Plan, RiskVerdict
from forecast_autotune.surrogates.calibration import CorrectedRisk, fit_correction
from forecast_autotune.surrogates.protocol import Forecasts

MAX_VERDICTS = 16
"""Verdicts kept per problem, the newest: a problem that is audited daily must not outweigh all others."""


@dataclass(frozen=True)
class _RiskClaim:
    """A risk that was stated, and what would refute it."""

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
        # Another surrogate's faults are not this one's; and what is accepted untimed has a curve of its own.
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
        """Note what the previous decision claimed of those candidates that are not known.

        Nothing is noted where it was about another list of candidates.
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
        """Note what a plan claims when it accepts the risk but audits some of the trusted."""
        ran = {c: m.ms for c, m in state.measured.items() if m.ok}
        if not plan.audit or not ran:
            return
        names = state.forecasts.candidates
        trusted = frozenset(names[int(i)] for i in state.pending())
        best = min(ran, key=ran.__getitem__)
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
            seen = {c for c in claim.trusted if c in tried and c in measured}
            incumbent = measured.get(claim.incumbent)
            if not seen or incumbent is None or not incumbent.ok:
                continue
            beaten = winner.candidate in seen and winner.ms * (1.0 + claim.tolerance) < incumbent.ms
            share = len(seen) / len(claim.trusted)
            verdicts.append(RiskVerdict(claim.surrogate, claim.shipped, claim.stated, beaten, share))
        return tuple(verdicts[-MAX_VERDICTS:])
