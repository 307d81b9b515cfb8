"""Bins of slowdown against a stated reference: one array of edges for prompt, labels, loss and metrics.

The reference implementation of the paper (arXiv 2605.31464) tells its model one table of edges and labels
with another, one bin apart, so that a perfect forecaster who obeys the prompt is never right. Here
everything is derived from `_BIN_EDGES`, and a test answers by the printed text alone. The continuous log2 ratio
is always kept beside the bin.
"""

from __future__ import annotations

import itertools
import math
import string
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import RecordError

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]

_BIN_EDGES = (0.5, 0.7, 0.84, 0.92, 0.97, 1.03, 1.09, 1.19, 1.32, 1.5, 1.8, 2.3, 3.2, 5.6)
"""time / reference time where one bin ends and the next begins: fine around 1, where decisions are made,
coarse where a candidate is out of the question anyway."""


@dataclass(frozen=True)
class AnswerLabel:
    """One possible answer of a model: a short word, and its meaning."""

    token: str
    """A capital letter: one token with a space before it, in every tokenizer met so far."""
    meaning: str


@dataclass(frozen=True)
class Bins:
    """Ordered bins of time / reference time, and "fails" as one more label after them."""

    ratios: tuple[float, ...] = _BIN_EDGES

    def __post_init__(self) -> None:
        is_rising = all(a < b for a, b in itertools.pairwise(self.ratios))
        if not (3 <= len(self.ratios) <= 24 and is_rising and self.ratios[0] > 0):
            raise RecordError(f"bins need 3 to 24 increasing positive ratios, got {self.ratios}")

    def __len__(self) -> int:
        """Number of bins, without "fails"."""
        return len(self.ratios) + 1

    @property
    def failure_index(self) -> int:
        """Index of the label "fails": the last."""
        return len(self)

    @cached_property
    def edges(self) -> Array:
        """The edges in log2, [bins - 1]."""
        return np.asarray(np.log2(self.ratios))

    @cached_property
    def labels(self) -> tuple[AnswerLabel, ...]:
        """A letter and a meaning per bin, then "fails"; [bins + 1]."""
        texts = [f"{r:g}" for r in self.ratios]
        inner = [f"{a} to {b}" for a, b in itertools.pairwise(texts)]
        meanings = [f"below {texts[0]}", *inner, f"at least {texts[-1]}"]
        meanings.append("fails to compile or to run")
        return tuple(map(AnswerLabel, string.ascii_uppercase, meanings))

    def table(self) -> str:
        """The table in a prompt: one line per label."""
        return "\n".join(f"{label.token} = {label.meaning}" for label in self.labels)

    def index(self, log2_ratio: npt.ArrayLike) -> Index:
        """Bin of log2(time / reference time), same shape; an edge belongs to the slower bin."""
        return np.searchsorted(self.edges, np.asarray(log2_ratio, float), side="right")

    def labels_of(self, log2_ratio: npt.ArrayLike) -> Index:
        """Label of measured log2(time / reference time), same shape: the bin, or "fails" for NaN."""
        ratio = np.asarray(log2_ratio, float)
        fails = np.isnan(ratio)
        return np.where(fails, self.failure_index, self.index(np.where(fails, 0.0, ratio))).astype(np.intp)

    @cached_property
    def bounds(self) -> Array:
        """Ends of each bin in log2, [bins, 2]; open ones are taken as twice as wide as their neighbour."""
        first, last = np.diff(self.edges)[[0, -1]]
        ends = np.concatenate([[self.edges[0] - 2 * first], self.edges, [self.edges[-1] + 2 * last]])
        return np.stack([ends[:-1], ends[1:]], axis=1)

    def moments(self, probabilities: Array) -> tuple[Array, Array, Array]:
        """Mean and sd of log2(time / reference time) given that it runs, and P(fails); [n] each.

        `probabilities` is [n, bins + 1] with rows that sum to 1. Within a bin the density is taken as even.
        """
        p_fail = probabilities[:, self.failure_index]
        runs = np.maximum(1.0 - p_fail, 1e-9)[:, None]
        weight = probabilities[:, : self.failure_index] / runs
        total = weight.sum(axis=1, keepdims=True)
        weight = np.where(total > 1e-6, weight / np.maximum(total, 1e-6), 1.0 / len(self))
        centre, width = self.bounds.mean(axis=1), np.diff(self.bounds, axis=1)[:, 0]
        mean = weight @ centre
        variance = weight @ (centre**2 + width**2 / 12.0) - mean**2
        return mean, np.sqrt(np.maximum(variance, 1e-8)), p_fail

    def soft_targets(self, log2_ratio: npt.ArrayLike, sigma: float) -> Array:
        """Soft targets [n, bins + 1] of measured log2 ratios [n]; NaN stands for a failure.

        HL-Gauss (Imani & White 2018; Farebrother et al., arXiv 2403.03950): the share of a normal of width
        `sigma` around the measured value that falls into each bin.
        """
        if not sigma > 0:
            raise ValueError(f"sigma must be positive, got {sigma}: 0.1 is about 7 %")
        y = np.atleast_1d(np.asarray(log2_ratio, float))
        fails = np.isnan(y)
        z = (self.edges[None, :] - np.where(fails, 0.0, y)[:, None]) / (sigma * math.sqrt(2.0))
        below = 0.5 * (1.0 + np.vectorize(math.erf, otypes=[float])(z))
        ends = np.concatenate([np.zeros((len(y), 1)), below, np.ones((len(y), 1))], axis=1)
        target = np.zeros((len(y), len(self) + 1))
        target[:, : self.failure_index] = np.where(fails[:, None], 0.0, np.diff(ends, axis=1))
        target[fails, self.failure_index] = 1.0
        return target


BINS = Bins()
"""The bins of this release's prompts and adapters."""
