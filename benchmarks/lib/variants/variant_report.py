"""Forecasts of recorded variants joined with what became of them: figures per surrogate and kernel."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.lib.processes.kernel_processes import read_lines
from benchmarks.lib.variants.variant_corpus import EXPECTATIONS
from benchmarks.lib.variants.variant_forecasts import nan_if_none
from forecast_train.evaluation import metrics

Array = npt.NDArray[np.float64]

COVERAGES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the variants, the surest first, whose error is reported."""
TOP_SHARE = 0.1
"""Share of the variants that somebody measures who trusts the forecasts."""
FASTER_SHARE = 0.01
"""A variant is called faster if it is so by this share: less is a matter of timing."""


@dataclass(frozen=True)
class VariantPair:
    """One variant, forecast and measured."""

    kernel: str
    variant: str
    expect: str
    outcome: str
    truth: float
    """log2(its time / the base's), NaN where it did not run or was wrong."""
    said: Mapping[str, Mapping[str, Any]]
    """Forecasts by who made them."""

    @property
    def ran(self) -> bool:
        """Whether it has a time that counts."""
        return self.outcome == "ok"

    @property
    def faster(self) -> bool:
        """Whether it is right, and faster than the base's best."""
        return self.ran and bool(self.truth < -math.log2(1.0 + FASTER_SHARE))


def join_forecasts(forecasts: Sequence[Path], measured: Path) -> list[VariantPair]:
    """Pairs of everything that was forecast and measured at one shape; the last line of a variant counts.

    Files of forecasts add up: each may hold those of other surrogates. Raises `ValueError` where the measured
    text is not the one that was forecast, and where nothing joins.
    """
    lines = {(line["case"], line["variant"]): line for line in read_lines(measured) if "outcome" in line}
    found: dict[tuple[str, str], VariantPair] = {}
    for row in (row for path in forecasts for row in json.loads(path.read_text("utf-8"))["raw"]["cases"]):
        for variant, mark in row["sha256"].items():
            line = lines.get((row["case"], variant))
            if line is None:
                continue
            if line.get("sha256", mark) != mark:
                raise ValueError(
                    f"{variant} was forecast as {mark} and measured as {line['sha256']}: forecast again"
                )
            truth = nan_if_none(line.get("log2_ratio")) if line["outcome"] == "ok" else np.nan
            said = {name: rows[variant] for name, rows in row["forecasts"].items() if variant in rows}
            if (before := found.get((row["case"], variant))) is not None:
                said = {**before.said, **said}
            kernel, expect = row["case"].partition("/")[0], row["expect"][variant]
            pair = VariantPair(kernel, variant, expect, line["outcome"], float(truth), said)
            found[row["case"], variant] = pair
    if not found:
        names = ", ".join(path.name for path in forecasts)
        raise ValueError(f"no variant is both in {names} and in {measured.name}: measure first")
    return list(found.values())


def report(pairs: Sequence[VariantPair]) -> dict[str, Any]:
    """Figures over all variants, and by kernel (under `raw`), per surrogate; author's expectation beside."""
    names = list(dict.fromkeys(name for pair in pairs for name in pair.said))
    kernels = sorted({pair.kernel for pair in pairs})
    outcomes = sorted({pair.outcome for pair in pairs})
    found: dict[str, Any] = {
        "variants": len(pairs),
        "kernels": len(kernels),
        "outcomes": {o: sum(pair.outcome == o for pair in pairs) for o in outcomes},
        "faster": sum(pair.faster for pair in pairs),
        "author's expectation": _ranking_scores(pairs, _expectation_scores(pairs)),
    }
    found |= {name: surrogate_figures(pairs, name) for name in names}
    rows = []
    for kernel in kernels:
        mine = [pair for pair in pairs if pair.kernel == kernel]
        best = min((p for p in mine if p.ran), key=lambda p: p.truth, default=None)
        row: dict[str, Any] = {
            "kernel": kernel,
            "variants": len(mine),
            "ran": sum(p.ran for p in mine),
            "faster": sum(p.faster for p in mine),
            "best": None if best is None else [best.variant, round(best.truth, 4)],
        }
        rows.append(row | {name: _ranking_scores(mine, _column(mine, name, "log2_ratio")) for name in names})
    # Means over kernels: between kernels levels differ, and nobody chooses between variants of two kernels.
    for name in names:
        within = [row[name]["spearman"] for row in rows if row[name]["spearman"] is not None]
        found[name]["spearman_within_kernel"] = round(float(np.mean(within)), 4) if within else None
        shares = [row[name]["top_10_percent_recovers"] for row in rows]
        known = [share for share in shares if share is not None]
        found[name]["recovers_within_kernel"] = round(float(np.mean(known)), 4) if known else None
    return {**found, "raw": {"kernels": rows}}


