"""Rows -> figures, each with its interval, and what the surrogate under test does not beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from forecast_train.evaluation import metrics
from forecast_train.evaluation.bootstrap import BOOTSTRAP_DRAWS, cluster_bootstrap, paired_bootstrap
from forecast_train.evaluation.figures import FIGURES, Columns, columns_of
from forecast_train.evaluation.metrics import RELIABILITY_BINS, BootstrapInterval, FloatArray, RowIndices
from forecast_train.evaluation.rows import (
    ADAPTIVE_BUDGETS,
    BUDGETS,
    STATIC_BUDGETS,
    WITHIN_SHARE,
    EvaluationRow,
)
from forecast_train.evaluation.run import Evaluation

HEADLINE_FIGURES = (
    "static.top1.geomean_regret",
    f"static.{STATIC_BUDGETS[4]}.geomean_regret",
    f"adaptive.{ADAPTIVE_BUDGETS[0]}.geomean_regret",
    f"adaptive.{ADAPTIVE_BUDGETS[1]}.geomean_regret",
    f"adaptive.{ADAPTIVE_BUDGETS[2]}.geomean_regret",
    "default.beyond_tolerance",
)
"""Figures by which one method beats another; smaller is better in all of them."""


@dataclass(frozen=True)
class Figure:
    """One number of a report."""

    interval: BootstrapInterval
    by_seed: tuple[float, ...]
    kernels: int
    problems: int

    def to_json(self) -> dict[str, Any]:
        """The value, its 95 % interval, its value with each seed alone, and what it rests on."""
        return {
            "value": _rounded_or_none(self.interval.value),
            "low": _rounded_or_none(self.interval.low),
            "high": _rounded_or_none(self.interval.high),
            "n": self.interval.rows,
            "problems": self.problems,
            "kernels": self.kernels,
            "seeds": len(self.by_seed),
            "by_seed": [_rounded_or_none(v) for v in self.by_seed],
        }


@dataclass(frozen=True)
class UnbeatenBaseline:
    """A baseline whose interval is not wholly above that of the method under test."""

    method: str
    figure: str
    subject: BootstrapInterval
    other: BootstrapInterval
    difference: BootstrapInterval
    """Other minus subject on the same problems."""

    def to_json(self) -> dict[str, Any]:
        """All three intervals."""
        parts = {"subject": self.subject, "other": self.other, "other_minus_subject": self.difference}
        shown = {
            k: {n: _rounded_or_none(getattr(v, n)) for n in ("value", "low", "high")}
            for k, v in parts.items()
        }
        return {"method": self.method, "figure": self.figure, **shown}


@dataclass(frozen=True)
class PlotCurves:
    """What is drawn of one method."""

    within: list[metrics.ReliabilityBin]
    """P(within 5 % of the best), per candidate and before any measurement, against what was so."""
    risk: list[metrics.ReliabilityBin]
    """The default policy's stated risk against regrets beyond the tolerance."""
    coverage: tuple[list[float], list[float]]
    """Share of problems decided without a clock, most confident first, and the share of those that are
    slower than the best by more than 5 %."""
    budget: tuple[list[float], list[float]]
    """Share of candidates measured, and geometric mean regret of adaptive measuring."""

    def to_json(self) -> dict[str, Any]:
        """Bins as objects, curves as pairs of lists."""
        bins = {name: [vars(b) for b in getattr(self, name)] for name in ("within", "risk")}
        return {
            **bins,
            "risk_coverage": {"coverage": self.coverage[0], "risk": self.coverage[1]},
            "regret_budget": {"measured_share": self.budget[0], "geomean_regret": self.budget[1]},
        }


@dataclass(frozen=True)
class Summary:
    """A whole report."""

    evaluation: Evaluation
    subject: str
    figures: dict[str, dict[str, Figure]]
    """By method and name."""
    curves: dict[str, PlotCurves]
    unbeaten: list[UnbeatenBaseline]

    def to_json(self) -> dict[str, Any]:
        """One JSON object; keys are stable, numbers without a definition are null."""
        e = self.evaluation
        surrogates = {r.method: r.surrogate for r in e.rows}
        return {
            "leave_out": e.leave_out,
            "digest": e.digest,
            "tolerance": e.tolerance,
            "risk": e.risk,
            "problems": len({r.problem for r in e.rows}),
            "kernels": len({r.kernel for r in e.rows}),
            "seeds": e.seeds,
            "folds": e.folds,
            "subject": self.subject,
            "methods": {
                name: {
                    "surrogate": surrogates[name],
                    "figures": {key: figure.to_json() for key, figure in found.items()},
                    "curves": self.curves[name].to_json(),
                }
                for name, found in self.figures.items()
            },
            "not_beaten": [u.to_json() for u in self.unbeaten],
        }


