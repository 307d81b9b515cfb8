"""Shipped risk -> risk, as a user's own store has found it: the last correction, learnt while tuning.

Each `RiskVerdict` says whether a stated risk came true, and how much of what had been trusted was looked at.
A winner among the trusted is found with at least the probability `share` when those measured were drawn
at random, and more often when they were chosen for merit, so the rate of a risk is estimated as winners
found / sum of shares: right for audits, too pessimistic for the rest, never too sure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forecast_autotune.records import RiskVerdict
from forecast_autotune.surrogates.calibration import CalibrationCurve

KNOTS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.6, 1.0)
RAISE_PRIOR_WEIGHT = 8.0
"""Verdicts of full share that the shipped curve is worth, at each knot, against a higher risk."""
LOWER_PRIOR_WEIGHT = 40.0
"""The same against a lower risk: becoming surer takes more evidence than becoming less sure."""
_MIN_SLOPE = 1e-3
"""Least slope of a correction: it stays invertible, so what was shipped can be told from what was stated."""


@dataclass(frozen=True)
class CorrectedRisk:
    """A surrogate's own calibration, followed by a correction."""

    shipped: Callable[[float], float]
    correction: CalibrationCurve

    def __call__(self, stated: float) -> float:
        """The corrected risk of a share of draws."""
        return self.correction(self.shipped(stated))

    def invert(self, risk: float) -> float:
        """The risk as shipped, of one that was corrected."""
        return float(np.interp(risk, self.correction.observed, self.correction.stated))


def fit_correction(verdicts: Sequence[RiskVerdict]) -> CalibrationCurve | None:
    """Shipped risk -> corrected risk; None without verdicts. A pure function, whatever their order.

    Every verdict counts at the two knots next to its risk, as its difference from what was expected
    there, and each knot is shrunk towards the shipped curve. Where a lower risk came true more often than
    a higher one, both count as the higher share: whichever is chance, the correction is not too sure.
    """
    if not verdicts:
        return None
    knots = np.array(KNOTS)
    x = np.array([v.shipped for v in verdicts])
    share = np.array([v.share for v in verdicts])
    # By share of the risk, not of 1: unseen, a verdict says nothing.
    off = np.array([float(v.beaten) for v in verdicts]) - share * x
    right = np.clip(np.searchsorted(knots, x, side="right"), 1, len(knots) - 1)
    part = (x - knots[right - 1]) / (knots[right] - knots[right - 1])
    surplus, seen = np.zeros(len(knots)), np.zeros(len(knots))
    for place, weight in ((right - 1, 1.0 - part), (right, part)):
        np.add.at(surplus, place, weight * off)
        np.add.at(seen, place, weight * share)
    worth = np.where(surplus > 0.0, RAISE_PRIOR_WEIGHT, LOWER_PRIOR_WEIGHT)
    values = np.clip(knots + surplus / (worth + seen), 0.0, 1.0)
    kept = (1.0 - _MIN_SLOPE) * np.maximum.accumulate(values) + _MIN_SLOPE * knots
    return CalibrationCurve(KNOTS, tuple(float(p) for p in kept))