def surrogate_figures(pairs: Sequence[VariantPair], name: str) -> dict[str, Any]:
    """Figures of one surrogate over all variants of which it said something."""
    told = [p for p in pairs if name in p.said and p.said[name].get("said", True)]
    if not told:
        return {"variants": 0, "spearman": None, "top_10_percent_recovers": None}
    chance, happened = _column(told, name, "p_faster"), np.array([p.faster for p in told])
    failing, failed = _column(told, name, "p_fail"), np.array([not p.ran for p in told])
    wrong = (chance > 0.5) != happened
    _, risk = metrics.risk_coverage(np.abs(chance - 0.5), wrong.astype(float))
    told_ratio = _column(told, name, "log2_ratio")
    truth = np.array([p.truth for p in told])
    both = np.isfinite(truth) & np.isfinite(told_ratio)
    sd = np.maximum(_column(told, name, "sd")[both], 1e-6)
    crps = metrics.crps_gaussian(told_ratio[both], sd, truth[both])
    return {
        "variants": len(told),
        **_ranking_scores(told, told_ratio),
        "faster": {
            "ece": _rounded(metrics.ece(chance, happened)),
            "brier": _rounded(metrics.brier(chance, happened)),
            "auroc": _rounded(metrics.auroc(chance, happened)),
            "accuracy": _rounded(1.0 - float(wrong.mean())),
        },
        "fails": {
            "brier": _rounded(metrics.brier(failing, failed)),
            "auroc": _rounded(metrics.auroc(failing, failed)),
        },
        "crps_log2": _rounded(float(np.mean(crps))) if len(crps) else None,
        "risk_at_coverage": {
            str(share): _rounded(float(risk[max(0, int(np.ceil(share * len(told))) - 1)]))
            for share in COVERAGES
        },
        "aurc": _rounded(float(risk.mean())),
    }


def _ranking_scores(pairs: Sequence[VariantPair], score: Array) -> dict[str, Any]:
    """How well a score (less is better) ranks the variants: Spearman of those that ran, and what the first
    tenth of it holds: the share of the best tenth, and how close its best comes to the best of all (1: it is
    in it; failures count as chosen for nothing)."""
    truth = np.array([p.truth for p in pairs])
    ran = np.isfinite(truth) & np.isfinite(score)
    spread = ran.sum() > 2 and np.ptp(score[ran]) > 0 and np.ptp(truth[ran]) > 0
    found: dict[str, Any] = {
        "spearman": _rounded(metrics.spearman(score[ran], truth[ran])) if spread else None,
        "top_10_percent_recovers": None,
        "top_10_percent_share": None,
    }
    if np.isfinite(truth).any():
        count = max(1, int(np.ceil(TOP_SHARE * len(pairs))))
        first = np.argsort(np.where(np.isfinite(score), score, np.inf), kind="stable")[:count]
        best = np.argsort(np.where(np.isfinite(truth), truth, np.inf), kind="stable")[:count]
        taken = truth[first][np.isfinite(truth[first])]
        close = 2.0 ** (float(np.nanmin(truth)) - float(taken.min())) if len(taken) else 0.0
        found["top_10_percent_recovers"] = _rounded(close)
        found["top_10_percent_share"] = _rounded(len(set(first) & set(best)) / count)
    return found


def _expectation_scores(pairs: Sequence[VariantPair]) -> Array:
    return np.array([float(EXPECTATIONS.index(p.expect)) for p in pairs])


def _column(pairs: Sequence[VariantPair], name: str, key: str) -> Array:
    return np.array([nan_if_none(p.said.get(name, {}).get(key)) for p in pairs])


def _rounded(value: float) -> float | None:
    return round(float(value), 4) if np.isfinite(value) else None
