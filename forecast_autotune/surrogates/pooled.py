"""The surrogate for a kernel with measurements on other devices, pooled into a mean function.

log2(time) = level + weighted mean of the relatives' slowdowns + one slope per relative + a smooth
residual over the configs' coordinates + an independent residual per config: a Gaussian process (Rasmussen
& Williams 2006, ch. 2). It differs from `formula` in three ways: every row of a relative counts, not some
dozens; the sizes of both residuals start from how badly the relatives predict each other, and are then
averaged over what this problem's measurements leave possible; and the stated risk is averaged, as log
odds, with how often choosing by the pooled mean alone would have failed on each relative in turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.numerics import fast_unique
from forecast_autotune.records import Candidate, Measurement, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.surrogates.calibration import INFORMED, UNINFORMED, UNKNOWN, shipped_calibration
from forecast_autotune.surrogates.covariance import (
    Covariance,
    CovarianceInputs,
    Hyperparameters,
    Posterior,
    Rows,
    unshared_leaves,
)
from forecast_autotune.surrogates.protocol import Array, Forecasts, Query, Relative
from forecast_autotune.surrogates.relatives import DENSE_SHARE, PooledRelatives, pool_relatives

_POOLED_HYPERPARAMETERS = Hyperparameters(slope=0.25, additive=0.35, joint=0.35, rough=0.2)
"""`slope` is that of each relative's own weight, `rough` that of the independent residual."""
_SHRINKAGE = 0.9
"""Share of the pooled mean that is believed."""
_DISAGREEMENT_SHARE = 0.3
"""Share of the relatives' disagreement on a config that counts as its own doubt, log2."""
_UNTRIED_SD = 0.3
"""Doubt (log2) about a config that ran on no relative."""
_SINGLE_RELATIVE_SD = 0.4
"""Error of the pooled mean, log2, where there is but one relative to learn it from."""
_FACTOR_PRIOR_VARIANCE = 0.5
"""Variance of the fitted factors' log2."""
_SMOOTH_FACTORS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
_ROUGH_FACTORS = (0.06, 0.125, 0.25, 0.5, 1.0, 2.0)
"""Factors on the two residuals, of which a weighted mean is used; dense flat spaces need the smallest."""
_MAX_FITTED_MEASUREMENTS = 96
"""Most measurements that the factors are weighed on, evenly spread over the order of measuring."""


@dataclass(frozen=True)
class _PooledPrior:
    """The part of a forecast that does not change while one problem is tuned."""

    inputs: CovarianceInputs
    covariance: Covariance
    pool: PooledRelatives | None
    mean: Array
    """Prior mean of the compressed log2 slowdown, [n]."""
    size: float
    """First guess of the smooth residual's factor."""
    own: Array
    """First guess of the independent residual's variance, [n]."""


