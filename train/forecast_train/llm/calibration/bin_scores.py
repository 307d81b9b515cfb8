"""What stated bins are worth on the candidates that a model was asked about: the paper's table, by problem.

A model's own bins and any surrogate's forecasts are scored against the same reference, on the same
candidates. Intervals resample kernels, whose problems hang together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.records.codec import Record, json_option, reader_of
from forecast_autotune.surrogates.protocol import Forecasts
from forecast_train.evaluation import metrics
from forecast_train.evaluation.bin_scores import (
    BinScores,
    bin_labels,
    bins_from_forecasts,
    found_near_best,
    score_bins,
)
from forecast_train.evaluation.bootstrap import BOOTSTRAP_DRAWS, cluster_bootstrap, paired_bootstrap
from forecast_train.evaluation.metrics import BootstrapInterval, FloatArray, RowIndices
from forecast_train.llm.calibration.answer_collection import ModelAnswers

MEASURED_SHARE = 0.1
"""Share of the candidates that is measured in the order of a forecast."""
COVERAGES = (0.25, 0.5, 0.75, 1.0)
"""Shares of all forecasts, the surest first, whose error is told."""
_LEAST_CORRELATION = 0.01
"""A family's rank correlation counts as this at least in the geometric mean."""
_FAILED_PLACE = float(BINS.bounds[-1, 1] + 1.0)
"""Place in the order of one that fails for certain: behind the slowest bin."""


@dataclass(frozen=True)
class BinScoresOfProblem(Record):
    """One problem's forecasts, scored."""

    problem: str
    kernel: str
    family: str
    candidates: int
    binned: BinScores
    spearman: float = field(
        metadata=json_option(
            read=lambda value: math.nan if value is None else reader_of(float)(value),
            write=lambda found: None if math.isnan(found) else found,
        )
    )
    """Of expected and measured log2 time, of those that ran."""
    recovered: bool
    """Whether measuring a tenth in the stated order finds one within 20 % of the best."""
    regret: float
    """Of the best of that tenth."""


def model_bin_scores(h: ModelAnswers, calibration: LLMCalibration | None = None) -> BinScoresOfProblem | None:
    """What the model itself stated, at the calibration's temperature if one is given; None if nothing."""
    stated = h.stated if calibration is None else calibration.temperature_scaled(h.stated)
    return _scored(h, stated)


def forecast_bin_scores(
    h: ModelAnswers, forecasts: Forecasts, candidates: Sequence[str], *, seed: int = 0
) -> BinScoresOfProblem | None:
    """The same of a surrogate's forecasts, as bins against the same reference; None where it is not listed.

    `candidates` are the `Candidate.id` of the forecasts' rows.
    """
    if h.reference not in candidates:
        return None
    return _scored(h, bins_from_forecasts(forecasts, h.rows, list(candidates).index(h.reference), seed))


def _scored(h: ModelAnswers, p: FloatArray) -> BinScoresOfProblem | None:
    # That the reference is as fast as itself is no news; one row of zeros is no answer.
    told = (p.sum(axis=1) > 0.5) & (np.abs(np.nan_to_num(h.ratios, nan=1.0)) > 1e-9)
    p, ratios = p[told], h.ratios[told]
    ran = np.isfinite(ratios)
    if ran.sum() < 2:
        return None
    mean, _, fails = BINS.moments(p)
    expected = (1.0 - fails) * mean + fails * _FAILED_PLACE
    order: RowIndices = np.argsort(expected, kind="stable").astype(np.intp)
    path = metrics.regret_path(order, ratios)
    return BinScoresOfProblem(
        h.problem,
        h.kernel,
        h.family,
        len(p),
        score_bins(p, bin_labels(ratios)),
        metrics.spearman(mean[ran], ratios[ran]),
        found_near_best(order, ratios, share=MEASURED_SHARE),
        metrics.regret_at(path, math.ceil(MEASURED_SHARE * len(order))),
    )


_Statistic = Callable[[Sequence[BinScoresOfProblem], RowIndices], float]


def _mean(
    of: Callable[[BinScoresOfProblem], float], words: Sequence[BinScoresOfProblem], rows: RowIndices
) -> float:
    values = np.array([of(words[i]) for i in rows])
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan


def _ece(words: Sequence[BinScoresOfProblem], rows: RowIndices) -> float:
    p, hit = _pooled(words, rows)
    return metrics.ece(p, hit > 0)


def _aurc(words: Sequence[BinScoresOfProblem], rows: RowIndices) -> float:
    p, hit = _pooled(words, rows)
    return metrics.aurc(p, 1.0 - hit)


