"""Scores of forecasts of sources, a row per kernel; every figure is a ratio of sums over kernels.

So one bootstrap over kernels serves all of them, and differences of two arms are paired by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_train.evaluation import metrics

FloatArray = npt.NDArray[np.float64]
RowIndices = npt.NDArray[np.intp]

APART = math.log2(1.035)
"""Two sources that differ by more are told apart: about thrice the noise of a recorded ratio."""
SHARE = 0.1
LOTS = 200
"""Random orders that a random choice is the mean of."""
BOOTSTRAP_DRAWS = 2000


@dataclass(frozen=True)
class KernelForecasts:
    """One arm's forecasts of the sources of one kernel, [n] each."""

    truth: FloatArray
    """log2(best time / the base's); NaN for one that is wrong."""
    centre: FloatArray
    """Forecast of `truth`: what is ranked."""
    worth: FloatArray
    """What is measured first has most of it."""
    log_density: FloatArray
    crps: FloatArray


def kernel_scores(one: KernelForecasts) -> dict[str, tuple[float, float]]:
    """Sums (above, below) of every figure of a kernel; a figure is a sum of the first over that of the second.

    `recovered` is the gain of the best-forecast tenth over the gain of the best of all; `near` and `far` say
    how often that tenth holds one within 2 % and 20 % of the best; `first`, `three` are log2 gains over the
    base of the best of the first 1, 3 measured (the base is there anyway).
    """
    ran = np.isfinite(one.truth)
    truth, centre = one.truth[ran], one.centre[ran]
    found = {"spearman": (metrics.spearman(centre, truth), 1.0)}
    i, k = np.triu_indices(len(truth), 1)
    apart = np.abs(truth[i] - truth[k]) > APART
    agree = np.sign((truth[i] - truth[k]) * (centre[i] - centre[k]))[apart]
    found["pairs"] = (float((agree > 0).sum() + 0.5 * (agree == 0).sum()), float(apart.sum()))
    order = np.argsort(-one.worth, kind="stable")
    found |= chosen_scores(one.truth, [order])
    error = centre - truth
    found["squared_error"] = (float(error @ error), float(len(error)))
    found["log_score"] = (float(one.log_density[ran].sum()), float(len(error)))
    found["crps"] = (float(one.crps[ran].sum()), float(len(error)))
    return found


def chosen_scores(
    truth: FloatArray, orders: Sequence[RowIndices], done: int = 0
) -> dict[str, tuple[float, float]]:
    """The figures that an order alone decides, as a mean over several; `done` were measured before, for free.

    After those, a tenth of the others is measured.
    """
    tenth = done + max(1, math.ceil(SHARE * (len(truth) - done)))
    best = float(np.nanmin(truth))
    rows = []
    for order in orders:
        tried = np.fmin.accumulate(np.where(np.isfinite(truth), truth, math.inf)[order])
        at = [float(tried[min(count, len(tried)) - 1]) for count in (tenth, done + 1, done + 3)]
        gains = [max(0.0, -value) for value in at]
        rows.append([gains[0], at[0] <= best + math.log2(1.02), at[0] <= best + math.log2(1.2), *gains[1:]])
    recovered, near, far, first, three = (float(v) for v in np.mean(rows, axis=0))
    return {
        "recovered": (recovered, max(0.0, -best)),
        "near": (near, 1.0),
        "far": (far, 1.0),
        "first": (first, 1.0),
        "three": (three, 1.0),
    }


def random_scores(truth: FloatArray, seed: int, done: int = 0) -> dict[str, tuple[float, float]]:
    """Figures of an order by lot."""
    chance = np.random.default_rng(seed)
    orders = [chance.permutation(len(truth)) for _ in range(LOTS)]
    half = {"spearman": (0.0, 1.0), "pairs": (0.5, 1.0)}
    return {**half, **chosen_scores(truth, orders, done)}


Sums = Mapping[str, Sequence[tuple[float, float]]]
"""By figure, a pair per kernel; NaN where a kernel has none."""


def by_figure(kernels: Sequence[Mapping[str, tuple[float, float]]]) -> Sums:
    """The same, by figure."""
    return {name: [one[name] for one in kernels] for name in kernels[0]}


def _ratios(pairs: Sequence[tuple[float, float]], shown: Callable[[float], float]) -> FloatArray:
    """The figure, then a figure of each of the bootstrap's draws of kernels; always the same draws."""
    sums = np.array([pair if math.isfinite(pair[0]) else (0.0, 0.0) for pair in pairs])
    chance = np.random.default_rng(0)
    weights = chance.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), BOOTSTRAP_DRAWS)
    drawn = np.concatenate([np.ones((1, len(sums))), weights]) @ sums
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.array([shown(v) for v in drawn[:, 0] / drawn[:, 1]])


def _shown(name: str) -> Callable[[float], float]:
    if name == "squared_error":
        return math.sqrt
    if name in ("first", "three"):
        return lambda gain: 2.0**gain - 1.0
    return float


def figures(sums: Sums) -> dict[str, list[float | None]]:
    """Every figure with its 95 % interval over kernels: [value, low, high].

    `squared_error` is its root, `first` and `three` are shares (0.02 is 2 % faster than the base).
    """
    return {name: _interval(_ratios(pairs, _shown(name))) for name, pairs in sums.items()}


def differences(one: Sums, other: Sums) -> dict[str, list[float | None]]:
    """`figures` of one less those of the other, on the same draws of the same kernels."""
    names = [name for name in one if name in other]
    return {n: _interval(_ratios(one[n], _shown(n)) - _ratios(other[n], _shown(n))) for n in names}


def _interval(values: FloatArray) -> list[float | None]:
    drawn = values[1:][np.isfinite(values[1:])]
    if not len(drawn) or not math.isfinite(values[0]):
        return [None, None, None]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return [round(float(v), 4) for v in (values[0], low, high)]
