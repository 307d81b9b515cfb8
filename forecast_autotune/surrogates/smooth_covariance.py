"""The smooth part of the Gaussian process's covariance, for many rows at once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forecast_autotune.surrogates.protocol import Array

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
    """Weight of what only equal points share."""
    additive_scale: float
    joint_scale: float

    def __call__(self, a: Array, b: Array) -> Array:
        """Covariance [len(a), len(b)] of the points a [n, d] and b [m, d].

        Candidates lie on a grid: half of the coordinates at a time take few distinct values, so each
        half is evaluated on those, and the halves are joined: sums add, exponentials multiply.
        """
        width = a.shape[1]
        blocks = [slice(0, width // 2), slice(width // 2, width)]
        found = (
            [_distinct_points(a[:, block]) for block in blocks]
            if width > 1 and a.size * len(b) > _DEDUPLICATION_PAIRS
            else []
        )
        if found and max(len(first) for first, _ in found) * 4 <= len(a):
            total, near = np.zeros((len(a), len(b))), np.ones((len(a), len(b)))
            for block, (first, codes) in zip(blocks, found, strict=True):
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
    """First row of each distinct point, and which of them each row is; all rows where that is not clear."""
    # One number per row sorts much faster than rows do. Square roots of primes have no common measure.
    weights = np.sqrt(np.array([2.0, 3.0, 5.0, 7.0, 11.0, 13.0, 17.0, 19.0])[np.arange(points.shape[1]) % 8])
    _, first, codes = np.unique(points @ weights, return_index=True, return_inverse=True)
    codes = codes.reshape(len(points))
    if np.array_equal(points[first][codes], points):
        return first, codes
    every = np.arange(len(points))
    return every, every
