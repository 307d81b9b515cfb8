"""How far a kernel lies from those that a model was fitted to: the further, the less a forecast is worth.

Of kernels whose family was left out of the fit, the far ones' first forecasts are off by more than twice as
much as the near ones'. So each of both have calibrations of their own (`calibration_group`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forecast_autotune.surrogates.protocol import Array

_NEIGHBOURS = 3
"""Kernels that a distance is the mean of."""
_MAX_FEATURE_DEVIATION = 6.0
"""Standard deviations beyond which a feature is no further away: one alone must not decide."""


def problem_centroid(names: Sequence[str], features: Array) -> Array:
    """Where a problem lies: means [plain features] over its candidates' features [candidates, names].

    Those relative to a problem's own candidates do not say what a kernel is.
    """
    columns = [i for i, name in enumerate(names) if not name.endswith("~")]
    return np.asarray(features[:, columns].mean(axis=0))


@dataclass(frozen=True)
class TrainingCorpus:
    """Where the problems lie that a model was fitted to."""

    points: npt.NDArray[np.float32]
    """Each problem's `problem_centroid`, [problems, plain features]."""
    kernels: npt.NDArray[np.int32]
    """Number of each problem's kernel, [problems]."""

    @classmethod
    def of(cls, names: Sequence[str], features: Sequence[Array], kernels: Sequence[str]) -> TrainingCorpus:
        """Of the features [candidates, names] of each problem, and its kernel's name."""
        points = np.stack([problem_centroid(names, x) for x in features]).astype(np.float32)
        return cls(points, np.unique(kernels, return_inverse=True)[1].reshape(-1).astype(np.int32))

    @cached_property
    def _feature_scale(self) -> npt.NDArray[np.float32]:
        return np.asarray(self.points.std(axis=0) + 1e-6)

    @cached_property
    def _scaled_points(self) -> Array:
        return np.asarray(self.points / self._feature_scale.astype(float))

    def training_distance(self, at: Array) -> float:
        """Distance of a problem's `problem_centroid` from the nearest kernels.

        Root mean square over features, in standard deviations of the corpus; of each kernel its nearest
        problem counts, and the nearest three kernels.
        """
        gaps = self._scaled_points - at / self._feature_scale
        np.clip(gaps, -_MAX_FEATURE_DEVIATION, _MAX_FEATURE_DEVIATION, out=gaps)
        each = np.sqrt(np.einsum("pf,pf->p", gaps, gaps) / gaps.shape[1])
        nearest = np.full(int(self.kernels.max()) + 1, np.inf)
        np.minimum.at(nearest, self.kernels, each)
        return float(np.sort(nearest)[:_NEIGHBOURS].mean())
