"""How far to follow a model: the cross-validated log score of the learned forecast stacked with it.

The stacked forecast lies a share w in [0, 1] of the way from the learned forecast, which is always in, to the
model's. w is what explains the recorded times best, and counts for as much as it explained of families that it
was not fitted to: a small gain gives a small weight, none gives 0. Errors are scored as Student-t with the size
that they have in other families, problems and families weighing the same. What a group has of its own (a kind of
question or kernel, a distance, a number of known measurements) is mixed with the pooled weight in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.calibration import POOLED_KIND, BlendWeight
from forecast_autotune.llm.question_kinds import CONFIG, KNOWN_BOUNDS, QuestionWeight, known_class
from forecast_autotune.surrogates.covariance import Hyperparameters

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

WEIGHTS = np.linspace(0.0, 1.0, 201)
_SHARES = np.linspace(0.0, 1.0, 41)
_FREEDOM = 4.0
"""Degrees of freedom of the score: problems differ in the size of their errors."""
_LEAST_SD, _MOST_SD = 0.1, 0.6
"""Of a weight: kernels differ by more than a few families can show."""
_MOST_FACTOR = 2.0
"""Known measurements raise a weight to no more than this times its size."""
_NOISE = 0.02
_ROUNDING = 1e-9
"""Nats that sums of scores may differ by and be the same."""
_HYPER = Hyperparameters()
"""Only what compresses slowdowns matters here."""


@dataclass(frozen=True, eq=False)
class StackingEvidence:
    """One problem at the fast end, everything centred there: the candidates that the model spoke of and that ran."""

    family: str
    kind: str
    """Of kernel."""
    question: str
    known: int
    """Measurements that both forecasts had seen."""
    distance: float
    believed: Array
    """The learned forecast, compressed."""
    error: Array
    """Truth less the learned forecast."""
    gap: Array
    """What following the model all the way adds to the learned forecast."""
    weight: Array
    """Sums to 1: a candidate counts as much as it is fast."""
    slowdown: Array
    """log2 of the time over the best of these candidates."""

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

    def sums(self) -> tuple[float, float]:
        """(covariance of news and error, variance of the news)."""
        return float(self.weight @ (self.error * self.news)), float(self.weight @ self.news**2)

    def squares(self, follow: float) -> tuple[float, float]:
        """Mean squared error before, and after going `follow` of the way."""
        return float(self.weight @ self.error**2), float(self.weight @ (self.error - follow * self.gap) ** 2)

    def regret(self, follow: float) -> float:
        """Regret of the candidate that is forecast best, nothing being measured."""
        chosen = int(np.argmin(self.believed + follow * self.gap))
        return math.exp2(float(self.slowdown[chosen])) - 1.0


def fast_end(
    log2_ms: Array,
    learned: Array,
    gap: Array,
    rows: Flags,
    *,
    family: str,
    kind: str,
    question: str = CONFIG,
    known: int = 0,
    distance: float = math.inf,
) -> StackingEvidence | None:
    """The evidence of one problem; None where the model spoke of fewer than three candidates that ran."""
    rows = rows & np.isfinite(log2_ms)
    if rows.sum() < 3:
        return None
    slowdown = log2_ms[rows] - log2_ms[rows].min()
    true = _HYPER.compress(slowdown, 0.0)
    believed = _HYPER.compress(learned - learned.min(), 0.0)[rows]
    weight = 2.0**-true
    weight = weight / weight.sum()
    x, error, moved = (v - weight @ v for v in (believed, true - believed, gap[rows]))
    return StackingEvidence(family, kind, question, known, distance, x, error, moved, weight, slowdown)


def log_scores(evidence: Sequence[StackingEvidence]) -> Array:
    """Nats per candidate that each of `WEIGHTS` gains over none, [problems, weights]."""
    squares = np.array(
        [((e.residual - np.outer(WEIGHTS, e.news)) ** 2) @ e.weight + _NOISE**2 for e in evidence]
    )
    family = np.array([e.family for e in evidence])
    found = np.zeros(squares.shape)
    for i, e in enumerate(evidence):
        others = squares[family != e.family, 0]
        size = float(np.median(others)) if len(others) else float(squares[i, 0])
        count = 1.0 / float(e.weight @ e.weight)
        score = -(_FREEDOM + count) / (2.0 * count) * np.log1p(count * squares[i] / (_FREEDOM * size))
        found[i] = score - score[0]
    return found


@dataclass(frozen=True)
class CrossValidatedWeight:
    """A weight, those of each family as the others have it, and what they gain there."""

    mean: float
    without: Mapping[str, float]
    log_score: float = 0.0
    """Nats per candidate, families alike."""


def pooled_weight(scores: Array, family: Sequence[str]) -> CrossValidatedWeight:
    """The weight of all problems together: the best one, by as much of it as is best for families left out."""
    curves = _family_curves(scores, family)
    best, without = _best(curves), {f: _best(curves, but=f) for f in curves}
    return _shared(curves, dict.fromkeys(curves, 0.0), 0.0, without, best, 1.0)


def group_weight(scores: Array, family: Sequence[str], pooled: CrossValidatedWeight) -> CrossValidatedWeight:
    """The weight of a group, between its own and the pooled one: the fewer its families, the nearer to that."""
    curves = _family_curves(scores, family)
    base = {f: pooled.without.get(f, pooled.mean) for f in curves}
    own = {f: _best(curves, but=f) for f in curves}
    most = len(curves) / (len(curves) + 1.0) if len(curves) > 1 else 0.0
    return _shared(curves, base, pooled.mean, own, _best(curves), most)


def _shared(
    curves: Mapping[str, Array],
    base: Mapping[str, float],
    whole_base: float,
    own: Mapping[str, float],
    whole_own: float,
    most: float,
) -> CrossValidatedWeight:
    """The share of the way from a base to a group's own weight, up to `most`, that families left out like best."""

    def at(share: float) -> dict[str, float]:
        return {f: (1.0 - share) * base[f] + share * own[f] for f in curves}

    gains = [_gain(curves, at(share)) for share in most * _SHARES]
    best = _first_best(np.array(gains))
    share = float(most * _SHARES[best])
    return CrossValidatedWeight((1.0 - share) * whole_base + share * whole_own, at(share), gains[best])