def summarize(evaluation: Evaluation, *, subject: str | None = None, draws: int = BOOTSTRAP_DRAWS) -> Summary:
    """All figures of all methods, and the baselines that `subject` does not beat.

    The subject is the method under test: by default `learned` when it was evaluated, else `analytic`,
    else the last method. Intervals come from resampling kernels, all seeds of a kernel together.
    Raises `ValueError` when the subject was not evaluated.
    """
    names = evaluation.methods
    default = next((name for name in ("learned", "analytic") if name in names), names[-1])
    chosen = subject or default
    if chosen not in names:
        raise ValueError(f"subject {chosen!r} was not evaluated: it must be one of {', '.join(names)}")
    rows = {name: [r for r in evaluation.rows if r.method == name] for name in names}
    columns = {name: columns_of(rows[name]) for name in names}
    figures = {name: _figures(rows[name], columns[name], draws) for name in names}
    curves = {name: _curves(rows[name]) for name in names}
    kernels = [r.kernel for r in rows[chosen]]
    unbeaten = [
        UnbeatenBaseline(
            name,
            key,
            figures[chosen][key].interval,
            figures[name][key].interval,
            _unbeaten_baselines(key, kernels, columns[chosen], columns[name], draws),
        )
        for name in names
        for key in HEADLINE_FIGURES
        if name != chosen and not figures[name][key].interval.above(figures[chosen][key].interval)
    ]
    return Summary(evaluation, chosen, figures, curves, unbeaten)


def _figures(rows: Sequence[EvaluationRow], columns: Columns, draws: int) -> dict[str, Figure]:
    kernels, seeds = [r.kernel for r in rows], np.array([r.seed for r in rows])
    found = {}
    for name, spec in FIGURES.items():
        values = columns[spec.column]
        there = [i for i, v in enumerate(values) if v is not None]
        picked = np.array([values[i] for i in there], dtype=float)
        clusters = [kernels[i] for i in there]
        interval = cluster_bootstrap(partial(_on_rows, spec.statistic, picked), clusters, draws=draws)
        by_seed = tuple(spec.statistic(picked[seeds[there] == seed]) for seed in sorted(set(seeds.tolist())))
        problems = len({rows[i].problem for i in there})
        found[name] = Figure(interval, by_seed, len(set(clusters)), problems)
    return found


def _on_rows(statistic: Callable[[FloatArray], float], values: FloatArray, rows: RowIndices) -> float:
    return statistic(values[rows])


def _unbeaten_baselines(
    key: str, kernels: Sequence[str], mine: Columns, theirs: Columns, draws: int
) -> BootstrapInterval:
    spec = FIGURES[key]
    one, other = (np.array(columns[spec.column], dtype=float) for columns in (theirs, mine))
    return paired_bootstrap(spec.statistic, one, other, kernels, draws=draws)


def _curves(rows: Sequence[EvaluationRow]) -> PlotCurves:
    told = [r for r in rows if r.stated.confidence is not None]
    p = np.array([x for r in told for x in r.stated.p_within], dtype=float)
    within = np.array([x for r in told for x in r.stated.within], dtype=bool)
    stated = np.array([r.default_risk for r in rows])
    slow = np.array([r.default_regret > r.tolerance + 1e-9 for r in rows])
    confidence = np.array([r.stated.confidence for r in told], dtype=float)
    missed = np.array([r.first_regret > WITHIN_SHARE + 1e-9 for r in told], dtype=float)
    coverage, risk = metrics.risk_coverage(confidence, missed)
    shares = [round(x, 2) for x in np.arange(0.01, BUDGETS[-1][1] + 1e-9, 0.01).tolist()]
    paths = [(np.array(r.adaptive_path), r.candidates) for r in rows]
    regrets = [
        metrics.geomean_regret(np.array([metrics.regret_at(p, math.ceil(share * n)) for p, n in paths]))
        for share in shares
    ]
    return PlotCurves(
        metrics.reliability_of(metrics.bin_sums(p, within, metrics.width_bins(p), RELIABILITY_BINS)),
        metrics.reliability_of(metrics.bin_sums(stated, slow, metrics.width_bins(stated), RELIABILITY_BINS)),
        (coverage.tolist(), risk.tolist()),
        (shares, regrets),
    )


def _rounded_or_none(value: float) -> float | None:
    return round(value, 5) if math.isfinite(value) else None
