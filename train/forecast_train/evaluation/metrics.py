"""Scores of forecasts and of decisions: pure functions on numpy arrays.

Conventions: times are log2(milliseconds) with NaN for a candidate that failed; regrets are shares
(0.02 is 2 %); probabilities are in [0, 1]; outcomes are booleans. A score that is not defined for its
input (no failure to find, one class only) is NaN, and the caller leaves it out of its average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
RowIndices = npt.NDArray[np.intp]

RELIABILITY_BINS = 10
"""Bins of every reliability table."""


def ranks(values: FloatArray) -> FloatArray:
    """Ranks from 1, ties averaged; shape [n]."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2.0)[place.reshape(-1)])


def spearman(a: FloatArray, b: FloatArray) -> float:
    """Spearman's rank correlation of two arrays [n], ties averaged.

    0 when `a` or `b` is constant: an order was not stated, which is as good as a random one. NaN for
    fewer than two values.
    """
    if len(a) < 2:
        return math.nan
    x, y = ranks(a) - (len(a) + 1) / 2, ranks(b) - (len(b) + 1) / 2
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 0 else 0.0


def regret_path(order: RowIndices, log2_ms: FloatArray) -> FloatArray:
    """Regret of the best of the first 1, 2, ... candidates of `order`; shape [len(order)].

    time(best so far) / time(best of all) - 1. A failure never wins; while all so far have failed, the
    worst time that was observed is charged. `log2_ms` [n] holds NaN for failures. Raises `ValueError`
    when nothing ran.
    """
    if not np.isfinite(log2_ms).any():
        raise ValueError("regret needs a candidate that ran, and all failed: leave such a problem out")
    best, worst = float(np.nanmin(log2_ms)), float(np.nanmax(log2_ms))
    tried = np.where(np.isfinite(log2_ms), log2_ms, np.inf)[order]
    falling = np.minimum.accumulate(tried) if len(tried) else tried
    return np.asarray(2.0 ** (np.where(np.isfinite(falling), falling, worst) - best) - 1.0)


def regret_at(path: FloatArray, k: int) -> float:
    """Regret after `k` candidates of a path (shape [m], m >= 1), its last one when it is shorter.

    Raises `ValueError` for k < 1 or an empty path.
    """
    if k < 1 or not len(path):
        raise ValueError(f"regret after {k} of {len(path)} candidates: both must be at least 1")
    return float(path[min(k, len(path)) - 1])


def measurements_needed(path: FloatArray, share: float) -> int | None:
    """How many candidates of a path until the regret is at most `share`; None if it never is."""
    found = np.flatnonzero(path <= share + 1e-9)
    return int(found[0]) + 1 if len(found) else None


