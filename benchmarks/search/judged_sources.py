"""Claim: the forecasts of a model that wrote sources of kernels, blind, choose those worth a measurement.

    python -m benchmarks.search.judged_sources DATA --out benchmarks/results/judged_sources.json

DATA has a line for each source of some kernels: a strong model's with its forecasts, and mechanical rewrites, each
judged once at a captured call beside the kernel's own source in its best config, and its place in the orders in which
searches would have measured them, four at a time as `search` chooses: a) as they were written; b) by the learned
surrogate, which hears results; c) by the model's forecasts; d) by both, by their precisions, the model's spread
stretched by its errors so far; e) mechanical ones by b; f) all of them by d, or b where the model said nothing. Figures
are of these, and of r) a random order of the model's (mean of many); intervals are of means over kernels, drawn anew.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.result_files import ResultFile
from forecast_autotune.variants.records import Origin
from forecast_train.metrics import bin_sums, ece_of, spearman

_AUTHORS, _SHARES = (str(Origin.LLM), str(Origin.REWRITE)), (0.125, 0.25, 0.5, 1.0)
_FASTER, _DRAWS, _SHUFFLES = math.log2(1.05), 4000, 400
"""How much faster counts (log2), resamples of kernels, and random orders."""


def main() -> int:
    """Compute the figures of recorded verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with gzip.open(options.data, "rt") as file:
        rows = [json.loads(line) for line in file]
    report = ResultFile(options, "judged-sources", 0)
    kernels = {n: [r for r in rows if r["kernel"] == n] for n in dict.fromkeys(r["kernel"] for r in rows)}
    curves = {n: _curves(listed) for n, listed in kernels.items()}
    for name, listed in kernels.items():
        report.add("kernels", {"kernel": name, "module": listed[0]["module"], **curves[name]})
    model = {n: [r for r in listed if "a" in r.get("places", {})] for n, listed in kernels.items()}
    whole = [r for listed in model.values() for r in listed]
    ended = {n: c["e"]["seconds"][-1] for n, c in curves.items()}
    behind = {n: _gain_at(curves[n]["f"], s) - curves[n]["e"]["gain"][-1] for n, s in ended.items()}
    report.finish(
        {
            "kernels": len(kernels),
            "sources": {a: sum(r["author"] == a for r in rows if "places" in r) for a in _AUTHORS},
            "right": {a: _share([_right(r) for r in rows if r["author"] == a]) for a in _AUTHORS},
            "best": {a: _interval([c[a]["gain"][-1] for c in curves.values()]) for a in "aef"},
            "device_s": sum(r["device_s"] for r in rows),
            "at_share": {str(s): _ahead(curves, _at_share, s) for s in _SHARES},
            "at_share_of_seconds": {str(s): _ahead(curves, _at_seconds, s) for s in _SHARES},
            "considered_per_measured": {a: _considered(curves, a) for a in "ar"},
            "f_behind_e": {n: g for n, g in behind.items() if g < 0},
            "best_tenth": {k: _best_tenth(model, k) for k in ("said", "learned", "")},
            "forecasts": {k: _scores(whole, k) for k in ("said", "learned")},
            "verified": {
                a: [r["verified"] for r in rows if "verified" in r and r["author"] == a] for a in _AUTHORS
            },
        }
    )
    return 0