class PooledSurrogate:
    """See the module. A pure function of the query."""

    name = "pooled"
    version = "1"

    def __init__(self, hyper: Hyperparameters = _POOLED_HYPERPARAMETERS) -> None:
        self.hyper = hyper

    def can_pool(self, query: Query) -> bool:
        """Whether some relative of the query is dense enough to be pooled."""
        few = DENSE_SHARE * len(query.candidates)
        if all(len(r.measurements) < few for r in query.relatives):
            return False  # the case of most queries, and cheaper than pooling
        return self._pooled_prior(query, CandidateList.of(query.candidates)).pool is not None

    def _pooled_prior(self, query: Query, candidates: CandidateList) -> _PooledPrior:
        return _pooled_prior(_PriorKey(query.problem, candidates, tuple(query.relatives), self.hyper))

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates; never raises for odd problems, it widens instead."""
        candidates = CandidateList.of(query.candidates)
        space = self._pooled_prior(query, candidates)
        row = candidates.row_of
        labels = {c: m for c, m in latest_labels(query.measured).items() if c in row}
        rows = [m for m in labels.values() if m.ok]
        times = np.array([math.log2(m.ms) for m in rows])
        posterior = self._posterior(space, np.array([row[m.candidate] for m in rows], dtype=np.intp), times)
        pool = space.pool
        count = 0 if pool is None else len(pool.weights)
        forecasts = posterior.forecasts(
            candidates,
            _failures(space, row, labels),
            f"{count} relatives pooled; {len(rows)} own measurements",
            float if pool is None else _AveragedRisk(pool.miss_probability(len(labels))),
        )
        return shipped_calibration(f"{self.name}/{self.version}").apply_to(
            forecasts, pool_group(count), len(rows)
        )

    def _posterior(self, space: _PooledPrior, rows: Rows, times: Array) -> Posterior:
        covariance, inputs, n = space.covariance, space.inputs, len(space.mean)
        if not len(rows):
            nothing, floor = np.zeros((0, n)), float(space.mean.min())
            return Posterior(covariance, inputs, space.size, space.mean, nothing, space.own, floor, False)
        h, best = self.hyper, float(times.min())
        residual = h.compress(times, best) - space.mean[rows]
        thin = fast_unique(
            np.linspace(0, len(rows) - 1, min(_MAX_FITTED_MEASUREMENTS, len(rows))).astype(np.intp)
        )
        smooth, factor = self._sizes(space, rows[thin], residual[thin])
        own_inputs, own = inputs[rows], space.own * factor**2
        matrix = covariance(own_inputs, own_inputs, smooth) + h.intercept**2
        matrix[np.diag_indices_from(matrix)] += own[rows] + h.noise**2
        # Inverted once: with thousands of candidates, two solves per candidate would cost twice as much.
        inverse = np.linalg.inv(np.linalg.cholesky(matrix))
        cross = covariance(inputs, own_inputs, smooth) + h.intercept**2
        cross[rows, np.arange(len(rows))] += own[rows]
        half = inverse @ cross.T
        mean = space.mean + half.T @ (inverse @ residual)
        return Posterior(covariance, inputs, smooth, mean, half, own, best, True)

    def _sizes(self, space: _PooledPrior, rows: Rows, residual: Array) -> tuple[float, float]:
        """Both residuals' sizes: root mean squares over the grid, weighed by likelihood and prior.

        The likeliest sizes alone would understate the doubt: a few measurements, all of configs that
        were forecast to be fast, are explained well by sizes that are far too small.
        """
        h, own_inputs = self.hyper, space.inputs[rows]
        tilt = space.covariance.slope_terms(own_inputs, own_inputs) + h.intercept**2
        unit = space.covariance.residual(own_inputs, own_inputs)
        stretch, factor = (x.ravel() for x in np.meshgrid(_SMOOTH_FACTORS, _ROUGH_FACTORS, indexing="ij"))
        matrix = tilt + (space.size * stretch[:, None, None]) ** 2 * unit
        place = np.arange(len(rows))
        matrix[:, place, place] += space.own[rows] * factor[:, None] ** 2 + h.noise**2
        root = np.linalg.cholesky(matrix)
        white = np.linalg.solve(root, np.broadcast_to(residual[:, None], (len(root), len(rows), 1)))[..., 0]
        doubt = (np.log2(stretch) ** 2 + np.log2(factor) ** 2) / _FACTOR_PRIOR_VARIANCE
        half_determinant = np.log(root[:, place, place]).sum(axis=1)
        weight = -0.5 * ((white**2).sum(axis=1) + doubt) - half_determinant
        weight = np.exp(weight - weight.max())
        weight /= weight.sum()
        return space.size * math.sqrt(weight @ stretch**2), math.sqrt(weight @ factor**2)


def pool_group(relatives: int) -> str:
    """The calibration group by number: relatives that check each other, a single one, or none."""
    return (UNKNOWN, UNINFORMED, INFORMED)[min(relatives, 2)]


@dataclass(frozen=True)
class _AveragedRisk:
    """Stated risk -> averaged, as log odds, with the relatives' share of misses after as many tries."""

    elsewhere: float

    def __call__(self, risk: float) -> float:
        return _average_log_odds(risk, self.elsewhere)


