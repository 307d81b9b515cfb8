"""Figures of a language model's own words on sources: as stated, in bins, and beside the sources' authors'."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

from benchmarks.lib.variants import variant_corpus
from benchmarks.lib.variants.source_answers import SourceAnswer
from benchmarks.lib.variants.source_models import BoolArray, FloatArray, StudentForecasts
from benchmarks.lib.variants.source_outcomes import RecordedSource
from benchmarks.lib.variants.source_scores import (
    KernelForecasts,
    Sums,
    by_figure,
    differences,
    figures,
    kernel_scores,
)
from forecast_autotune.llm.bins import Bins
from forecast_train.evaluation import metrics
from forecast_train.evaluation.bin_scores import ece, found_near_best, score_bins
from forecast_train.evaluation.bootstrap import cluster_bootstrap

EIGHT_BINS = Bins((0.7, 0.92, 0.97, 1.03, 1.09, 1.5, 2.3))
"""Of time / the base's time: every other edge of the product's bins, finest around 1."""
_LEAST_SD = 0.01


def auroc_interval(p: FloatArray, happened: BoolArray, kernels: Sequence[str]) -> list[float]:
    """AUROC with its 95 % interval over kernels."""
    found = cluster_bootstrap(lambda rows: metrics.auroc(p[rows], happened[rows]), kernels)
    return [round(v, 4) for v in (found.value, found.low, found.high)]


def _rows_by_kernel(sources: Sequence[RecordedSource]) -> list[npt.NDArray[np.intp]]:
    names = np.array([s.kernel for s in sources], dtype=object)
    return [np.flatnonzero(names == kernel) for kernel in sorted(set(names))]


def _truth(sources: Sequence[RecordedSource], first_shape: bool = False) -> FloatArray:
    told = [s.first_shape if first_shape else s.log2_ratio for s in sources]
    return np.array([math.nan if one is None else one for one in told])


def _normal_sums(
    sources: Sequence[RecordedSource], said: Sequence[SourceAnswer], truth: FloatArray, least: int = 2
) -> Sums:
    """Scores of normal forecasts as they were stated."""
    mean = np.array([a.log2_ratio for a in said])
    sd = np.array([max(_LEAST_SD, a.sd) for a in said])
    works = 1.0 - np.array([a.p_wrong for a in said])
    z = -mean / sd
    worth = works * sd * (z * stats.norm.cdf(z) + stats.norm.pdf(z))
    density, crps = stats.norm.logpdf(truth, mean, sd), metrics.crps_gaussian(mean, sd, truth)
    found = []
    for rows in _rows_by_kernel(sources):
        if np.isfinite(truth[rows]).sum() >= least:
            parts = (one[rows] for one in (truth, mean, worth, density, crps))
            found.append(kernel_scores(KernelForecasts(*parts)))
    return by_figure(found)


def raw_scores(sources: Sequence[RecordedSource], said: Sequence[SourceAnswer]) -> dict[str, Any]:
    """Figures of the answers as they were stated, normal with the stated spread."""
    truth = _truth(sources)
    ran = np.isfinite(truth)
    error = (truth - [a.log2_ratio for a in said]) / [max(_LEAST_SD, a.sd) for a in said]
    return {
        **figures(_normal_sums(sources, said, truth)),
        "coverage_80": round(float((np.abs(error[ran]) < stats.norm.ppf(0.9)).mean()), 4),
        "mean_error": round(float(np.mean([truth[i] - said[i].log2_ratio for i in np.flatnonzero(ran)])), 4),
    }


def bin_probabilities(below: FloatArray, p_wrong: FloatArray) -> FloatArray:
    """P of each bin and of "fails", [n, bins + 1], from P(log2 ratio < edge) [n, edges]."""
    ends = np.column_stack([np.zeros(len(below)), below, np.ones(len(below))])
    return np.column_stack([np.diff(ends, axis=1) * (1.0 - p_wrong)[:, None], p_wrong])


def bin_figures(
    sources: Sequence[RecordedSource],
    said: Sequence[SourceAnswer],
    calibrated: StudentForecasts,
    p_wrong: FloatArray,
) -> dict[str, Any]:
    """The paper's metrics on eight bins and "fails", of the answers as they are and recalibrated."""
    truth = _truth(sources)
    known = np.isfinite(truth) | np.array([s.wrong for s in sources])
    label = np.where(
        np.isfinite(truth), EIGHT_BINS.index(np.nan_to_num(truth)), EIGHT_BINS.failure_index
    ).astype(np.intp)
    mean = np.array([a.log2_ratio for a in said])
    sd = np.array([max(_LEAST_SD, a.sd) for a in said])
    below = stats.norm.cdf((EIGHT_BINS.edges[None, :] - mean[:, None]) / sd[:, None])
    shares = np.bincount(label[known], minlength=len(EIGHT_BINS) + 1) / known.sum()
    made = {
        "as it is": (bin_probabilities(below, np.array([a.p_wrong for a in said])), mean),
        "recalibrated": (
            bin_probabilities(calibrated.below(EIGHT_BINS.edges), p_wrong),
            calibrated.centre + 9.0 * (p_wrong > 0.5),
        ),
        "shares of all": (np.tile(shares, (len(truth), 1)), np.zeros(len(truth))),
    }
    found: dict[str, Any] = {"edges": list(EIGHT_BINS.ratios), "shares": [round(v, 4) for v in shares]}
    for name, (p, order) in made.items():
        one = score_bins(p[known], label[known])
        near = [
            found_near_best(np.argsort(order[rows], kind="stable"), truth[rows])
            for rows in _rows_by_kernel(sources)
        ]
        found[name] = {
            "accuracy": round(one.accuracy, 4),
            "off_by_one": round(one.off_by_one, 4),
            "ece": round(ece(np.array(one.confidence), np.array(one.hit, dtype=bool)), 4),
            "brier": round(one.brier, 4),
            "crps": round(one.rps, 4),
            "nll": round(one.nll, 4),
        }
        if name != "shares of all":
            found[name]["top_10_percent_within_20"] = round(float(np.mean(near)), 4)
    return found


