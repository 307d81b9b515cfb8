"""A Gaussian process over given covariances, its few scales chosen by their evidence on a grid.

Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006: equations 2.22-2.24 (prediction), 2.30
(evidence) and 5.10-5.12 (leave-one-out residuals).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forecast_autotune.surrogates.base import Array

_LEAST = 1e-8


@dataclass(frozen=True)
class Fitted:
    """A posterior: values at training points were `targets` with independent `noise`."""

    variances: Mapping[str, float]
    """Of every part of the covariance."""
    inverse: Array
    """Of the training covariance with its noise, [n, n]."""
    weights: Array
    """Inverse times targets, [n]."""
    evidence: float
    """Natural log of the marginal likelihood, without its constant."""
    stretch: float
    """What standard deviations are multiplied by: how far leave-one-out residuals lay off, in their own."""

    def predict(self, cross: Mapping[str, Array], prior: Mapping[str, Array]) -> tuple[Array, Array]:
        """Mean and standard deviation at m points, [m] each, without the noise of a measurement.

        `cross`: each part between them and the training points, [m, n]; `prior`: each part's own variance at
        scale 1, [m].
        """
        joint = sum((v * cross[name] for name, v in self.variances.items()), np.zeros(1))
        own = sum((v * prior[name] for name, v in self.variances.items()), np.zeros(1))
        mean = joint @ self.weights
        variance = own - np.einsum("ij,jk,ik->i", joint, self.inverse, joint)
        return mean, self.stretch * np.sqrt(np.maximum(variance, _LEAST))


def fit(
    parts: Mapping[str, Array],
    targets: Array,
    noise: Array,
    grid: Mapping[str, Sequence[float]],
) -> Fitted:
    """The posterior under the variances of the grid that explain the targets best.

    `parts`: covariances at scale 1 by name, [n, n]; `noise`: variances, [n]; `grid`: the variances to try,
    by the same names. Raises `ValueError` for an empty grid.
    """
    best: Fitted | None = None
    names = list(parts)
    for values in itertools.product(*(grid[name] for name in names)):
        variances = dict(zip(names, values, strict=True))
        covariance = sum((v * parts[name] for name, v in variances.items()), np.zeros(1))
        covariance = covariance + np.diag(noise + _LEAST)
        root = np.linalg.cholesky(covariance)
        half = np.linalg.solve(root, np.eye(len(targets)))
        inverse = half.T @ half
        weights = inverse @ targets
        evidence = -0.5 * float(targets @ weights) - float(np.log(np.diag(root)).sum())
        if best is None or evidence > best.evidence:
            # Equations 5.10-5.12: the residual of each point under all others, and its variance.
            off = weights**2 / np.diag(inverse)
            stretch = math.sqrt((float(off.sum()) + 4.0) / (len(targets) + 4.0))
            best = Fitted(variances, inverse, weights, evidence, min(max(stretch, 0.7), 3.0))
    if best is None:
        raise ValueError("the grid needs at least one variance for every part")
    return best
