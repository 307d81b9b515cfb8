"""An experimental surrogate for `cross_device`: relatives pooled into a mean function, risk checked on them.

log2(time) = level + weighted mean of the relatives' slowdowns + one slope per relative + a smooth
residual over the configs' coordinates + an independent residual per config: a Gaussian process
(Rasmussen & Williams 2006, ch. 2). It differs from `Analytic` in three ways: every row of a relative
counts, not 64 of them; the sizes of both residuals start from how badly the relatives predict each
other and are then fitted apart; and the stated risk is averaged, as log odds, with how often choosing by
the pooled mean alone would have failed on each relative in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.encode import Encoder
from forecast_autotune.records import Candidate
from forecast_autotune.surrogates.base import Array, Forecasts, Query
from forecast_autotune.surrogates.relatives import Pool, pool
from forecast_autotune.table import latest

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Sizes:
    """Standard deviations in log2 units, length scales in doublings; see `Analytic`'s `Hyper`."""

    level: float = 2.0
    shrink: float = 0.9
    """Share of the pooled mean that is believed."""
    slope: float = 0.25
    """Of each relative's own weight."""
    additive: float = 0.35
    joint: float = 0.35
    rough: float = 0.2
    spread: float = 0.3
    """Share of the relatives' disagreement on a config that counts as its own doubt."""
    unheard: float = 0.3
    """Doubt about a config that ran on no relative."""
    noise: float = 0.02
    additive_scale: float = 1.5
    joint_scale: float = 2.0
    cold: float = 1.0
    """Factor on the residuals where there is no relative."""
    one: float = 0.4
    """Error of the pooled mean where there is but one relative to learn it from."""
    vague: float = 0.5
    """Variance of the fitted factors' log2."""
    knee: float = 1.5
    beyond: float = 0.25


SMOOTH = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
ROUGH = (0.06, 0.125, 0.25, 0.5, 1.0, 2.0)
"""Factors on the two residuals that are tried; dense flat spaces need the smallest."""
FITTED = 160
"""The factors are fitted to at most so many measurements, evenly spread over the order of measuring."""


@dataclass(frozen=True)
class _Space:
    """What does not change while one problem is tuned."""

    candidates: list[Candidate]
    row: dict[Candidate, int]
    points: Array
    pool: Pool | None
    mean: Array
    columns: Array
    """Centred regressors [n, r]."""
    size: float
    """First guess of the smooth residual's factor."""
    own: Array
    """First guess of the independent residual's variance [n]."""


