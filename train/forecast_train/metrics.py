"""Scores of forecasts and of decisions, and their intervals: pure functions on numpy arrays.

Conventions: times are log2(milliseconds) with NaN for a candidate that failed; regrets are shares (0.02 is 2 %);
probabilities are in [0, 1]; outcomes are booleans. A score that is not defined for its input is NaN, and the
caller leaves it out of its average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

FloatArray = npt.NDArray[np.float64]
RowIndices = npt.NDArray[np.intp]

_RELIABILITY_BINS = 10
"""Bins of every reliability table."""
BOOTSTRAP_DRAWS = 1000


def spearman(a: FloatArray, b: FloatArray) -> float:
    """Spearman's rank correlation of two arrays [n], ties averaged.

    0 when `a` or `b` is constant: an order was not stated, which is as good as a random one. NaN for
    fewer than two values.
    """
    if len(a) < 2:
        return math.nan
    x, y = (rankdata(v) - (len(v) + 1) / 2 for v in (a, b))
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 0 else 0.0


def regret_path(order: RowIndices, log2_ms: FloatArray) -> FloatArray:
    """Regret of the best of the first 1, 2, ... candidates of `order`; shape [len(order)].

    time(best so far) / time(best of all) - 1. A failure never wins; while all so far have failed, the
    worst time that was observed is charged. `log2_ms` [n] holds NaN for failures. Raises `ValueError`
    when nothing ran.
    """
    if not np.isfinite(log2_ms).any():
        raise ValueError("regret needs a candidate that ran, and all failed: leave such a problem out")
    best, worst = float(np.nanmin(log2_ms)), float(np.nanmax(log2_ms))
    tried = np.where(np.isfinite(log2_ms), log2_ms, np.inf)[order]
    falling = np.minimum.accumulate(tried) if len(tried) else tried
    return np.asarray(2.0 ** (np.where(np.isfinite(falling), falling, worst) - best) - 1.0)


def regret_at(path: FloatArray, k: int) -> float:
    """Regret after `k` candidates of a path (shape [m], m >= 1), its last one when it is shorter.

    Raises `ValueError` for k < 1 or an empty path.
    """
    if k < 1 or not len(path):
        raise ValueError(f"regret after {k} of {len(path)} candidates: both must be at least 1")
    return float(path[min(k, len(path)) - 1])


def geomean_regret(regrets: FloatArray) -> float:
    """exp(mean log(1 + regret)) - 1; NaN when empty."""
    return float(np.expm1(np.log1p(regrets).mean())) if len(regrets) else math.nan


@dataclass(frozen=True)
class ReliabilityBin:
    """One row of a reliability table."""

    n: float
    stated: float
    """Mean probability stated."""
    observed: float
    """Share in which it came true."""


def bin_sums(p: FloatArray, happened: npt.NDArray[np.bool_]) -> FloatArray:
    """Per bin of equal width (count, sum of stated, sum of outcomes), shape [bins, 3]; 1.0 is in the last bin."""
    place = np.minimum((p * _RELIABILITY_BINS).astype(np.intp), _RELIABILITY_BINS - 1)
    columns = [np.bincount(place, w, minlength=_RELIABILITY_BINS) for w in (None, p, happened.astype(float))]
    return np.stack(columns, axis=1).astype(float)


def reliability_of(sums: FloatArray) -> list[ReliabilityBin]:
    """The rows of a reliability table from `bin_sums`."""
    return [ReliabilityBin(float(n), float(p / n), float(y / n)) for n, p, y in sums if n > 0]


def ece_of(sums: FloatArray) -> float:
    """Expected calibration error (Naeini et al. 2015) from `bin_sums`: sum over bins of n/N |stated - observed|."""
    total = float(sums[:, 0].sum())
    return float(np.abs(sums[:, 1] - sums[:, 2]).sum() / total) if total else math.nan


@dataclass(frozen=True)
class BootstrapInterval:
    """A statistic and its 95 % bootstrap interval; the ends are NaN with fewer than two clusters."""

    value: float
    low: float
    high: float
    rows: int
    clusters: int

    def above(self, other: BootstrapInterval) -> bool:
        """Whether this interval lies wholly above the other; False when either has none."""
        return self.low > other.high


def cluster_bootstrap(
    statistic: Callable[[RowIndices], float],
    clusters: Sequence[str],
    *,
    draws: int = BOOTSTRAP_DRAWS,
    seed: int = 0,
) -> BootstrapInterval:
    """The statistic on all rows and its 95 % percentile interval over resampled clusters.

    Rows of one kernel hang together, so whole clusters are drawn: `clusters` [n] names the one of each row, and
    `statistic` gets row numbers, with repetitions. Resamples on which it is NaN are left out. The same seed gives
    the same resamples, whatever the statistic.
    """
    n, count = len(clusters), len(set(clusters))
    value = statistic(np.arange(n)) if n else math.nan
    if count < 2:
        return BootstrapInterval(value, math.nan, math.nan, n, count)
    different, which = _resamples(tuple(clusters), draws, seed)
    values = np.array([statistic(rows) for rows in different])[which]
    values = values[~np.isnan(values)]
    if not len(values):
        return BootstrapInterval(value, math.nan, math.nan, n, count)
    # Draws, not values between them: a count that was never reached is infinite.
    low, high = np.quantile(values, (0.025, 0.975), method="inverted_cdf")
    return BootstrapInterval(value, float(low), float(high), n, count)


def paired_bootstrap(
    statistic: Callable[[FloatArray], float],
    one: FloatArray,
    other: FloatArray,
    clusters: Sequence[str],
    *,
    draws: int = BOOTSTRAP_DRAWS,
    seed: int = 0,
) -> BootstrapInterval:
    """statistic(one) - statistic(other) with both on the same resampled clusters.

    `one` and `other` have a row [n, ...] per row of `clusters`. Raises `ValueError` when the lengths
    differ: rows must describe the same problems.
    """
    if not len(one) == len(other) == len(clusters):
        raise ValueError(
            f"pairs need equally many rows, got {len(one)}, {len(other)} and {len(clusters)} clusters: "
            "keep the problems that both methods have"
        )
    return cluster_bootstrap(
        lambda rows: statistic(one[rows]) - statistic(other[rows]), clusters, draws=draws, seed=seed
    )


@lru_cache(maxsize=4)
def _resamples(clusters: tuple[str, ...], draws: int, seed: int) -> tuple[tuple[RowIndices, ...], RowIndices]:
    """The different resamples, and which of them each draw is: of two clusters there are four.

    Kept, as all statistics of an evaluation are asked on the same ones.
    """
    names = np.asarray(clusters, dtype=object)
    members = [np.flatnonzero(names == name) for name in sorted(set(clusters))]
    generator = np.random.default_rng(seed)
    chosen = [generator.integers(len(members), size=len(members)) for _ in range(draws)]
    different, which = np.unique(chosen, axis=0, return_inverse=True)
    return tuple(np.concatenate([members[i] for i in row]) for row in different), which.reshape(-1)
