"""The paper's metrics (arXiv 2605.31464, `calibration/v2` of its reference implementation), on our bins.

p [n, K] are stated probabilities of K ordered labels (the last one is "fails", slower than all), y [n] the
true labels; the predicted label is the most probable one. Brier is halved and the ranked probability score
divided by K - 1, so that both lie in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.bins import BINS
from forecast_autotune.surrogates.protocol import Forecasts
from forecast_train.evaluation import metrics
from forecast_train.evaluation.metrics import FloatArray, RowIndices
from forecast_train.llm.rewards import brier, crps

BIN_DRAWS = 512


@dataclass(frozen=True)
class BinScores:
    """Scores of one problem's forecasts as distributions over bins."""

    accuracy: float
    """Share whose most probable label is the true one."""
    off_by_one: float
    """Share whose most probable label is the true one or a neighbour of it."""
    brier: float
    """1/2 sum_k (p_k - 1[k = y])^2, mean."""
    rps: float
    """1/(K - 1) sum_k (P_k - 1[k >= y])^2 over the first K - 1 labels, P cumulative; mean. Their CRPS."""
    nll: float
    """-ln p_y, mean, in nats; p_y counts as 1e-12 at least."""
    confidence: list[float]
    """Probability of the predicted label, per candidate."""
    hit: list[int]
    """1 where it was the true one."""


def score_bins(p: FloatArray, y: RowIndices) -> BinScores:
    """The scores of n >= 1 forecasts. Raises `ValueError` for none, or for rows that do not sum to 1."""
    if not len(p) or len(p) != len(y):
        raise ValueError(f"scores need as many labels as forecasts, and one at least: {len(p)} and {len(y)}")
    if not np.allclose(p.sum(axis=1), 1.0, atol=1e-6):
        raise ValueError("the probabilities of a forecast must sum to 1: leave out rows without an answer")
    predicted = p.argmax(axis=1)
    hit = predicted == y
    confidence = p[np.arange(len(p)), predicted]
    return BinScores(
        float(hit.mean()),
        float((np.abs(predicted - y) <= 1).mean()),
        float(brier(p, y).mean()),
        float(crps(p, y).mean()),
        float(-np.log(np.maximum(p[np.arange(len(p)), y], 1e-12)).mean()),
        confidence.tolist(),
        hit.astype(int).tolist(),
    )


def ece(confidence: FloatArray, hit: npt.NDArray[np.bool_]) -> float:
    """Expected calibration error over 10 buckets of equal width: sum n_i/N |confidence_i - accuracy_i|."""
    return metrics.ece(confidence, hit)


def bin_labels(ratios: FloatArray) -> RowIndices:
    """The true label of log2(time / reference time) [n]; NaN is a failure."""
    failed = np.isnan(ratios)
    return np.where(failed, BINS.failure_index, BINS.index(np.where(failed, 0.0, ratios))).astype(np.intp)


def bins_from_forecasts(forecasts: Forecasts, rows: RowIndices, reference: int, seed: int = 0) -> FloatArray:
    """What forecasts say of the bins of time / reference time, [len(rows), K], from joint draws.

    `reference` is a row of the forecasts; its own time is as uncertain as the forecasts have it.
    """
    together = np.concatenate([rows, [reference]]).astype(np.intp)
    drawn = forecasts.samples(together, BIN_DRAWS, seed)
    place = BINS.index(drawn[:, :-1] - drawn[:, -1:])
    found = np.zeros((len(rows), len(BINS) + 1))
    for k in range(len(BINS)):
        found[:, k] = (place == k).mean(axis=0)
    p_fail = forecasts.p_fail[rows]
    found[:, : BINS.failure_index] *= (1.0 - p_fail)[:, None]
    found[:, BINS.failure_index] = p_fail
    return found


def found_near_best(
    order: RowIndices, log2_ms: FloatArray, *, share: float = 0.1, within: float = 0.2
) -> bool:
    """Whether measuring the best `share` of an order finds one within `within` of the best of all.

    The paper's headline: 10 % measured, found within 20 %. `log2_ms` [n] holds NaN for failures.
    """
    path = metrics.regret_path(order, log2_ms)
    return metrics.regret_at(path, math.ceil(share * len(order))) <= within + 1e-9
