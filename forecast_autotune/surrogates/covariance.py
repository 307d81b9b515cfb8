"""The covariance of the Gaussian process: how the residuals of two candidates go together.

log2(time) = formula + intercept + slope terms + smooth residual. The residual's covariance has two
sources: the configs' coordinates (`SmoothCovariance`), and, where a forest was fitted to other kernels, the share of
trees in which two candidates have the same leaf (`forest_proximity`): candidates with like residuals on many kernels
share leaves, whatever their meta-parameters are called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.config_encoder import ConfigEncoder
from forecast_autotune.records import Candidate
from forecast_autotune.surrogates.protocol import Array, Forecasts

Leaves = npt.NDArray[np.int32]
Rows = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Hyperparameters:
    """Standard deviations in log2 units and length scales in doublings; see `ConfigEncoder`."""

    intercept: float = 2.0
    slope: float = 0.35
    """Standard deviation of the slope of the formula's total."""
    part_slopes: tuple[float, ...] = (0.12, 0.12, 0.12, 0.12, 0.12, 0.12, 0.12)
    """Standard deviation of the slope of each of its parts, in the order of `features.cost.PARTS`."""
    additive: float = 0.35
    joint: float = 0.35
    rough: float = 0.1
    """Residual that a config shares with itself at other shapes, but with no neighbour."""
    warp_trend: float = 0.0
    """Effect of a doubling of warps on one kernel, beyond its formula."""
    forest: float = 0.0
    """Residual that candidates in the same leaves share; 0 without a forest."""
    noise: float = 0.02
    additive_scale: float = 1.5
    joint_scale: float = 2.0
    warp_scale: float = 1.0
    """Doublings of warps as far apart as one doubling of a tile side."""
    stage_scale: float = 1.0
    """Stage units of `ConfigEncoder` as far apart as one doubling of a tile side."""
    uninformed: float = 1.8
    """Factor on the residual when there is no TTIR."""
    unknown_device: float = 1.3
    relative: float = 0.95
    """Correlation of residuals between two problems of one kernel at distance zero."""
    reach: float = 8.0
    """Distance (mean doublings of sizes) at which `relative` has fallen to 1/e."""
    knee: float = 1.5
    """Slowdowns beyond 2^knee are compressed: how slow a slow config is must not bend the fast end."""
    beyond: float = 0.25
    """Factor on the part of a slowdown beyond `knee`."""

    def length_scales(self, encoder: ConfigEncoder) -> Array:
        """Divisors of the encoder's coordinates, [width]."""
        by = {"num_warps": self.warp_scale, "num_stages": self.stage_scale}
        scales = [by.get(name, 1.0) for name, _ in encoder.numeric]
        return np.array([*scales, *[1.0] * (max(1, encoder.width) - len(scales))])

    def compress(self, log2_ms: Array, floor: float) -> Array:
        """Slowdowns over `floor` (log2) with the slow end squeezed together; monotone."""
        over = log2_ms - floor
        bent = self.knee + self.beyond * (over - self.knee)
        return np.asarray(floor + np.where(over > self.knee, bent, over))

    def expand(self, log2_ms: Array, floor: float) -> Array:
        """The inverse of `compress`."""
        over = np.asarray(log2_ms - floor)
        bent = over - self.knee  # in place from here on: thousands of draws of hundreds of candidates
        bent /= self.beyond
        bent += self.knee
        np.copyto(over, bent, where=over > self.knee)
        over += floor
        return over

    def spread(self, mean: Array, sd: Array, floor: float) -> Array:
        """A standard deviation of compressed log2 times, expanded around its mean."""
        return np.asarray((self.expand(mean + sd, floor) - self.expand(mean - sd, floor)) / 2)