def auroc(score: FloatArray, positive: npt.NDArray[np.bool_]) -> float:
    """P(a positive scores above a negative), ties half (Mann-Whitney U); NaN with one class only."""
    ones = int(positive.sum())
    zeros = len(positive) - ones
    if not ones or not zeros:
        return math.nan
    return float((ranks(score)[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))


def brier(p: FloatArray, happened: npt.NDArray[np.bool_]) -> float:
    """Mean of (p - outcome)^2 (Brier 1950, the binary half), in [0, 1]; NaN for no forecasts."""
    return float(((p - happened) ** 2).mean()) if len(p) else math.nan


@dataclass(frozen=True)
class ReliabilityBin:
    """One row of a reliability table."""

    n: float
    stated: float
    """Mean probability stated."""
    observed: float
    """Share in which it came true."""


def width_bins(p: FloatArray, bins: int = RELIABILITY_BINS) -> RowIndices:
    """Bin number of each probability, bins of equal width; 1.0 belongs to the last."""
    return np.minimum((p * bins).astype(np.intp), bins - 1)


def count_edges(p: FloatArray, bins: int = RELIABILITY_BINS) -> FloatArray:
    """Upper edges (all but the last) of bins of about equal counts; equal values share a bin."""
    if not len(p):
        return np.zeros(0)
    return np.asarray(np.unique(np.quantile(p, np.linspace(0, 1, bins + 1)[1:-1], method="inverted_cdf")))


def edge_bins(p: FloatArray, edges: FloatArray) -> RowIndices:
    """Bin number of each probability, a bin reaching to its upper edge inclusive."""
    return np.searchsorted(edges, p, side="left").astype(np.intp)


def bin_sums(p: FloatArray, happened: npt.NDArray[np.bool_], place: RowIndices, bins: int) -> FloatArray:
    """Per bin (count, sum of stated, sum of outcomes), shape [bins, 3]; sums of parts may be added up."""
    columns = (None, p, happened.astype(float))
    return np.stack([np.bincount(place, weights, minlength=bins) for weights in columns], axis=1).astype(
        float
    )


def reliability_of(sums: FloatArray) -> list[ReliabilityBin]:
    """The rows of a reliability table from `bin_sums`."""
    return [ReliabilityBin(float(n), float(p / n), float(y / n)) for n, p, y in sums if n > 0]


def ece_of(sums: FloatArray) -> float:
    """Expected calibration error from `bin_sums`: sum over bins of n/N |stated - observed|."""
    total = float(sums[:, 0].sum())
    return float(np.abs(sums[:, 1] - sums[:, 2]).sum() / total) if total else math.nan


def ece(
    p: FloatArray, happened: npt.NDArray[np.bool_], *, bins: int = RELIABILITY_BINS, equal_count: bool = False
) -> float:
    """Expected calibration error (Naeini et al. 2015) over bins of equal width, or of equal count."""
    place = edge_bins(p, count_edges(p, bins)) if equal_count else width_bins(p, bins)
    return ece_of(bin_sums(p, happened, place, bins))


def crps_gaussian(mean: FloatArray, sd: FloatArray, truth: FloatArray) -> FloatArray:
    """CRPS of normal forecasts per entry, in the unit of `truth`; lower is better.

    sd (z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi)), z = (truth - mean) / sd (Gneiting & Raftery 2007,
    eq. 21); |truth - mean| where sd is 0.
    """
    safe = np.where(sd > 0, sd, 1.0)
    z = (truth - mean) / safe
    phi = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    cumulative = np.array([0.5 * math.erfc(-float(x) / math.sqrt(2)) for x in z])
    score = safe * (z * (2 * cumulative - 1) + 2 * phi - 1 / math.sqrt(math.pi))
    return np.where(sd > 0, score, np.abs(truth - mean))


def crps_samples(samples: FloatArray, truth: FloatArray) -> FloatArray:
    """CRPS of empirical forecasts [draws, n] against truth [n]: E|X - y| - E|X - X'| / 2."""
    count = len(samples)
    weights = 2.0 * np.arange(1, count + 1) - count - 1
    # With x sorted, the mean of |x_i - x_j| over all pairs is 2/m^2 sum (2i - m - 1) x_i.
    apart = 2.0 / count**2 * (weights[:, None] * np.sort(samples, axis=0)).sum(axis=0)
    return np.asarray(np.abs(samples - truth).mean(axis=0) - 0.5 * apart)


def sample_coverage(samples: FloatArray, truth: FloatArray, level: float) -> float:
    """Share of truths [n] inside the central interval of samples [draws, n]; `level` is nominal."""
    low, high = np.quantile(samples, (0.5 - level / 2, 0.5 + level / 2), axis=0)
    return float(((truth >= low) & (truth <= high)).mean()) if len(truth) else math.nan


def risk_coverage(confidence: FloatArray, loss: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(coverage, mean loss of the covered), most confident first; shape [n] each.

    Equal confidences are in no order, so each of them counts with their mean loss.
    """
    _, place, counts = np.unique(-confidence, return_inverse=True, return_counts=True)
    place = place.reshape(-1)
    shared = (np.bincount(place, loss) / counts)[place]
    ordered = shared[np.argsort(-confidence, kind="stable")]
    number = np.arange(1, len(loss) + 1)
    return number / max(1, len(loss)), np.cumsum(ordered) / number


def aurc(confidence: FloatArray, loss: FloatArray) -> float:
    """Area under the risk-coverage curve: its mean (Geifman & El-Yaniv 2017); NaN when empty."""
    return float(risk_coverage(confidence, loss)[1].mean()) if len(loss) else math.nan


def geomean_regret(regrets: FloatArray) -> float:
    """exp(mean log(1 + regret)) - 1; NaN when empty."""
    return float(np.expm1(np.log1p(regrets).mean())) if len(regrets) else math.nan


def p95(values: FloatArray) -> float:
    """The 95th percentile; NaN when empty."""
    return float(np.quantile(values, 0.95)) if len(values) else math.nan


def share_beyond(regrets: FloatArray, tolerance: float) -> float:
    """Share of regrets larger than the tolerance; NaN when empty."""
    return float((regrets > tolerance + 1e-9).mean()) if len(regrets) else math.nan


@dataclass(frozen=True)
class BootstrapInterval:
    """A statistic and its 95 % bootstrap interval; the ends are NaN with fewer than two clusters."""

    value: float
    low: float
    high: float
    rows: int
    clusters: int

    def above(self, other: BootstrapInterval) -> bool:
        """Whether this interval lies wholly above the other; False when either has none."""
        return self.low > other.high
