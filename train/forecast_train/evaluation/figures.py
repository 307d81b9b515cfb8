"""The list of figures: a column of the rows, and the statistic over problems that is reported of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from forecast_autotune.surrogates.calibration import LONG_LIST
from forecast_train.evaluation import metrics
from forecast_train.evaluation.metrics import RELIABILITY_BINS, FloatArray
from forecast_train.evaluation.rows import (
    ADAPTIVE_BUDGETS,
    BUDGETS,
    INTERVAL_LEVELS,
    NEAR_REGRETS,
    STATIC_BUDGETS,
    WITHIN_SHARE,
    EvaluationRow,
)

LARGE_PROBLEM = LONG_LIST
"""Problems with at least so many candidates are reported apart from smaller ones, as they are calibrated."""

RECOVERY_REGRET = 0.2
"""Regret up to which measuring the best 10 % counts as having found the best (arXiv 2605.31464)."""
INTERVAL_KINDS = ("centred", "stated")
"""The two kinds of intervals in `Stated`."""
_BIN_SCORES = ("accuracy", "off_by_one", "brier", "rps", "nll")

CellValue: TypeAlias = float | tuple[float, ...] | FloatArray | None
Columns: TypeAlias = dict[str, list[CellValue]]
"""Per column one value for each row: a number, or several; None leaves the row out."""


@dataclass(frozen=True)
class FigureSpec:
    """A statistic of one column; it is given the values [rows, ...] and is NaN when there are none."""

    column: str
    statistic: Callable[[FloatArray], float]


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _median(values: FloatArray) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _ratio(sums: FloatArray) -> float:
    total = sums.sum(axis=0) if len(sums) else np.zeros(2)
    return float(total[1] / total[0]) if total[0] else math.nan


def _ece_of_sums(sums: FloatArray) -> float:
    return metrics.ece_of(sums.sum(axis=0)) if len(sums) else math.nan


def _ece(pairs: FloatArray, *, equal_count: bool = False) -> float:
    if not len(pairs):
        return math.nan
    return metrics.ece(pairs[:, 0], pairs[:, 1] > 0, equal_count=equal_count)


def _auroc(pairs: FloatArray) -> float:
    return metrics.auroc(pairs[:, 0], pairs[:, 1] > 0) if len(pairs) else math.nan


def _aurc(pairs: FloatArray) -> float:
    return metrics.aurc(pairs[:, 0], pairs[:, 1]) if len(pairs) else math.nan


def columns_of(rows: Sequence[EvaluationRow]) -> Columns:
    """All columns of the rows of one method."""
    stated = [np.array(row.stated.p_within, dtype=float) for row in rows]
    edges = metrics.count_edges(np.concatenate(stated) if stated else np.zeros(0))
    found: Columns = {}
    for row, p in zip(rows, stated, strict=True):
        parts = {
            **_static_columns(row),
            **_within_columns(row, p, edges),
            **_measured_columns(row),
            **_binned_columns(row),
        }
        for name, value in parts.items():
            found.setdefault(name, []).append(value)
    return found


def _static_columns(row: EvaluationRow) -> dict[str, CellValue]:
    found: dict[str, CellValue] = {f"static.{name}": row.top[name] for name in STATIC_BUDGETS}
    found |= {
        "static.spearman": row.spearman,
        "static.auroc_fail": row.auroc_fail,
        "static.auroc_within": row.stated.auroc_within,
        "static.crps_centred": row.stated.crps_centred,
        "static.crps_raw": row.stated.crps_raw,
    }
    for i, level in enumerate(INTERVAL_LEVELS):
        for kind in INTERVAL_KINDS:
            shares = getattr(row.stated, f"coverage_{kind}")
            found[f"static.coverage_{kind}.{level:.0%}"] = None if shares is None else shares[i]
    missed = float(row.first_regret > WITHIN_SHARE + 1e-9)
    found["static.top1_missed"] = missed
    sure = row.stated.confidence
    found["static.confidence, hit"] = None if sure is None else (sure, 1.0 - missed)
    found["static.confidence, missed"] = None if sure is None else (sure, missed)
    return found


def _within_columns(row: EvaluationRow, p: FloatArray, edges: FloatArray) -> dict[str, CellValue]:
    names = ("by width", "by count", "brier", "no skill")
    if not len(p):
        return {f"static.within {name}": None for name in names}
    happened = np.array(row.stated.within, dtype=bool)
    n, share = float(len(p)), float(happened.mean())
    scores: tuple[CellValue, ...] = (
        metrics.bin_sums(p, happened, metrics.width_bins(p), RELIABILITY_BINS),
        metrics.bin_sums(p, happened, metrics.edge_bins(p, edges), len(edges) + 1),
        (n, float(((p - happened) ** 2).sum())),
        # Always stating the problem's own share: the score of knowing nothing of configs.
        (n, n * share * (1.0 - share)),
    )
    return {f"static.within {name}": score for name, score in zip(names, scores, strict=True)}


def _measured_columns(row: EvaluationRow) -> dict[str, CellValue]:
    found: dict[str, CellValue] = {}
    for name, (least, share) in zip(ADAPTIVE_BUDGETS, BUDGETS, strict=True):
        count = max(least, math.ceil(share * row.candidates))
        found[f"adaptive.{name}"] = metrics.regret_at(np.array(row.adaptive_path), count)
    for i, near in enumerate(NEAR_REGRETS):
        for kind, counts in (("static", row.static_needed), ("adaptive", row.adaptive_needed)):
            # Infinite where the budget did not do, so that a median stays what it is.
            taken = counts[i]
            found[f"{kind}.needed {near:.0%}"] = math.inf if taken is None else float(taken)
            found[f"{kind}.reached {near:.0%}"] = float(taken is not None)
    slow = float(row.default_regret > row.tolerance + 1e-9)
    share_measured = row.default_measured / row.candidates
    return {
        **found,
        "default": row.default_regret,
        "default.slow": slow,
        "default.risk": row.default_risk,
        "default.risk, slow": (row.default_risk, slow),
        "default.share, large": share_measured if row.candidates >= LARGE_PROBLEM else None,
        "default.share, small": share_measured if row.candidates < LARGE_PROBLEM else None,
    }


def _binned_columns(row: EvaluationRow) -> dict[str, CellValue]:
    found: dict[str, CellValue] = {"bins.recovery": float(row.top["top10pct"] <= RECOVERY_REGRET + 1e-9)}
    b = row.binned
    if b is None:
        return found | {f"bins.{name}": None for name in (*_BIN_SCORES, "by width", "aurc")}
    confidence, hit = np.array(b.confidence, dtype=float), np.array(b.hit, dtype=bool)
    found |= {f"bins.{name}": getattr(b, name) for name in _BIN_SCORES}
    found["bins.by width"] = metrics.bin_sums(
        confidence, hit, metrics.width_bins(confidence), RELIABILITY_BINS
    )
    found["bins.aurc"] = metrics.aurc(confidence, 1.0 - hit)
    return found


def _figures() -> dict[str, FigureSpec]:
    found: dict[str, FigureSpec] = {}
    for column in (
        *(f"static.{n}" for n in STATIC_BUDGETS),
        *(f"adaptive.{n}" for n in ADAPTIVE_BUDGETS),
        "default",
    ):
        found[f"{column}.geomean_regret"] = FigureSpec(column, metrics.geomean_regret)
        found[f"{column}.p95_regret"] = FigureSpec(column, metrics.p95)
        found[f"{column}.beyond_2pct"] = FigureSpec(column, partial(metrics.share_beyond, tolerance=0.02))
    means = ["spearman", "auroc_fail", "auroc_within", "crps_centred", "crps_raw", "top1_missed"]
    means += [f"coverage_{kind}.{level:.0%}" for kind in INTERVAL_KINDS for level in INTERVAL_LEVELS]
    found |= {f"static.{name}": FigureSpec(f"static.{name}", _mean) for name in means}
    found |= {
        "static.ece_within": FigureSpec("static.within by width", _ece_of_sums),
        "static.ece_within_equal_count": FigureSpec("static.within by count", _ece_of_sums),
        "static.brier_within": FigureSpec("static.within brier", _ratio),
        "static.brier_within_no_skill": FigureSpec("static.within no skill", _ratio),
        "static.auroc_confidence": FigureSpec("static.confidence, hit", _auroc),
        "static.aurc": FigureSpec("static.confidence, missed", _aurc),
    }
    for near in NEAR_REGRETS:
        for kind in ("static", "adaptive"):
            found[f"{kind}.measurements_to_{near:.0%}"] = FigureSpec(f"{kind}.needed {near:.0%}", _median)
            found[f"{kind}.reached_{near:.0%}"] = FigureSpec(f"{kind}.reached {near:.0%}", _mean)
    found |= {
        f"bins.{name}": FigureSpec(f"bins.{name}", _mean) for name in (*_BIN_SCORES, "aurc", "recovery")
    }
    found["bins.ece"] = FigureSpec("bins.by width", _ece_of_sums)
    return found | {
        "default.beyond_tolerance": FigureSpec("default.slow", _mean),
        "default.mean_stated_risk": FigureSpec("default.risk", _mean),
        "default.ece_risk": FigureSpec("default.risk, slow", _ece),
        "default.ece_risk_equal_count": FigureSpec("default.risk, slow", partial(_ece, equal_count=True)),
        "default.measured_share.large": FigureSpec("default.share, large", _median),
        "default.measured_share.small": FigureSpec("default.share, small", _median),
    }


FIGURES = _figures()
"""Every figure of a report, by name. Regrets and shares are fractions, CRPS is in log2 units."""
