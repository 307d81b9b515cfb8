"""Rewards for a stated distribution over bins, exactly as arXiv 2605.31464 trains with, and two more.

Each takes what the model stated (a distribution over labels, and the bin it names) and the true bin, and
gives a number; a text that cannot be parsed earns 0. Brier is halved and CRPS divided by K - 1, so both lie
in [0, 1] (`reference implementation: calibration/v2`); the rewards therefore lie in [0, 2].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StatedDistribution:
    """What a model said of one candidate."""

    probabilities: tuple[float, ...]
    """Over the labels in their order, summing to 1."""
    predicted: int
    """The label it named; need not be the most probable one."""

    def __post_init__(self) -> None:
        total = sum(self.probabilities)
        if not (abs(total - 1.0) < 1e-6 and min(self.probabilities) >= 0.0):
            raise ValueError(f"a distribution is not negative and sums to 1, got {self.probabilities}")
        if not 0 <= self.predicted < len(self.probabilities):
            raise ValueError(f"label {self.predicted} of {len(self.probabilities)}")


def brier(probabilities: Array, truth: npt.NDArray[np.intp]) -> Array:
    """Half the squared distance to the truth, [n] in [0, 1]; `probabilities` [n, K], `truth` [n]."""
    hit = np.eye(probabilities.shape[1])[truth]
    return np.asarray(0.5 * ((probabilities - hit) ** 2).sum(axis=1))


def crps(probabilities: Array, truth: npt.NDArray[np.intp]) -> Array:
    """Ranked probability score over K - 1, [n] in [0, 1]: labels are ordered, "fails" slowest of all."""
    labels = probabilities.shape[1]
    stated = probabilities.cumsum(axis=1)[:, :-1]
    happened = np.arange(labels - 1)[None, :] >= truth[:, None]
    return np.asarray(((stated - happened) ** 2).sum(axis=1) / (labels - 1))


def correctness(stated: StatedDistribution | None, truth: int) -> float:
    """1 if the named bin is the true one, else 0; 0 for what could not be parsed."""
    return 0.0 if stated is None else float(stated.predicted == truth)


def correctness_brier(stated: StatedDistribution | None, truth: int) -> float:
    """`correctness` + 1 - Brier."""
    return _proper_reward(stated, truth, brier)


def correctness_crps(stated: StatedDistribution | None, truth: int) -> float:
    """`correctness` + 1 - CRPS."""
    return _proper_reward(stated, truth, crps)


def _proper_reward(
    stated: StatedDistribution | None, truth: int, score: Callable[[Array, npt.NDArray[np.intp]], Array]
) -> float:
    if stated is None:
        return 0.0
    loss = score(np.array([stated.probabilities]), np.array([truth], dtype=np.intp))
    return correctness(stated, truth) + 1.0 - float(loss[0])


REWARDS: Mapping[str, Callable[[StatedDistribution | None, int], float]] = {
    "correctness": correctness,
    "correctness_brier": correctness_brier,
    "correctness_crps": correctness_crps,
}
"""The paper's three, by its names."""


def regret_reward(expected_log2: Sequence[float | None], true_log2: Sequence[float]) -> float:
    """Reward of a ranking: 2^-(slowdown of the candidate that was forecast fastest), in (0, 1].

    `expected_log2` [n] are the model's means of log2(time), None where it said nothing; `true_log2` [n] the
    measured ones, NaN for failures. Choosing a failure, or choosing nothing, earns 0.
    """
    truth = np.asarray(true_log2, float)
    if np.isnan(truth).all():
        raise ValueError("a ranking needs at least one candidate that ran")
    known = [(mean, i) for i, mean in enumerate(expected_log2) if mean is not None]
    if not known:
        return 0.0
    slowdown = truth[min(known)[1]] - np.nanmin(truth)
    return 0.0 if np.isnan(slowdown) else float(2.0**-slowdown)