def _right(row: Mapping[str, Any]) -> bool:
    return row["log2_ratio"] is not None


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By arm: the best log2 gain, and the seconds on the device, after each measurement."""
    arms = {a: [r for r in rows if a in r.get("places", {})] for a in "abcdef"}
    curves = {a: _curve(sorted(r, key=lambda one: one["places"][a])) for a, r in arms.items()}
    drawn = [_curve(random.Random(n).sample(arms["a"], len(arms["a"]))) for n in range(_SHUFFLES)]
    curves["r"] = {
        k: [statistics.fmean(v) for v in zip(*(c[k] for c in drawn), strict=True)] for k in drawn[0]
    }
    return curves


def _curve(order: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    gains, seconds = [_gain(r) for r in order], [r["device_s"] for r in order]
    return {"gain": [*itertools.accumulate(gains, max)], "seconds": [*itertools.accumulate(seconds)]}


def _gain(row: Mapping[str, Any]) -> float:
    return max(0.0, -(row["log2_ratio"] or 0.0))


def _gain_at(curve: Mapping[str, Sequence[float]], seconds: float) -> float:
    return max((g for g, s in zip(curve["gain"], curve["seconds"], strict=True) if s <= seconds), default=0.0)


def _at_share(curves: Mapping[str, Any], arm: str, share: float) -> float:
    """The gain of an arm of one kernel after this share of its measurements."""
    return curves[arm]["gain"][max(1, round(share * len(curves[arm]["gain"]))) - 1]


def _at_seconds(curves: Mapping[str, Any], arm: str, share: float) -> float:
    """The gain after this share of the seconds that all sources of the model take."""
    return _gain_at(curves[arm], share * curves["a"]["seconds"][-1])


def _ahead(curves: Mapping[str, Any], gain: Any, share: float) -> dict[str, Any]:
    """Mean log2 gains over kernels by arm, and how far d is ahead of others."""
    gains = {a: [gain(c, a, share) for c in curves.values()] for a in "abcdefr"}
    ahead = {a: _interval([x - y for x, y in zip(gains["d"], gains[a], strict=True)]) for a in "abcr"}
    return {"gain": {a: _interval(g) for a, g in gains.items()}, "d_ahead_of": ahead}


def _considered(curves: Mapping[str, Any], arm: str) -> dict[str, float]:
    """Measurements in an arm until the gain that d has after a quarter, over that quarter."""
    ratios = []
    for c in curves.values():
        n = max(1, round(len(c["d"]["gain"]) / 4))
        wanted = c["d"]["gain"][n - 1]
        ratios.append(next(i for i, g in enumerate([*c[arm]["gain"], math.inf], 1) if g >= wanted) / n)
    return _interval(ratios)


def _best_tenth(model: Mapping[str, Sequence[dict[str, Any]]], key: str) -> float:
    """Share of kernels where the best-ranked tenth of the sources holds one within 20 % of the best ('': any tenth)."""
    held = []
    for rows in model.values():
        n, best = math.ceil(len(rows) / 10), max(map(_gain, rows))
        near = [_right(r) and -r["log2_ratio"] >= best - math.log2(1.2) for r in rows]
        order = sorted(range(len(rows)), key=lambda i: rows[i][key][0] if key else 0.0)
        tops = [order[:n]] if key else [random.Random(s).sample(order, n) for s in range(_SHUFFLES)]
        held.append(statistics.fmean(any(near[i] for i in top) for top in tops))
    return statistics.fmean(held)


def _scores(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Errors, reliability and selection of forecasts (mean, sd, and a probability of being right or of failing)."""
    right = [r for r in rows if _right(r)]
    z = [(r["log2_ratio"] - r[key][0]) / r[key][1] for r in right]
    fine = {"said": lambda p: p, "learned": lambda p: 1 - p}[key]
    p = [fine(r[key][2]) * 0.5 * math.erfc((r[key][0] + _FASTER) / (r[key][1] * math.sqrt(2))) for r in rows]
    faster = [_right(r) and r["log2_ratio"] <= -_FASTER for r in rows]
    named = [r[key][0] <= -_FASTER for r in rows]
    sure = sorted(zip(p, faster, strict=True), key=lambda one: -abs(one[0] - 0.5))
    wrong = [(q >= 0.5) is not is_faster for q, is_faster in sure]
    risks = [sum(wrong[:n]) / n for n in range(1, len(wrong) + 1)]
    hits = sum(n and f for n, f in zip(named, faster, strict=True))
    return {
        "log_score": -statistics.fmean(
            0.5 * x * x + math.log(r[key][1] * math.sqrt(2 * math.pi)) for x, r in zip(z, right, strict=True)
        ),
        "within_sd": _share([abs(x) <= 1 for x in z]),
        "within_two_sd": _share([abs(x) <= 2 for x in z]),
        "bias": statistics.fmean(r["log2_ratio"] - r[key][0] for r in right),
        "rank_correlation": spearman(
            np.array([r[key][0] for r in right]), np.array([r["log2_ratio"] for r in right])
        ),
        "ece": ece_of(bin_sums(np.array(p), np.array(faster))),
        "aurc": statistics.fmean(risks),
        "risk": risks[-1],
        "risk_at_half": risks[len(risks) // 2 - 1],
        "faster": _share(faster),
        "precision": hits / max(1, sum(named)),
        "recall": hits / max(1, sum(faster)),
        "p_right": statistics.fmean(fine(r[key][2]) for r in rows),
    }


def _share(values: Sequence[bool]) -> float:
    return sum(values) / max(1, len(values))


def _interval(values: Sequence[float]) -> dict[str, float]:
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(values, k=len(values))) for _ in range(_DRAWS))
    low, high = means[int(0.025 * _DRAWS)], means[int(0.975 * _DRAWS)]
    return {"mean": statistics.fmean(values), "low": low, "high": high}


if __name__ == "__main__":
    sys.exit(main())
