"""Intervals for any statistic: rows of one kernel hang together, so whole kernels are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from forecast_train.evaluation.metrics import BootstrapInterval, FloatArray, RowIndices

Statistic = Callable[[RowIndices], float]
"""Row numbers, with repetitions, -> the statistic on them."""

BOOTSTRAP_DRAWS = 1000


def cluster_bootstrap(
    statistic: Statistic, clusters: Sequence[str], *, draws: int = BOOTSTRAP_DRAWS, seed: int = 0
) -> BootstrapInterval:
    """The statistic on all rows and its 95 % percentile interval over resampled clusters.

    `clusters` [n] names the cluster (the kernel) of each row. Resamples on which the statistic is NaN
    are left out. The same seed gives the same resamples, whatever the statistic.
    """
    n, count = len(clusters), len(set(clusters))
    value = statistic(np.arange(n)) if n else math.nan
    if count < 2:
        return BootstrapInterval(value, math.nan, math.nan, n, count)
    different, which = _resamples(tuple(clusters), draws, seed)
    found = np.array([statistic(rows) for rows in different])[which]
    found = found[~np.isnan(found)]
    if not len(found):
        return BootstrapInterval(value, math.nan, math.nan, n, count)
    # Draws, not values between them: a count that was never reached is infinite.
    low, high = np.quantile(found, (0.025, 0.975), method="inverted_cdf")
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
