"""Answers on recorded problems -> a calibration: temperature, isotonic corrections, intervals, weights.

What is reported of a model, and how far an ensemble follows it, is estimated on families that were left out
of the corrections. All statistics give every problem the same weight, and errors are clustered by family:
shapes of one kernel repeat each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.calibration import (
    MIN_REMAINING_DOUBT,
    POOLED_KIND,
    BlendWeight,
    CalibrationScope,
    LLMCalibration,
    ModelLatency,
    MonotoneCurve,
)
from forecast_autotune.llm.similarity import FittedProblems
from forecast_autotune.numerics import INTERVAL_LEVELS
from forecast_autotune.surrogates.covariance import Hyperparameters
from forecast_autotune.surrogates.language_model.blend import disagreement
from forecast_train.evaluation.bin_scores import bin_labels
from forecast_train.evaluation.splits import SplitError
from forecast_train.llm.calibration.answer_collection import ModelAnswers
from forecast_train.llm.calibration.stacking import StackingEvidence, fast_end, fit_stacking

Array = npt.NDArray[np.float64]

MOST_KNOTS = 12
"""Most knots of an isotonic correction: quantiles of what was stated, pooled before it is made monotone."""
REACH_FACTOR = 1.6
"""Distances up to this times the largest one met count as within reach."""
_TEMPERATURES = np.exp(np.linspace(math.log(0.3), math.log(30.0), 60))
_WEIGHT_GRID = np.linspace(0.0, 1.0, 21)
_DEFAULT_HYPER = Hyperparameters()
"""Only what compresses slowdowns matters here."""


def fit_calibration(
    heard: Sequence[ModelAnswers],
    about: Mapping[str, Any] | None = None,
    later: Sequence[StackingEvidence] = (),
) -> LLMCalibration:
    """The calibration of the model that was heard; `saved` is left at 0 (see `saving_estimate`).

    `later`: evidence with measurements known. Raises `SplitError` for fewer than three families.
    """
    apart = corrections_by_family(heard)
    base = fit_corrections(heard)
    evidence = [e for e in _evidence(heard, apart) if e is not None]
    made = fit_stacking([*evidence, *later])
    known = [h for h in heard if h.tokens and h.seconds > 0]
    timed = [h.seconds for h in heard if h.seconds > 0]
    told = np.concatenate([h.mass[h.stated.sum(axis=1) > 0.5] for h in heard])
    return replace(
        base,
        intervals=_intervals(heard, apart),
        weights=made.weights,
        questions=made.questions,
        decay=made.decay,
        known=made.known,
        remains=_error_ratio(evidence, made.weights) if made.weights[POOLED_KIND].mean > 0 else 1.0,
        fail_weight=_fail_weight(heard, apart),
        scope=CalibrationScope(
            tuple(sorted({h.device for h in heard})),
            tuple(sorted({h.language for h in heard})),
            max(h.characters for h in heard),
            0.5 * float(np.quantile(told, 0.01)) if len(told) else 0.0,
            _kernel_map(heard),
        ),
        pace=ModelLatency(
            sum(h.seconds for h in known) / max(1, sum(h.tokens for h in known)),
            answer_s=round(float(np.median(timed)), 6) if timed else 0.0,
        ),
        about={
            "problems": len(heard),
            "kernels": len({h.kernel for h in heard}),
            "families": sorted(apart),
            "answers": int(sum(len(h.rows) for h in heard)),
            **(about or {}),
        },
    )


def fit_corrections(heard: Sequence[ModelAnswers]) -> LLMCalibration:
    """Temperature and isotonic corrections alone."""
    first = heard[0]
    plain = LLMCalibration(first.model, first.prompt)
    warm = replace(plain, temperature=_temperature(heard))
    means, fails, truth, weight = _gather_answers(heard, warm)
    ran = np.isfinite(truth)
    return replace(
        warm,
        # Fine where decisions are made: a candidate counts as much as it was said to matter.
        ratio=isotonic(means[ran], truth[ran], weight[ran] * 2.0 ** -np.maximum(means[ran], 0.0)),
        fails=isotonic(fails, (~ran).astype(float), weight),
    )


def _gather_answers(
    heard: Sequence[ModelAnswers], calibration: LLMCalibration
) -> tuple[Array, Array, Array, Array]:
    """(stated mean, stated P(fails), true ratio, weight) of every answer, problems weighing the same."""
    columns: list[tuple[Array, Array, Array, Array]] = []
    for h in heard:
        told = h.stated.sum(axis=1) > 0.5
        if told.any():
            mean, _, fails = calibration.moments(h.stated[told])
            columns.append((mean, fails, h.ratios[told], np.full(int(told.sum()), 1.0 / told.sum())))
    if not columns:
        return np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0)
    a, b, c, d = (np.concatenate(x) for x in zip(*columns, strict=True))
    return a, b, c, d


def _temperature(heard: Sequence[ModelAnswers]) -> float:
    """What log probabilities are divided by so that the truth is likeliest (Guo et al. 2017)."""
    losses = np.zeros(len(_TEMPERATURES))
    for h in heard:
        told = h.stated.sum(axis=1) > 0.5
        if not told.any():
            continue
        label = bin_labels(h.ratios[told])
        logits = np.log(np.maximum(h.stated[told], 1e-12))
        scaled = logits[None] / _TEMPERATURES[:, None, None]
        scaled = scaled - scaled.max(axis=2, keepdims=True)
        log_p = scaled - np.log(np.exp(scaled).sum(axis=2, keepdims=True))
        losses -= log_p[:, np.arange(len(label)), label].mean(axis=1)
    return float(_TEMPERATURES[int(np.argmin(losses))])


def isotonic(stated: Array, observed: Array, weight: Array) -> MonotoneCurve:
    """Rising knots through weighted means of `observed` over quantiles of `stated` (pooled violators)."""
    if not len(stated):
        return MonotoneCurve()
    order = np.argsort(stated, kind="stable")
    share = np.cumsum(weight[order]) / weight.sum()
    place = np.minimum((share * MOST_KNOTS - 1e-9).astype(int), MOST_KNOTS - 1)
    # What was stated alike must be corrected alike.
    _, same = np.unique(stated[order], return_inverse=True)
    first = np.full(int(same.max()) + 1, MOST_KNOTS)
    np.minimum.at(first, same.reshape(-1), place)
    place = first[same.reshape(-1)]
    blocks: list[list[float]] = []  # weight, mean stated, mean observed
    for p in np.unique(place):
        rows = order[place == p]
        w = weight[rows]
        blocks.append(
            [
                float(w.sum()),
                float(np.average(stated[rows], weights=w)),
                float(np.average(observed[rows], weights=w)),
            ]
        )
        while len(blocks) > 1 and (blocks[-2][2] >= blocks[-1][2] or blocks[-1][1] - blocks[-2][1] < 1e-6):
            b, a = blocks.pop(), blocks.pop()
            total = a[0] + b[0]
            blocks.append([total, *((a[0] * a[i] + b[0] * b[i]) / total for i in (1, 2))])
    return MonotoneCurve(tuple(round(b[1], 5) for b in blocks), tuple(round(b[2], 5) for b in blocks))


def _intervals(
    heard: Sequence[ModelAnswers], apart: Mapping[str, LLMCalibration]
) -> dict[str, tuple[float, ...]]:
    """Split-conformal factors per device, and pooled, from families left out of the corrections."""
    scores: dict[str, list[tuple[Array, Array]]] = {}
    for h in heard:
        told = (h.stated.sum(axis=1) > 0.5) & np.isfinite(h.ratios)
        if not told.any():
            continue
        mean, sd, _ = apart[h.family].moments(h.stated[told])
        pair = (
            np.abs(h.ratios[told] - mean) / np.maximum(sd, 1e-3),
            np.full(int(told.sum()), 1.0 / told.sum()),
        )
        for group in (POOLED_KIND, h.device):
            scores.setdefault(group, []).append(pair)
    found = {}
    for group, pairs in scores.items():
        z, weight = (np.concatenate(x) for x in zip(*pairs, strict=True))
        order = np.argsort(z)
        share = np.cumsum(weight[order]) / weight.sum()
        place = np.minimum(np.searchsorted(share, INTERVAL_LEVELS), len(z) - 1)
        widths = np.maximum.accumulate(z[order][place])
        normal = [NormalDist().inv_cdf(0.5 + level / 2) for level in INTERVAL_LEVELS]
        found[group] = tuple(round(max(float(w / n), 0.01), 4) for w, n in zip(widths, normal, strict=True))
    return found


def corrections_by_family(heard: Sequence[ModelAnswers]) -> dict[str, LLMCalibration]:
    """Temperature and isotonic corrections without each family.

    Raises `SplitError` for fewer than three families: nothing could be left out.
    """
    families = sorted({h.family for h in heard})
    if len(families) < 3:
        raise SplitError(
            f"calibrating a model needs three or more kernel families, got {', '.join(families)}: add tables"
        )
    return {f: fit_corrections([h for h in heard if h.family != f]) for f in families}


def model_gap(h: ModelAnswers, calibration: LLMCalibration) -> tuple[Array, npt.NDArray[np.bool_]]:
    """The model less the learned forecast by its trust, log2, and where it said anything; [n] each."""
    trust = np.zeros(len(h.learned))
    said = h.learned.copy()
    trust[h.rows] = calibration.trust(h.stated, h.mass)
    said[h.rows] = calibration.moments(h.stated)[0]
    return disagreement(h.learned, said, trust, _DEFAULT_HYPER), trust > 0


def _evidence(
    heard: Sequence[ModelAnswers], apart: Mapping[str, LLMCalibration]
) -> list[StackingEvidence | None]:
    """What each problem says of the model before anything is measured."""
    found = []
    for h, distance in zip(heard, answer_distances(heard), strict=True):
        gap, told = model_gap(h, apart[h.family])
        found.append(
            fast_end(
                h.log2_ms,
                h.learned,
                gap,
                told,
                family=h.family,
                kind=h.kind,
                question=h.question,
                distance=distance,
            )
        )
    return found


def _error_ratio(evidence: Sequence[StackingEvidence], weights: Mapping[str, BlendWeight]) -> float:
    """Root of mean squared error with the model over that without, plus a standard error, families alike."""
    parts: dict[str, Array] = {}
    for e in evidence:
        pair = np.array(e.squares((weights.get(e.kind) or weights[POOLED_KIND]).mean))
        parts[e.family] = parts.get(e.family, np.zeros(2)) + pair
    table = np.array(list(parts.values()))
    whole = table.sum(axis=0)
    if whole[0] <= 0:
        return 1.0
    left = (whole[1] - table[:, 1]) / np.maximum(whole[0] - table[:, 0], 1e-12)
    n = len(left)
    error = math.sqrt((n - 1) / n * float(((left - left.mean()) ** 2).sum()))
    return round(math.sqrt(min(1.0, max(MIN_REMAINING_DOUBT**2, float(whole[1] / whole[0]) + error))), 4)


def _kernel_map(heard: Sequence[ModelAnswers]) -> FittedProblems:
    placed = [h for h in heard if h.place is not None]
    if not placed:
        return FittedProblems()
    far = max((d for d in answer_distances(heard) if math.isfinite(d)), default=math.inf)
    places = np.array([h.place for h in placed], dtype=float)
    scale = tuple(round(float(s), 5) for s in places.std(axis=0))
    return FittedProblems(
        tuple(tuple(round(float(x), 4) for x in p) for p in places), scale, round(REACH_FACTOR * far, 4)
    )


def answer_distances(heard: Sequence[ModelAnswers]) -> list[float]:
    """Of each problem to the nearest one of another family, as a new kernel would be met."""
    places = np.array([h.place for h in heard if h.place is not None], dtype=float)
    if not len(places):
        return [math.inf] * len(heard)
    scale = tuple(places.std(axis=0).tolist())
    found = []
    for h in heard:
        others = tuple(o.place for o in heard if o.family != h.family and o.place is not None)
        place = None if h.place is None else np.array(h.place)
        found.append(FittedProblems(others, scale).distance(place))
    return found


def _fail_weight(heard: Sequence[ModelAnswers], apart: Mapping[str, LLMCalibration]) -> float:
    """The share of the model's log odds of failing that makes the recorded outcomes likeliest.

    0 unless it gains more than its standard error over families, against none of it and against the same
    share of one constant for all candidates: to correct a level takes no language model.
    """
    losses: dict[str, list[Array]] = {}
    for h in heard:
        cal = apart[h.family]
        told = cal.trust(h.stated, h.mass) > 0
        if not told.any():
            continue
        _, _, fails = cal.moments(h.stated)
        usual = np.full(
            len(fails), float(np.mean([np.isnan(o.ratios).mean() for o in heard if o.family != h.family]))
        )
        mine, failed = _log_odds(h.p_fail[h.rows]), np.isnan(h.ratios)
        pair = []
        for theirs in (_log_odds(fails), _log_odds(usual)):
            share = _WEIGHT_GRID[:, None] * told
            p = 1.0 / (1.0 + np.exp(-((1.0 - share) * mine + share * theirs)))
            pair.append(-np.where(failed, np.log(p), np.log1p(-p)).mean(axis=1))
        losses.setdefault(h.family, []).append(np.stack(pair))
    if len(losses) < 2:
        return 0.0
    model, constant = np.moveaxis(np.array([np.mean(rows, axis=0) for rows in losses.values()]), 1, 0)
    best = int(np.argmin(model.mean(axis=0)))
    gains = (model[:, 0] - model[:, best], constant[:, best] - model[:, best])
    enough = all(g.mean() > g.std(ddof=1) / math.sqrt(len(g)) for g in gains)
    return round(float(_WEIGHT_GRID[best]), 4) if enough else 0.0


def _log_odds(p: Array) -> Array:
    inside = np.clip(p, 0.002, 0.995)
    return np.asarray(np.log(inside / (1.0 - inside)))