class Pooled:
    """See the module. Keeps the arrays of the last problem: a replay asks about it many times."""

    name = "pooled"
    version = "1"

    def __init__(self, sizes: Sizes | None = None) -> None:
        self.sizes = sizes or Sizes()
        self._last: tuple[tuple[str, int], _Space] | None = None

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query."""
        h, space = self.sizes, self._space(query)
        n, everything = len(space.candidates), np.arange(len(space.candidates))
        mine = [m for m in latest(query.measured).values() if m.ok]
        seen = np.array([space.row[m.candidate] for m in mine], dtype=np.intp)
        times = np.array([math.log2(m.ms) for m in mine])
        best = float(times.min()) if mine else math.inf
        floor = best if mine else float(space.mean.min())
        common = 0.0 if mine else h.level
        smooth, factor = space.size, 1.0
        half: Array = np.zeros((0, n))
        mean: Array = space.mean.copy()
        if mine:
            residual = self._compress(times, best) - space.mean[seen]
            smooth, factor, root = self._fit(space, seen, residual)
            cross = self._kernel(space, everything, seen, smooth) + h.level**2
            half = np.asarray(np.linalg.solve(root, cross.T), dtype=np.float64)
            mean = np.asarray(mean + half.T @ np.linalg.solve(root, residual))
        own = space.own * factor**2
        flat = smooth**2 * (h.additive**2 + h.joint**2) + h.slope**2 * (space.columns**2).sum(axis=1)
        variance = np.maximum(flat + h.level**2 - common**2 - (half**2).sum(axis=0), 1e-8) + own
        mean[seen], variance[seen] = self._compress(times, best), h.noise**2

        def sample(rows: Rows, count: int, generator: np.random.Generator) -> Array:
            block = self._kernel(space, rows, rows, smooth) + h.level**2 - common**2
            block -= half[:, rows].T @ half[:, rows]
            block[np.diag_indices_from(block)] += own[rows] + 1e-8
            values, vectors = np.linalg.eigh(block)
            drawn = (
                mean[rows]
                + generator.standard_normal((count, len(rows)))
                @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
            )
            return self._expand(drawn, floor) + common * generator.standard_normal((count, 1))

        sd = np.sqrt(variance)
        return Forecasts(
            space.candidates,
            self._expand(mean, floor),
            np.hypot(sd, common),
            self._failures(space, query),
            sample,
            f"{len(mine)} own measurements, {0 if space.pool is None else len(space.pool.weights)} relatives",
            self._expand(mean - 2 * sd, floor) - 2 * common,
            self._checked(space.pool, len(query.measured)),
        )

    def _space(self, query: Query) -> _Space:
        key = (query.problem.id, len(query.relatives))
        if self._last is None or self._last[0] != key:
            self._last = key, self._new_space(query)
        return self._last[1]

    def _new_space(self, query: Query) -> _Space:
        h, candidates = self.sizes, list(query.candidates)
        n = len(candidates)
        points, row = Encoder.of(candidates)(candidates), {c: i for i, c in enumerate(candidates)}
        found = pool(query.problem, candidates, query.relatives, knee=h.knee, beyond=h.beyond)
        if found is None:
            own = np.full(n, (h.cold * h.rough) ** 2)
            return _Space(candidates, row, points, None, np.zeros(n), np.zeros((n, 1)), h.cold, own)
        error = found.error if math.isfinite(found.error) else h.one
        size = error / math.hypot(h.additive, h.joint, h.rough)
        doubt = np.minimum(found.spread, 1.0) * h.spread + h.unheard * (found.support <= 0)
        own = (size * h.rough) ** 2 + doubt**2
        columns = found.columns - found.columns.mean(axis=0)
        return _Space(candidates, row, points, found, h.shrink * found.mean, columns, size, own)

    def _kernel(self, space: _Space, a: Rows, b: Rows, smooth: float) -> Array:
        h = self.sizes
        left, right = space.points[a], space.points[b]
        far, additive = np.zeros((len(a), len(b))), np.zeros((len(a), len(b)))
        for x, y in zip(left.T, right.T, strict=True):
            step = (x[:, None] - y[None, :]) ** 2
            far += step
            additive += np.exp(-0.5 * step / h.additive_scale**2)
        joint = h.joint**2 * np.exp(-0.5 * far / h.joint_scale**2)
        slopes = h.slope**2 * space.columns[a] @ space.columns[b].T
        return np.asarray(smooth**2 * (h.additive**2 * additive / left.shape[1] + joint) + slopes)

    def _fit(self, space: _Space, seen: Rows, residual: Array) -> tuple[float, float, Array]:
        """The two residuals' sizes that explain the measurements best, and the covariance's root."""
        thin = np.unique(np.linspace(0, len(seen) - 1, min(FITTED, len(seen))).astype(np.intp))
        smooth, factor = self._factors(space, seen[thin], residual[thin])
        matrix = self._kernel(space, seen, seen, smooth) + self.sizes.level**2
        matrix[np.diag_indices_from(matrix)] += space.own[seen] * factor**2 + self.sizes.noise**2
        return smooth, factor, np.asarray(np.linalg.cholesky(matrix), dtype=np.float64)

    def _factors(self, space: _Space, seen: Rows, residual: Array) -> tuple[float, float]:
        h = self.sizes
        slopes = self._kernel(space, seen, seen, 0.0)
        unit = self._kernel(space, seen, seen, 1.0) - slopes
        best, chosen = -math.inf, (space.size, 1.0)
        for stretch in SMOOTH:
            for factor in ROUGH:
                matrix = slopes + h.level**2 + (space.size * stretch) ** 2 * unit
                matrix[np.diag_indices_from(matrix)] += space.own[seen] * factor**2 + h.noise**2
                root = np.linalg.cholesky(matrix)
                white = np.linalg.solve(root, residual)
                doubt = (math.log2(stretch) ** 2 + math.log2(factor) ** 2) / h.vague
                likelihood = -0.5 * (float(white @ white) + doubt) - float(np.log(np.diag(root)).sum())
                if likelihood > best:
                    best, chosen = likelihood, (space.size * stretch, factor)
        return chosen

    def _failures(self, space: _Space, query: Query) -> Array:
        """P(failure): how often it failed on the relatives; failures here spread to near configs."""
        n, failed = len(space.candidates), None if space.pool is None else space.pool.failed
        p_fail = np.full(n, 0.03) if failed is None else 0.02 + 0.96 * failed
        labels = latest(query.measured)
        for candidate, m in labels.items():
            if not m.ok:
                away = ((space.points - space.points[space.row[candidate]]) ** 2).sum(axis=1)
                p_fail = np.maximum(p_fail, 0.9 * np.exp(-away))
        for candidate, m in labels.items():
            p_fail[space.row[candidate]] = 0.0 if m.ok else 1.0
        return p_fail

    def _checked(self, found: Pool | None, count: int) -> Callable[[float], float]:
        """Stated risk -> the mean, as log odds, with how the relatives fared after so many tries."""
        if found is None:
            return float
        return lambda stated: averaged(stated, found.off_after(count))

    def _compress(self, log2_ms: Array, floor: float) -> Array:
        over = log2_ms - floor
        bent = self.sizes.knee + self.sizes.beyond * (over - self.sizes.knee)
        return np.asarray(floor + np.where(over > self.sizes.knee, bent, over))

    def _expand(self, log2_ms: Array, floor: float) -> Array:
        over = log2_ms - floor
        bent = self.sizes.knee + (over - self.sizes.knee) / self.sizes.beyond
        return np.asarray(floor + np.where(over > self.sizes.knee, bent, over))


def averaged(first: float, second: float) -> float:
    """The probability at the mean of two log odds; neither counts as certain."""
    odds = [math.log(p / (1.0 - p)) for p in (min(max(x, 0.005), 0.995) for x in (first, second))]
    return 1.0 / (1.0 + math.exp(-sum(odds) / 2))