def _pooled(words: Sequence[BinScoresOfProblem], rows: RowIndices) -> tuple[FloatArray, FloatArray]:
    p = np.concatenate([np.array(words[i].binned.confidence) for i in rows])
    return p, np.concatenate([np.array(words[i].binned.hit, dtype=float) for i in rows])


def _by_family(words: Sequence[BinScoresOfProblem], rows: RowIndices) -> float:
    """Geometric mean over families of their mean rank correlation."""
    found: dict[str, list[float]] = {}
    for i in rows:
        if not math.isnan(words[i].spearman):
            found.setdefault(words[i].family, []).append(words[i].spearman)
    logs = [math.log(max(_LEAST_CORRELATION, float(np.mean(values)))) for values in found.values()]
    return math.exp(float(np.mean(logs))) if logs else math.nan


def _regret(words: Sequence[BinScoresOfProblem], rows: RowIndices) -> float:
    return metrics.geomean_regret(np.array([words[i].regret for i in rows]))


STATISTICS: Mapping[str, _Statistic] = {
    "accuracy": partial(_mean, lambda w: w.binned.accuracy),
    "off_by_one": partial(_mean, lambda w: w.binned.off_by_one),
    "ece": _ece,
    "brier": partial(_mean, lambda w: w.binned.brier),
    "crps": partial(_mean, lambda w: w.binned.rps),
    "nll": partial(_mean, lambda w: w.binned.nll),
    "spearman": partial(_mean, lambda w: w.spearman),
    "spearman_families": _by_family,
    "recovery": partial(_mean, lambda w: float(w.recovered)),
    "regret": _regret,
    "aurc": _aurc,
}
"""By name. `crps` is the ranked probability score over K - 1 (`rewards.crps`); `ece` and `aurc` pool all
candidates, the others are means over problems; `regret` is a geometric mean."""
LESS_IS_BETTER = ("ece", "brier", "crps", "nll", "regret", "aurc")


def statistics_table(words: Sequence[BinScoresOfProblem], *, draws: int = BOOTSTRAP_DRAWS) -> dict[str, Any]:
    """Every statistic as [value, low, high] (95 %, kernels resampled), and errors by coverage.

    Raises `ValueError` for no words at all.
    """
    if not words:
        raise ValueError("nothing was said of any problem: there is nothing to score")
    kernels = [w.kernel for w in words]
    found: dict[str, Any] = {"problems": len(words), "kernels": len(set(kernels))}
    found["families"] = len({w.family for w in words})
    found["candidates"] = sum(w.candidates for w in words)
    for name, statistic in STATISTICS.items():
        found[name] = rounded_interval(cluster_bootstrap(partial(statistic, words), kernels, draws=draws))
    p, hit = _pooled(words, np.arange(len(words)))
    coverage, risk = metrics.risk_coverage(p, 1.0 - hit)
    places = [max(0, math.ceil(share * len(coverage)) - 1) for share in COVERAGES]
    found["error_at_coverage"] = {
        f"{s:.0%}": round(float(risk[i]), 4) for s, i in zip(COVERAGES, places, strict=True)
    }
    return found


def paired_differences(
    one: Sequence[BinScoresOfProblem], other: Sequence[BinScoresOfProblem], *, draws: int = BOOTSTRAP_DRAWS
) -> dict[str, Any]:
    """`one` - `other` of every statistic as [value, low, high], on the problems of which both spoke."""
    theirs = {w.problem: w for w in other}
    pairs = [(w, theirs[w.problem]) for w in one if w.problem in theirs]
    if not pairs:
        raise ValueError("no problem has words of both: there is nothing to compare")
    both = [w for pair in pairs for w in pair]
    kernels = [w.kernel for w, _ in pairs]
    mine, others = (np.arange(len(pairs)) * 2 + i for i in (0, 1))
    found = {}
    for name, statistic in STATISTICS.items():
        on = partial(_select, statistic, both)
        found[name] = rounded_interval(
            paired_bootstrap(on, mine.astype(float), others.astype(float), kernels, draws=draws)
        )
    return found


def _select(statistic: _Statistic, words: Sequence[BinScoresOfProblem], places: FloatArray) -> float:
    return statistic(words, places.astype(np.intp))


def rounded_interval(interval: BootstrapInterval) -> list[float | None]:
    """[value, low, high], four digits; null where there is none."""
    ends = (interval.value, interval.low, interval.high)
    return [round(x, 4) if math.isfinite(x) else None for x in ends]