@dataclass(frozen=True)
class CovarianceInputs:
    """Inputs of the covariance for n candidates."""

    points: Array
    """Coordinates, [n, width]."""
    slopes: Array
    """Centred columns that the slope terms multiply, [n, 1 + parts]."""
    leaves: Leaves
    """Leaf per tree, [n, trees]; negative and unlike all others where there is no IR."""
    warp_doublings: Array
    """Factor of `warp_trend`: doublings of warps beside the mean of the list, scaled, [n]."""

    def __getitem__(self, rows: Any) -> CovarianceInputs:
        return CovarianceInputs(
            self.points[rows], self.slopes[rows], self.leaves[rows], self.warp_doublings[rows]
        )

    def __len__(self) -> int:
        return len(self.points)

    @classmethod
    def concatenate(cls, parts: Sequence[CovarianceInputs]) -> CovarianceInputs:
        """The inputs of all parts, one after the other."""
        names = ("points", "slopes", "leaves", "warp_doublings")
        return cls(*(np.concatenate([getattr(p, n) for p in parts]) for n in names))


@dataclass(frozen=True)
class Covariance:
    """The covariance under given hyperparameters."""

    hyper: Hyperparameters

    def __call__(self, a: CovarianceInputs, b: CovarianceInputs, scale: float) -> Array:
        """[len(a), len(b)]; `scale` multiplies the residual's standard deviation."""
        return scale**2 * self.residual(a, b) + self.slope_terms(a, b)

    def residual(self, a: CovarianceInputs, b: CovarianceInputs) -> Array:
        """Covariance of the residual at scale 1."""
        h = self.hyper
        smooth = SmoothCovariance(h.additive**2, h.joint**2, h.rough**2, h.additive_scale, h.joint_scale)
        result = smooth(a.points, b.points)
        if h.forest and a.leaves.shape[1]:
            result += h.forest**2 * forest_proximity(a.leaves, b.leaves)
        return result

    def slope_terms(self, a: CovarianceInputs, b: CovarianceInputs) -> Array:
        """Covariance of the slope terms."""
        trend = np.outer(a.warp_doublings, b.warp_doublings) * self.hyper.warp_trend**2
        return np.asarray((a.slopes * self._weights()) @ b.slopes.T + trend)

    def diagonal(self, a: CovarianceInputs, scale: float) -> Array:
        """Variances, [len(a)]."""
        h = self.hyper
        flat = h.additive**2 + h.joint**2 + h.rough**2
        flat += h.forest**2 if a.leaves.shape[1] else 0.0
        tilt = (a.slopes**2 * self._weights()).sum(axis=1) + (h.warp_trend * a.warp_doublings) ** 2
        return np.asarray(scale**2 * flat + tilt)

    def _weights(self) -> Array:
        return np.array([self.hyper.slope, *self.hyper.part_slopes]) ** 2


def forest_proximity(a: Leaves, b: Leaves) -> Array:
    """Share of the trees in which two candidates end in the same leaf, [len(a), len(b)]."""
    if a.size * len(b) < 2**16:  # a few rows: all trees at once
        return np.asarray((a[:, None] == b).sum(axis=2) / a.shape[1])
    same = np.zeros((len(a), len(b)), dtype=np.int16)
    for left, right in zip(a.T, b.T, strict=True):  # tree by tree: thousands of rows fit
        same += left[:, None] == right[None, :]
    return np.asarray(same / a.shape[1])


def noise(covariance: Array, count: int, generator: np.random.Generator) -> Array:
    """Draws [count, n] from a normal distribution with mean zero and this covariance [n, n]."""
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    return np.asarray(generator.standard_normal((count, len(covariance))) @ root.T)