def _gain(curves: Mapping[str, Array], weights: Mapping[str, float]) -> float:
    return float(np.mean([np.interp(weights[f], WEIGHTS, curve) for f, curve in curves.items()]))


def _family_curves(scores: Array, family: Sequence[str]) -> dict[str, Array]:
    names = np.array(family)
    return {str(f): scores[names == f].mean(axis=0) for f in np.unique(names)}


def _best(curves: Mapping[str, Array], but: str = "") -> float:
    rows = [curve for f, curve in curves.items() if f != but]
    return float(WEIGHTS[_first_best(np.sum(rows, axis=0))]) if rows else 0.0


def _first_best(scores: Array) -> int:
    """The first of those that are best but for rounding: nothing is followed that gains nothing."""
    return int(np.argmax(scores >= scores.max() - _ROUNDING))


@dataclass(frozen=True)
class StackingWeights:
    """What `LLMCalibration` holds of them."""

    weights: Mapping[str, BlendWeight]
    questions: Mapping[str, QuestionWeight]
    decay: tuple[tuple[float, float], ...]
    known: tuple[float, ...]


def fit_stacking(evidence: Sequence[StackingEvidence]) -> StackingWeights:
    """All weights, from evidence with and without known measurements."""
    first = [e for e in evidence if known_class(e.known) == 0]
    if not first:
        return StackingWeights({POOLED_KIND: BlendWeight()}, {}, (), ())
    scores, families = log_scores(first), [e.family for e in first]
    pooled, sd = pooled_weight(scores, families), _between(first)

    def group(of: Callable[[StackingEvidence], bool]) -> CrossValidatedWeight:
        rows = [i for i, e in enumerate(first) if of(e)]
        return group_weight(scores[rows], [families[i] for i in rows], pooled)

    questions = {}
    for name in sorted({e.question for e in first}):
        found = group(lambda e, name=name: e.question == name)  # type: ignore[misc]
        mine = [e for e in first if e.question == name]
        by: dict[str, list[float]] = {}
        for e in mine:
            by.setdefault(e.family, []).append(e.regret(0.0) - e.regret(found.without[e.family]))
        saved = float(np.mean([np.mean(values) for values in by.values()]))
        mean = round(found.mean, 4)
        questions[name] = QuestionWeight(
            mean, sd if mean else 0.0, len(mine), len(by), round(found.log_score, 5), round(saved, 5)
        )
    mean = round(pooled.mean, 4)
    if mean == 0.0:
        return StackingWeights({POOLED_KIND: BlendWeight()}, questions, (), ())
    weights = {POOLED_KIND: BlendWeight(mean, sd)}
    for name in sorted({e.kind for e in first}):
        own = round(group(lambda e, name=name: e.kind == name).mean, 4)  # type: ignore[misc]
        weights[name] = BlendWeight(own, sd)
    return StackingWeights(weights, questions, _decay(first, group, pooled.mean), _known(evidence, pooled))


def _between(evidence: Sequence[StackingEvidence]) -> float:
    """How much the weight differs from family to family."""
    sums = np.array([e.sums() for e in evidence])
    family = np.array([e.family for e in evidence])
    ridge = 0.05 * float(sums[:, 1].sum()) + 1e-4
    whole = float(sums[:, 0].sum() / (sums[:, 1].sum() + ridge))
    rows = [family == f for f in np.unique(family)]
    each = np.array([float(sums[r, 0].sum() / (sums[r, 1].sum() + ridge)) for r in rows])
    mass = np.array([float(sums[r, 1].sum()) for r in rows])
    between = math.sqrt(float(np.average((each - whole) ** 2, weights=mass + 1e-12)))
    return round(min(_MOST_SD, max(_LEAST_SD, between)), 4)


def _decay(
    evidence: Sequence[StackingEvidence],
    group: Callable[[Callable[[StackingEvidence], bool]], CrossValidatedWeight],
    pooled: float,
) -> tuple[tuple[float, float], ...]:
    """The weight's factor on the nearer and on the farther half of the problems (to other families)."""
    away = [e.distance for e in evidence if math.isfinite(e.distance)]
    if not away or min(away) == max(away):
        return ()
    middle = float(np.median(away))
    near, far = (
        min(1.0, group(of).mean / pooled)
        for of in (lambda e: e.distance <= middle, lambda e: e.distance > middle)
    )
    # Farther must not count more.
    return ((round(middle, 4), round(near, 4)), (round(max(away), 4), round(min(near, far), 4)))


def _known(evidence: Sequence[StackingEvidence], pooled: CrossValidatedWeight) -> tuple[float, ...]:
    """The weight's factor per class of known measurements; empty where none was looked at."""
    found = [1.0]
    for place in range(1, len(KNOWN_BOUNDS)):
        rows = [e for e in evidence if known_class(e.known) == place]
        if not rows:
            return ()
        own = group_weight(log_scores(rows), [e.family for e in rows], pooled)
        found.append(round(min(_MOST_FACTOR, own.mean / pooled.mean), 4))
    return tuple(found)