def _average_log_odds(first: float, second: float) -> float:
    """The probability at the mean of two log odds; neither counts as certain."""
    odds = [math.log(p / (1.0 - p)) for p in (min(max(x, 0.005), 0.995) for x in (first, second))]
    return 1.0 / (1.0 + math.exp(-sum(odds) / 2))


@dataclass(frozen=True, eq=False)
class _PriorKey:
    """The part of a query that its `_PooledPrior` depends on.

    Two are equal only if they hold identical objects, which cannot change: comparing ten thousand measurements
    would cost more than pooling them again.
    """

    problem: Problem
    candidates: CandidateList
    relatives: tuple[Relative, ...]
    hyper: Hyperparameters

    def _identity(self) -> tuple[object, ...]:
        ids = [x for r in self.relatives for x in (id(r.problem), id(r.measurements))]
        return id(self.problem), id(self.candidates), self.hyper, *ids

    def __hash__(self) -> int:
        return hash(self._identity())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PriorKey) and self._identity() == other._identity()


def _pooled_prior(key: _PriorKey) -> _PooledPrior:
    # A list of measurements may have grown since: only tuples are the same when they are identical.
    is_immutable = all(isinstance(r.measurements, tuple) for r in key.relatives)
    return _cached_prior(key) if is_immutable else _build_prior(key)


@lru_cache(maxsize=4)
def _cached_prior(key: _PriorKey) -> _PooledPrior:
    return _build_prior(key)


def _build_prior(key: _PriorKey) -> _PooledPrior:
    h, candidates = key.hyper, key.candidates
    n, encoder = len(candidates), ConfigEncoder.of(candidates)
    points = encoder(candidates) / h.length_scales(encoder)
    pool = pool_relatives(key.problem, candidates, key.relatives, knee=h.knee, beyond=h.beyond)
    columns = np.zeros((n, 1)) if pool is None else pool.columns - pool.columns.mean(axis=0)
    inputs = CovarianceInputs(points, columns, unshared_leaves(n, 0), np.zeros(n))
    # The independent residual is this module's own: it differs between configs.
    weights = replace(h, rough=0.0, forest=0.0, part_slopes=(h.slope,) * (columns.shape[1] - 1))
    if pool is None:
        own = np.full(n, h.rough**2)
        return _PooledPrior(inputs, Covariance(weights), None, np.zeros(n), 1.0, own)
    error = pool.error if math.isfinite(pool.error) else _SINGLE_RELATIVE_SD
    size = max(error, h.noise) / math.hypot(h.additive, h.joint, h.rough)
    doubt = np.minimum(pool.spread, 1.0) * _DISAGREEMENT_SHARE + _UNTRIED_SD * (pool.support <= 0)
    own = (size * h.rough) ** 2 + doubt**2
    return _PooledPrior(inputs, Covariance(weights), pool, _SHRINKAGE * pool.mean, size, own)


def _failures(
    space: _PooledPrior, row: Mapping[Candidate, int], labels: Mapping[Candidate, Measurement]
) -> Array:
    """P(failure) by the share of failures on the relatives; failures here spread to near configs."""
    pool, points = space.pool, space.inputs.points
    p_fail = np.full(len(points), 0.03) if pool is None else 0.02 + 0.96 * pool.failed
    for candidate, m in labels.items():
        if not m.ok:
            away = ((points - points[row[candidate]]) ** 2).sum(axis=1)
            p_fail = np.maximum(p_fail, 0.9 * np.exp(-away))
    for candidate, m in labels.items():
        p_fail[row[candidate]] = 0.0 if m.ok else 1.0
    return p_fail