def author_forecasts(table: Path) -> dict[str, SourceAnswer]:
    """What authors forecast of their own sources, by name; see `variant_corpus`."""
    found = {}
    with gzip.open(table, "rt", encoding="utf-8") as stream:
        for line in map(json.loads, stream):
            kernel, _, name = line["path"].partition("/")
            if name == "forecasts.json":
                for source, one in json.loads(line["text"]).items():
                    words = SourceAnswer(float(one["log2_ratio"]), float(one["sd"]), 0.03)
                    found[f"{kernel}/{source}"] = words
    return found


def author_figures(sources: Sequence[RecordedSource], said: Sequence[SourceAnswer]) -> dict[str, Any]:
    """Authors' own forecasts beside the independent answers on the same sources, both as stated.

    Authors were asked about the kernel's first shape, the others about all shapes: both truths are given.
    """
    theirs = author_forecasts(variant_corpus.TABLES[1])
    at = [i for i, s in enumerate(sources) if s.name in theirs]
    if not at:
        return {}
    kept, own = [sources[i] for i in at], [theirs[sources[i].name] for i in at]
    other = [said[i] for i in at]
    found: dict[str, Any] = {"sources": len(at)}
    alike = metrics.spearman(np.array([a.log2_ratio for a in own]), np.array([a.log2_ratio for a in other]))
    found["spearman_of_both"] = round(alike, 4)
    for name, first in (("all shapes", False), ("first shape", True)):
        truth = _truth(kept, first)
        mine, others = (_normal_sums(kept, words, truth, 3) for words in (own, other))
        found[name] = {
            "authors": figures(mine),
            "independent": figures(others),
            "authors - independent": differences(mine, others),
        }
    return found
