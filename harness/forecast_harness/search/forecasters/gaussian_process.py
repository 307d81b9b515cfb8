"""A Gaussian process over given covariances, its few scales weighed by their evidence on a grid.

Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006: equations 2.22-2.24 (prediction), 2.30
(evidence), 5.3-5.4 (weighing scales) and 5.10-5.12 (leave-one-out residuals). A dozen results tell scales
badly: the likeliest alone would be far too sure of itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forecast_autotune.surrogates.protocol import Array

_JITTER = 1e-8
_MIN_RELATIVE_EVIDENCE = 0.01
"""Evidence against the best's below which scales are left out."""


@dataclass(frozen=True)
class FittedProcess:
    """A posterior: values at training points were `targets` with independent `noise`."""

    variances: Mapping[str, float]
    """Of every part of the covariance."""
    inverse: Array
    """Of the training covariance with its noise, [n, n]."""
    weights: Array
    """Inverse times targets, [n]."""
    evidence: float
    """Natural log of the marginal likelihood, without its constant."""
    sd_scale: float
    """What standard deviations are multiplied by: how far leave-one-out residuals lay off, in their own."""

    def predict(self, cross: Mapping[str, Array], prior: Mapping[str, Array]) -> tuple[Array, Array]:
        """Mean and standard deviation at m points, [m] each, without the noise of a measurement.

        `cross`: each part between them and the training points, [m, n]; `prior`: each part's own variance at
        scale 1, [m].
        """
        joint = sum((v * cross[name] for name, v in self.variances.items()), np.zeros(1))
        own = sum((v * prior[name] for name, v in self.variances.items()), np.zeros(1))
        mean = joint @ self.weights
        variance = own - ((joint @ self.inverse) * joint).sum(axis=1)
        return mean, self.sd_scale * np.sqrt(np.maximum(variance, _JITTER))


@dataclass(frozen=True)
class ProcessMixture:
    """Posteriors under several scales, with weights that add up to 1, the heaviest first."""

    parts: Sequence[tuple[float, FittedProcess]]

    def predict(self, cross: Mapping[str, Array], prior: Mapping[str, Array]) -> tuple[Array, Array]:
        """As `FittedProcess.predict`: mean and standard deviation of the mixture, [m] each."""
        each = [(weight, *fitted.predict(cross, prior)) for weight, fitted in self.parts]
        mean = sum((w * m for w, m, _ in each), np.zeros(1))
        second = sum((w * (sd**2 + m**2) for w, m, sd in each), np.zeros(1))
        return mean, np.sqrt(np.maximum(second - mean**2, _JITTER))


def fit_mixture(
    parts: Mapping[str, Array],
    targets: Array,
    noise: Array,
    grid: Mapping[str, Sequence[float]],
) -> ProcessMixture:
    """Posteriors under the variances of the grid, each weighed by how well it explains the targets.

    `parts`: covariances at scale 1 by name, [n, n]; `noise`: variances, [n]; `grid`: the variances to try,
    by the same names; all are as likely before. Raises `ValueError` for an empty grid.
    """
    found: list[FittedProcess] = []
    names = list(parts)
    for values in itertools.product(*(grid[name] for name in names)):
        variances = dict(zip(names, values, strict=True))
        covariance = sum((v * parts[name] for name, v in variances.items()), np.zeros(1))
        covariance = covariance + np.diag(noise + _JITTER)
        root = np.linalg.cholesky(covariance)
        half = np.linalg.solve(root, np.eye(len(targets)))
        inverse = half.T @ half
        weights = inverse @ targets
        evidence = -0.5 * float(targets @ weights) - float(np.log(np.diag(root)).sum())
        # Equations 5.10-5.12: the residual of each point under all others, and its variance.
        off = weights**2 / np.diag(inverse)
        stretch = math.sqrt((float(off.sum()) + 4.0) / (len(targets) + 4.0))
        found.append(FittedProcess(variances, inverse, weights, evidence, min(max(stretch, 0.7), 3.0)))
    if not found:
        raise ValueError("the grid needs at least one variance for every part")
    found.sort(key=lambda one: -one.evidence)
    likely = [math.exp(one.evidence - found[0].evidence) for one in found]
    kept = [(share, one) for share, one in zip(likely, found, strict=True) if share > _MIN_RELATIVE_EVIDENCE]
    total = sum(share for share, _ in kept)
    return ProcessMixture([(share / total, one) for share, one in kept])
