"""Bins of sources, forecast by a model: recalibrated without the family, and the figures of the paper's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from benchmarks.lib.variants.source_scores import Sums, differences, figures
from forecast_train.evaluation.bin_scores import ece, found_near_best
from forecast_train.llm.rewards import brier, crps

FloatArray = npt.NDArray[np.float64]
RowIndices = npt.NDArray[np.intp]

RIDGE = 2.0
"""Penalty on the squares of a label's shift and of the temperature's logarithm, in units of one log likelihood."""
LEAST_P = 1e-6
WITHIN = (0.02, 0.2)
"""How near to the best of all the best-forecast tenth must come."""


def recalibrated_without_family(p: FloatArray, label: RowIndices, families: Sequence[str]) -> FloatArray:
    """P [n, labels] with a temperature and a shift of each label that were fitted to other families' rows.

    A label of -1 is not known, and nothing is fitted to it. Rows sum to 1.
    """
    names = np.asarray(families, dtype=object)
    logits = np.log(np.maximum(p, LEAST_P))
    found = np.zeros_like(p)
    for family in sorted(set(families)):
        own = names == family
        fit = ~own & (label >= 0)
        beta = _fit_shifts(logits[fit], label[fit])
        found[own] = special.softmax(np.exp(beta[0]) * logits[own] + beta[1:], axis=1)
    return found


def _fit_shifts(logits: FloatArray, label: RowIndices) -> FloatArray:
    """Logarithm of the inverse temperature, then the labels' shifts, by penalised likelihood."""
    hit = np.eye(logits.shape[1])[label]

    def loss(beta: FloatArray) -> tuple[float, FloatArray]:
        scaled = np.exp(beta[0]) * logits
        log_p = special.log_softmax(scaled + beta[1:], axis=1)
        away = np.exp(log_p) - hit
        value = -float((log_p * hit).sum()) + 0.5 * RIDGE * float(beta @ beta)
        slope = np.concatenate([[float((away * scaled).sum())], away.sum(axis=0)]) + RIDGE * beta
        return value, slope

    start = np.zeros(logits.shape[1] + 1)
    return np.asarray(optimize.minimize(loss, start, jac=True, method="L-BFGS-B").x)


def bin_sums(p: FloatArray, label: RowIndices, kernels: Sequence[RowIndices]) -> Sums:
    """Sums over the known sources of each kernel, by figure of the paper's table; `nll` in nats."""
    found: dict[str, list[tuple[float, float]]] = {}
    for rows in kernels:
        at = rows[label[rows] >= 0]
        mine, y = p[at], label[at]
        predicted = mine.argmax(axis=1)
        values = {
            "accuracy": predicted == y,
            "off_by_one": np.abs(predicted - y) <= 1,
            "brier": brier(mine, y),
            "crps": crps(mine, y),
            "nll": -np.log(np.maximum(mine[np.arange(len(y)), y], 1e-12)),
        }
        for name, each in values.items():
            found.setdefault(name, []).append((float(np.sum(each)), float(len(y))))
    return found


def calibration_error(p: FloatArray, label: RowIndices) -> float:
    """ECE of the named bin over the known sources."""
    known = label >= 0
    predicted = p[known].argmax(axis=1)
    confidence = p[known][np.arange(len(predicted)), predicted]
    return float(ece(confidence, predicted == label[known]))


def near_best_shares(order: FloatArray, truth: FloatArray, kernels: Sequence[RowIndices]) -> dict[str, float]:
    """How often the tenth that comes first in an order (least first) holds one within 2 % and 20 % of the best."""
    found = {}
    for within in WITHIN:
        near = [
            found_near_best(np.argsort(order[r], kind="stable"), truth[r], within=within) for r in kernels
        ]
        found[f"top_10_percent_within_{round(100 * within)}"] = round(float(np.mean(near)), 4)
    return found


def table_row(
    p: FloatArray, label: RowIndices, order: FloatArray, truth: FloatArray, kernels: Sequence[RowIndices]
) -> dict[str, Any]:
    """A row of the paper's table: figures with their 95 % intervals over kernels, ECE and near-best shares."""
    found: dict[str, Any] = dict(figures(bin_sums(p, label, kernels)))
    found["ece"] = round(calibration_error(p, label), 4)
    return found | near_best_shares(order, truth, kernels)


def table_differences(
    one: FloatArray, other: FloatArray, label: RowIndices, kernels: Sequence[RowIndices]
) -> Mapping[str, list[float | None]]:
    """Figures of one less those of the other, paired over kernels."""
    return differences(bin_sums(one, label, kernels), bin_sums(other, label, kernels))
