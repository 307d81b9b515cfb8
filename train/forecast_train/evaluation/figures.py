"""The list of figures: a column of the rows, and the statistic over problems that is reported of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from forecast_autotune.surrogates.calibration import LONG
from forecast_train.evaluation import metrics
from forecast_train.evaluation.metrics import BINS, Array
from forecast_train.evaluation.rows import ADAPTIVE, BUDGETS, LEVELS, NEAR, STATIC, WITHIN, Row

MANY = LONG
"""Problems with at least so many candidates are reported apart from smaller ones, as they are calibrated."""

RECOVERED = 0.2
"""Regret up to which measuring the best 10 % counts as having found the best (arXiv 2605.31464)."""
COVERED = ("centred", "stated")
"""The two kinds of intervals in `Stated`."""
_BINNED = ("accuracy", "off_by_one", "brier", "rps", "nll")

Value: TypeAlias = float | tuple[float, ...] | Array | None
Columns: TypeAlias = dict[str, list[Value]]
"""Per column one value for each row: a number, or several; None leaves the row out."""


@dataclass(frozen=True)
class Spec:
    """A statistic of one column; it is given the values [rows, ...] and is NaN when there are none."""

    column: str
    statistic: Callable[[Array], float]


def _mean(values: Array) -> float:
    return float(values.mean()) if len(values) else math.nan


def _median(values: Array) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _ratio(sums: Array) -> float:
    total = sums.sum(axis=0) if len(sums) else np.zeros(2)
    return float(total[1] / total[0]) if total[0] else math.nan


def _ece_of_sums(sums: Array) -> float:
    return metrics.ece_of(sums.sum(axis=0)) if len(sums) else math.nan


def _ece(pairs: Array, *, equal_count: bool = False) -> float:
    if not len(pairs):
        return math.nan
    return metrics.ece(pairs[:, 0], pairs[:, 1] > 0, equal_count=equal_count)


def _auroc(pairs: Array) -> float:
    return metrics.auroc(pairs[:, 0], pairs[:, 1] > 0) if len(pairs) else math.nan


def _aurc(pairs: Array) -> float:
    return metrics.aurc(pairs[:, 0], pairs[:, 1]) if len(pairs) else math.nan


def columns_of(rows: Sequence[Row]) -> Columns:
    """All columns of the rows of one method."""
    stated = [np.array(row.stated.p_within, dtype=float) for row in rows]
    edges = metrics.count_edges(np.concatenate(stated) if stated else np.zeros(0))
    found: Columns = {}
    for row, p in zip(rows, stated, strict=True):
        parts = {**_static(row), **_within(row, p, edges), **_measured(row), **_binned(row)}
        for name, value in parts.items():
            found.setdefault(name, []).append(value)
    return found


def _static(row: Row) -> dict[str, Value]:
    found: dict[str, Value] = {f"static.{name}": row.top[name] for name in STATIC}
    found |= {
        "static.spearman": row.spearman,
        "static.auroc_fail": row.auroc_fail,
        "static.auroc_within": row.stated.auroc_within,
        "static.crps_centred": row.stated.crps_centred,
        "static.crps_raw": row.stated.crps_raw,
    }
    for i, level in enumerate(LEVELS):
        for kind in COVERED:
            shares = getattr(row.stated, f"coverage_{kind}")
            found[f"static.coverage_{kind}.{level:.0%}"] = None if shares is None else shares[i]
    missed = float(row.first_regret > WITHIN + 1e-9)
    found["static.top1_missed"] = missed
    sure = row.stated.confidence
    found["static.confidence, hit"] = None if sure is None else (sure, 1.0 - missed)
    found["static.confidence, missed"] = None if sure is None else (sure, missed)
    return found


def _within(row: Row, p: Array, edges: Array) -> dict[str, Value]:
    names = ("by width", "by count", "brier", "no skill")
    if not len(p):
        return {f"static.within {name}": None for name in names}
    happened = np.array(row.stated.within, dtype=bool)
    n, share = float(len(p)), float(happened.mean())
    scores: tuple[Value, ...] = (
        metrics.bin_sums(p, happened, metrics.width_bins(p), BINS),
        metrics.bin_sums(p, happened, metrics.edge_bins(p, edges), len(edges) + 1),
        (n, float(((p - happened) ** 2).sum())),
        # Always stating the problem's own share: the score of knowing nothing of configs.
        (n, n * share * (1.0 - share)),
    )
    return {f"static.within {name}": score for name, score in zip(names, scores, strict=True)}


def _measured(row: Row) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for name, (least, share) in zip(ADAPTIVE, BUDGETS, strict=True):
        count = max(least, math.ceil(share * row.candidates))
        found[f"adaptive.{name}"] = metrics.regret_at(np.array(row.adaptive_path), count)
    for i, near in enumerate(NEAR):
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
        "default.share, large": share_measured if row.candidates >= MANY else None,
        "default.share, small": share_measured if row.candidates < MANY else None,
    }


def _binned(row: Row) -> dict[str, Value]:
    found: dict[str, Value] = {"bins.recovery": float(row.top["top10pct"] <= RECOVERED + 1e-9)}
    b = row.binned
    if b is None:
        return found | {f"bins.{name}": None for name in (*_BINNED, "by width", "aurc")}
    confidence, hit = np.array(b.confidence, dtype=float), np.array(b.hit, dtype=bool)
    found |= {f"bins.{name}": getattr(b, name) for name in _BINNED}
    found["bins.by width"] = metrics.bin_sums(confidence, hit, metrics.width_bins(confidence), BINS)
    found["bins.aurc"] = metrics.aurc(confidence, 1.0 - hit)
    return found


def _figures() -> dict[str, Spec]:
    found: dict[str, Spec] = {}
    for column in (*(f"static.{n}" for n in STATIC), *(f"adaptive.{n}" for n in ADAPTIVE), "default"):
        found[f"{column}.geomean_regret"] = Spec(column, metrics.geomean_regret)
        found[f"{column}.p95_regret"] = Spec(column, metrics.p95)
        found[f"{column}.beyond_2pct"] = Spec(column, partial(metrics.beyond, tolerance=0.02))
    means = ["spearman", "auroc_fail", "auroc_within", "crps_centred", "crps_raw", "top1_missed"]
    means += [f"coverage_{kind}.{level:.0%}" for kind in COVERED for level in LEVELS]
    found |= {f"static.{name}": Spec(f"static.{name}", _mean) for name in means}
    found |= {
        "static.ece_within": Spec("static.within by width", _ece_of_sums),
        "static.ece_within_equal_count": Spec("static.within by count", _ece_of_sums),
        "static.brier_within": Spec("static.within brier", _ratio),
        "static.brier_within_no_skill": Spec("static.within no skill", _ratio),
        "static.auroc_confidence": Spec("static.confidence, hit", _auroc),
        "static.aurc": Spec("static.confidence, missed", _aurc),
    }
    for near in NEAR:
        for kind in ("static", "adaptive"):
            found[f"{kind}.measurements_to_{near:.0%}"] = Spec(f"{kind}.needed {near:.0%}", _median)
            found[f"{kind}.reached_{near:.0%}"] = Spec(f"{kind}.reached {near:.0%}", _mean)
    found |= {f"bins.{name}": Spec(f"bins.{name}", _mean) for name in (*_BINNED, "aurc", "recovery")}
    found["bins.ece"] = Spec("bins.by width", _ece_of_sums)
    return found | {
        "default.beyond_tolerance": Spec("default.slow", _mean),
        "default.mean_stated_risk": Spec("default.risk", _mean),
        "default.ece_risk": Spec("default.risk, slow", _ece),
        "default.ece_risk_equal_count": Spec("default.risk, slow", partial(_ece, equal_count=True)),
        "default.measured_share.large": Spec("default.share, large", _median),
        "default.measured_share.small": Spec("default.share, small", _median),
    }


FIGURES = _figures()
"""Every figure of a report, by name. Regrets and shares are fractions, CRPS is in log2 units."""