@dataclass(frozen=True)
class Posterior:
    """Compressed log2 times of n candidates after m measurements: mean [n] and covariance."""

    covariance: Covariance
    inputs: CovarianceInputs
    scale: float
    mean: Array
    explained: Array
    """Root of the covariance that the measurements explain, [m, n]."""
    own: Array
    """Variance of each candidate that is independent of all others, [n]."""
    floor: float
    """Level of `Hyperparameters.compress`."""
    is_anchored: bool
    """Whether a measurement of this problem fixes the level. Else it is unknown, but the same for all candidates."""

    def forecasts(
        self,
        candidates: Sequence[Candidate],
        p_fail: Array,
        reason: str,
        risk: Callable[[float], float] = float,
    ) -> Forecasts:
        """Return forecasts of times that are not compressed."""
        h, floor = self.covariance.hyper, self.floor
        common = 0.0 if self.is_anchored else h.intercept
        variance = self.covariance.diagonal(self.inputs, self.scale) + h.intercept**2
        variance = variance - (self.explained**2).sum(axis=0) + self.own - common**2
        sd = np.sqrt(np.maximum(variance, 1e-8))

        def sample(rows: Rows, count: int, generator: np.random.Generator) -> Array:
            some, root = self.inputs[rows], self.explained[:, rows]
            block = self.covariance(some, some, self.scale) + h.intercept**2 - common**2
            block -= root.T @ root
            block[np.diag_indices_from(block)] += self.own[rows] + 1e-8
            draws = self.mean[rows] + noise(block, count, generator)
            return h.expand(draws, floor) + common * generator.standard_normal((count, 1))

        spread = np.hypot(h.spread(self.mean, sd, floor), common)
        lower = h.expand(self.mean - 2 * sd, floor) - 2 * common
        return Forecasts(candidates, h.expand(self.mean, floor), spread, p_fail, sample, reason, lower, risk)


def unshared_leaves(n: int, trees: int) -> Leaves:
    """Leaves that no two candidates share, for candidates that no forest can read."""
    return np.broadcast_to(-1 - np.arange(n, dtype=np.int32)[:, None], (n, trees))


_DEDUPLICATION_PAIRS = 4096
"""Pairs from which on it pays to look for rows that share coordinates."""
_SAME_POINT_DISTANCE = 1e-9
"""Squared distance of points that are one and the same."""


@dataclass(frozen=True)
class SmoothCovariance:
    """Variances and length scales of the three parts."""

    additive: float
    """Mean over coordinates of a squared-exponential kernel in one coordinate each."""
    joint: float
    """Weight of a squared-exponential kernel in all coordinates together."""
    rough: float
    """Weight of a kernel that is 1 for equal points, and 0 for all others."""
    additive_scale: float
    joint_scale: float

    def __call__(self, a: Array, b: Array) -> Array:
        """Covariance [len(a), len(b)] of the points a [n, d] and b [m, d].

        Candidates lie on a grid: half of the coordinates at a time take few distinct values. Each half is
        evaluated on these, then the halves are joined: sums add, exponentials multiply.
        """
        width = a.shape[1]
        blocks = [slice(0, width // 2), slice(width // 2, width)]
        result = (
            [_distinct_points(a[:, block]) for block in blocks]
            if width > 1 and a.size * len(b) > _DEDUPLICATION_PAIRS
            else []
        )
        if result and max(len(first) for first, _ in result) * 4 <= len(a):
            total, near = np.zeros((len(a), len(b))), np.ones((len(a), len(b)))
            for block, (first, codes) in zip(blocks, result, strict=True):
                part_total, part_near = self._parts(a[first, block], b[:, block])
                total += part_total[codes]
                near *= part_near[codes]
        else:
            total, near = self._parts(a, b)
        same = near > math.exp(-0.5 * _SAME_POINT_DISTANCE / self.joint_scale**2)
        total *= self.additive / width
        near *= self.joint
        total += near
        np.add(total, self.rough, out=total, where=same)
        return total

    def _parts(self, a: Array, b: Array) -> tuple[Array, Array]:
        """Sum over coordinates of the one-dimensional kernels, and the kernel of all of them together."""
        far, total = np.zeros((len(a), len(b))), np.zeros((len(a), len(b)))
        for left, right in zip(a.T, b.T, strict=True):  # one coordinate at a time: thousands of rows fit
            step = (left[:, None] - right[None, :]) ** 2
            far += step
            total += np.exp(step * (-0.5 / self.additive_scale**2))
        return total, np.exp(far * (-0.5 / self.joint_scale**2))


def _distinct_points(points: Array) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """First row of each distinct point, and the point's number per row; every row where sums collide."""
    # One number per row sorts much faster than rows do. Square roots of primes have no common measure.
    weights = np.sqrt(np.array([2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0])[np.arange(points.shape[1]) % 8])
    _, first, codes = np.unique(points @ weights, return_index=True, return_inverse=True)
    codes = codes.reshape(len(points))
    if np.array_equal(points[first][codes], points):
        return first, codes
    every = np.arange(len(points))
    return every, every
