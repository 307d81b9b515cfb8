"""Answers on recorded problems -> a calibration: a temperature, an isotonic correction, and one weight.

Figures of a model, and its weight in an ensemble, are estimated on families that were left out. All
statistics give every problem the same weight, and families alike: shapes of one kernel repeat each other.

The weight is that of the learned forecast stacked with the model's: the stacked forecast lies a share w in [0, 1] of
the way from the learned forecast, which is always in, to the model's. w is what explains the recorded times best,
and counts for as much as it explained of families that it was not fitted to: a small gain gives a small weight,
none gives 0. Errors are scored as Student-t with the size that they have in other families.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import (
    BlendWeight,
    CalibrationScope,
    LLMCalibration,
    ModelLatency,
    MonotoneCurve,
)
from forecast_autotune.surrogates.blend import disagreement
from forecast_autotune.surrogates.covariance import Hyperparameters
from forecast_train.llm.calibration.answers import ModelAnswers
from forecast_train.splits import SplitError

Array = npt.NDArray[np.float64]

FEWEST_FAMILIES = 3
"""Families of kernels that a calibration takes at least."""
_MOST_KNOTS = 12
"""Most knots of an isotonic correction: quantiles of what was stated, pooled before it is made monotone."""
WEIGHTS = np.linspace(0.0, 1.0, 201)
_TEMPERATURES = np.exp(np.linspace(math.log(0.3), math.log(30.0), 60))
_SHARES = np.linspace(0.0, 1.0, 41)
_FREEDOM = 4.0
"""Degrees of freedom of the score: problems differ in the size of their errors."""
_LEAST_SD, _MOST_SD = 0.1, 0.6
"""Prior variance of a weight: kernels differ by more than a few families can show."""
_NOISE = 0.02
_ROUNDING = 1e-9
"""Nats that sums of scores may differ by and be the same."""
_HYPER = Hyperparameters()
"""Only what compresses slowdowns matters here."""


def fit_calibration(
    answers: Sequence[ModelAnswers], about: Mapping[str, Any] | None = None
) -> LLMCalibration:
    """The calibration of the model that answered; `saved` is left at 0 (see `saving`).

    Raises `SplitError` for fewer than three families: nothing could be left out.
    """
    families = sorted({a.family for a in answers})
    if len(families) < FEWEST_FAMILIES:
        raise SplitError(
            f"calibrating a model needs three or more kernel families, got {', '.join(families)}: add tables"
        )
    apart = {f: fit_corrections([a for a in answers if a.family != f]) for f in families}
    evidence = [e for a in answers if (e := stacking_evidence(a, apart[a.family])) is not None]
    weight, gain = fit_weight(evidence)
    seconds = [a.seconds for a in answers if a.seconds > 0]
    mass = np.concatenate([a.mass[a.answered] for a in answers])
    return replace(
        fit_corrections(answers),
        weight=weight,
        scope=CalibrationScope(
            tuple(sorted({a.device for a in answers})),
            tuple(sorted({a.language for a in answers})),
            max(a.characters for a in answers),
            0.5 * float(np.quantile(mass, 0.01)) if len(mass) else 0.0,
        ),
        pace=ModelLatency(round(float(np.median(seconds)), 6) if seconds else 0.0),
        about={
            "problems": len(answers),
            "kernels": len({a.kernel for a in answers}),
            "families": families,
            "answers": int(sum(len(a.rows) for a in answers)),
            "log_score": round(gain, 5),
            **(about or {}),
        },
    )


def fit_corrections(answers: Sequence[ModelAnswers]) -> LLMCalibration:
    """Temperature and isotonic correction alone."""
    warm = LLMCalibration(answers[0].model, answers[0].prompt, temperature=_temperature(answers))
    means, truth, weight = [np.zeros(0)], [np.zeros(0)], [np.zeros(0)]
    for a in answers:
        rows = a.answered & np.isfinite(a.ratios)
        means.append(warm.moments(a.stated[rows])[0])
        truth.append(a.ratios[rows])
        weight.append(np.full(int(rows.sum()), 1.0 / max(1, a.answered.sum())))
    stated = np.concatenate(means)
    # Fine where decisions are made: a candidate counts as much as it was said to matter.
    share = np.concatenate(weight) * 2.0 ** -np.maximum(stated, 0.0)
    return replace(warm, ratio=isotonic(stated, np.concatenate(truth), share))


def _temperature(answers: Sequence[ModelAnswers]) -> float:
    """The divisor of log probabilities with which the truth is likeliest (Guo et al. 2017)."""
    losses = np.zeros(len(_TEMPERATURES))
    for a in answers:
        if not a.answered.any():
            continue
        label = BINS.labels_of(a.ratios[a.answered])
        logits = np.log(np.maximum(a.stated[a.answered], 1e-12))
        scores = logits[None] / _TEMPERATURES[:, None, None]
        scores = scores - scores.max(axis=2, keepdims=True)
        log_p = scores - np.log(np.exp(scores).sum(axis=2, keepdims=True))
        losses -= log_p[:, np.arange(len(label)), label].mean(axis=1)
    return float(_TEMPERATURES[int(np.argmin(losses))])


def isotonic(stated: Array, observed: Array, weight: Array) -> MonotoneCurve:
    """Rising knots through weighted means of `observed` over quantiles of `stated` (pooled violators)."""
    if not len(stated):
        return MonotoneCurve()
    order = np.argsort(stated, kind="stable")
    share = np.cumsum(weight[order]) / weight.sum()
    place = np.minimum((share * _MOST_KNOTS - 1e-9).astype(int), _MOST_KNOTS - 1)
    # What was stated alike must be corrected alike.
    _, same = np.unique(stated[order], return_inverse=True)
    first = np.full(int(same.max()) + 1, _MOST_KNOTS)
    np.minimum.at(first, same.reshape(-1), place)
    place = first[same.reshape(-1)]
    blocks: list[list[float]] = []  # weight, mean stated, mean observed
    for p in np.unique(place):
        rows = order[place == p]
        w = weight[rows]
        blocks.append([float(w.sum()), *(float(np.average(v[rows], weights=w)) for v in (stated, observed))])
        while len(blocks) > 1 and (blocks[-2][2] >= blocks[-1][2] or blocks[-1][1] - blocks[-2][1] < 1e-6):
            b, a = blocks.pop(), blocks.pop()
            total = a[0] + b[0]
            blocks.append([total, *((a[0] * a[i] + b[0] * b[i]) / total for i in (1, 2))])
    return MonotoneCurve(tuple(round(b[1], 5) for b in blocks), tuple(round(b[2], 5) for b in blocks))


@dataclass(frozen=True, eq=False)
class StackingEvidence:
    """One problem at the fast end, everything centred there: the candidates that the model spoke of and that ran."""

    family: str
    believed: Array
    """The learned forecast, compressed."""
    error: Array
    """Truth less the learned forecast."""
    gap: Array
    """The change that following the model all the way makes to the learned forecast."""
    weight: Array
    """Sums to 1: a candidate counts as much as it is fast."""

    @cached_property
    def news(self) -> Array:
        """The gap less what follows from the learned forecast by a straight line: a model that says the same of
        every candidate disagrees a lot, and knows nothing (Frisch-Waugh)."""
        return self._off_the_line(self.gap)

    @cached_property
    def residual(self) -> Array:
        """The error less its own line: level and tilt are for the clock to correct."""
        return self._off_the_line(self.error)

    def _off_the_line(self, values: Array) -> Array:
        x, spread = self.believed, float(self.weight @ self.believed**2)
        return values - x * float(self.weight @ (x * values)) / spread if spread > 1e-9 else values


def stacking_evidence(a: ModelAnswers, calibration: LLMCalibration) -> StackingEvidence | None:
    """The evidence of one problem; None where the model spoke of fewer than three candidates that ran."""
    trust, answer = np.zeros(len(a.learned)), a.learned.copy()
    trust[a.rows] = calibration.trust(a.stated, a.mass)
    answer[a.rows] = calibration.moments(a.stated)[0]
    gap = disagreement(a.learned, answer, trust, _HYPER)
    rows = (trust > 0) & np.isfinite(a.log2_ms)
    if rows.sum() < 3:
        return None
    true = _HYPER.compress(a.log2_ms[rows] - a.log2_ms[rows].min(), 0.0)
    forecast = _HYPER.compress(a.learned - a.learned.min(), 0.0)[rows]
    weight = 2.0**-true
    weight = weight / weight.sum()
    x, error, news = (v - weight @ v for v in (forecast, true - forecast, gap[rows]))
    return StackingEvidence(a.family, x, error, news, weight)


def fit_weight(evidence: Sequence[StackingEvidence]) -> tuple[BlendWeight, float]:
    """The weight, and the nats per candidate that it gains in families that were left out."""
    if not evidence:
        return BlendWeight(), 0.0
    curves = _family_curves(evidence)
    best, without = _best(curves), {f: _best(curves, but=f) for f in curves}
    # By as much of the best as families like that were left out of theirs.
    gains = [
        float(np.mean([np.interp(share * without[f], WEIGHTS, curve) for f, curve in curves.items()]))
        for share in _SHARES
    ]
    place = _first_best(np.array(gains))
    mean = round(float(_SHARES[place]) * best, 4)
    return (BlendWeight(mean, _spread_of_families(evidence)) if mean else BlendWeight()), gains[place]


def _family_curves(evidence: Sequence[StackingEvidence]) -> dict[str, Array]:
    """Nats per candidate that each of `WEIGHTS` gains over none, [weights], by family."""
    squares = np.array(
        [((e.residual - np.outer(WEIGHTS, e.news)) ** 2) @ e.weight + _NOISE**2 for e in evidence]
    )
    family = np.array([e.family for e in evidence])
    scores = np.zeros(squares.shape)
    for i, e in enumerate(evidence):
        other_errors = squares[family != e.family, 0]
        size = float(np.median(other_errors)) if len(other_errors) else float(squares[i, 0])
        count = 1.0 / float(e.weight @ e.weight)
        score = -(_FREEDOM + count) / (2.0 * count) * np.log1p(count * squares[i] / (_FREEDOM * size))
        scores[i] = score - score[0]
    return {str(f): scores[family == f].mean(axis=0) for f in np.unique(family)}


def _best(curves: Mapping[str, Array], but: str = "") -> float:
    rows = [curve for f, curve in curves.items() if f != but]
    return float(WEIGHTS[_first_best(np.sum(rows, axis=0))]) if rows else 0.0


def _first_best(scores: Array) -> int:
    """The first of those that are best but for rounding: nothing is followed that gains nothing."""
    return int(np.argmax(scores >= scores.max() - _ROUNDING))


def _spread_of_families(evidence: Sequence[StackingEvidence]) -> float:
    """Return the spread of the weight from family to family."""
    products = np.array([float(e.weight @ (e.error * e.news)) for e in evidence])
    own = np.array([float(e.weight @ e.news**2) for e in evidence])
    family = np.array([e.family for e in evidence])
    ridge = 0.05 * float(own.sum()) + 1e-4
    whole = float(products.sum() / (own.sum() + ridge))
    rows = [family == f for f in np.unique(family)]
    each = np.array([float(products[r].sum() / (own[r].sum() + ridge)) for r in rows])
    mass = np.array([float(own[r].sum()) for r in rows])
    between = math.sqrt(float(np.average((each - whole) ** 2, weights=mass + 1e-12)))
    return round(min(_MOST_SD, max(_LEAST_SD, between)), 4)
