"""Rows -> figures, each with its interval, and what the surrogate under test does not beat; as JSON and as tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding

from forecast_autotune.file_access import open_named_output
from forecast_autotune.numerics import INTERVAL_LEVELS
from forecast_autotune.report.table import key_value_table, plain_table, shown_text
from forecast_autotune.surrogates.calibration import LONG_LIST
from forecast_train import metrics
from forecast_train.evaluation.judging import BUDGETS, STATIC_BUDGETS, EvaluationRow
from forecast_train.evaluation.run import Evaluation
from forecast_train.metrics import (
    BOOTSTRAP_DRAWS,
    BootstrapInterval,
    FloatArray,
    RowIndices,
    cluster_bootstrap,
    paired_bootstrap,
)

if TYPE_CHECKING:
    from rich.text import Text

HEADLINE_FIGURES = (
    "static.top1",
    f"static.{STATIC_BUDGETS[2]}",
    *(f"adaptive.{name}" for name in BUDGETS),
    "default.beyond_tolerance",
)
"""Figures by which one method beats another; smaller is better in all of them."""

Value = float | tuple[float, float] | None
"""Value of one row; None leaves it out."""


@dataclass(frozen=True)
class FigureSpec:
    """A statistic of a value of each row; it is given the values [rows, ...] and is NaN when there are none."""

    value: Callable[[EvaluationRow], Value]
    statistic: Callable[[FloatArray], float]


def _mean(values: FloatArray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _median(values: FloatArray) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _ece(pairs: FloatArray) -> float:
    return metrics.ece_of(metrics.bin_sums(pairs[:, 0], pairs[:, 1] > 0)) if len(pairs) else math.nan


def _regret(row: EvaluationRow, part: str, name: str) -> float:
    return float(getattr(row, part)[name])


def _slow(row: EvaluationRow) -> float:
    return float(row.default_regret > row.tolerance + 1e-9)


def _measured_share(row: EvaluationRow, long: bool) -> float | None:
    return row.default_measured / row.candidates if (row.candidates >= LONG_LIST) == long else None


def _coverage(row: EvaluationRow, place: int) -> float | None:
    return None if row.coverage is None else row.coverage[place]


_FIGURES: dict[str, FigureSpec] = {
    **{
        f"static.{name}": FigureSpec(partial(_regret, part="static", name=name), metrics.geomean_regret)
        for name in STATIC_BUDGETS
    },
    "static.spearman": FigureSpec(lambda row: row.spearman, _mean),
    **{
        f"static.coverage.{level:.0%}": FigureSpec(partial(_coverage, place=i), _mean)
        for i, level in enumerate(INTERVAL_LEVELS)
    },
    **{
        f"adaptive.{name}": FigureSpec(partial(_regret, part="adaptive", name=name), metrics.geomean_regret)
        for name in BUDGETS
    },
    "default.regret": FigureSpec(lambda row: row.default_regret, metrics.geomean_regret),
    "default.beyond_tolerance": FigureSpec(_slow, _mean),
    "default.mean_stated_risk": FigureSpec(lambda row: row.default_risk, _mean),
    "default.ece_risk": FigureSpec(lambda row: (row.default_risk, _slow(row)), _ece),
    "default.measured_share.long": FigureSpec(partial(_measured_share, long=True), _median),
    "default.measured_share.short": FigureSpec(partial(_measured_share, long=False), _median),
}
"""Every figure of a report, by name. Regrets, geometric means of them, and shares are fractions."""


@dataclass(frozen=True)
class UnbeatenBaseline:
    """A baseline whose interval is not wholly above that of the method under test."""

    method: str
    figure: str
    subject: BootstrapInterval
    other: BootstrapInterval
    difference: BootstrapInterval
    """Other minus subject on the same problems."""


@dataclass(frozen=True)
class Summary:
    """A whole report."""

    evaluation: Evaluation
    subject: str
    figures: dict[str, dict[str, BootstrapInterval]]
    """By method and name."""
    reliability: dict[str, list[metrics.ReliabilityBin]]
    """By method: the default policy's stated risk against regrets beyond the tolerance."""
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
                    "figures": {key: _interval_json(interval) for key, interval in figures.items()},
                    "risk": [vars(b) for b in self.reliability[name]],
                }
                for name, figures in self.figures.items()
            },
            "not_beaten": [
                {
                    "method": u.method,
                    "figure": u.figure,
                    "subject": _interval_json(u.subject),
                    "other": _interval_json(u.other),
                    "other_minus_subject": _interval_json(u.difference),
                }
                for u in self.unbeaten
            ],
        }

    def write(self, folder: Path) -> Path:
        """Write `summary.json` into a folder, made if need be; returns the file. Raises `OSError`."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "summary.json"
        with open_named_output(path) as stream:
            stream.write(f"{json.dumps(self.to_json(), indent=1, allow_nan=False)}\n".encode())
        return path


def _interval_json(interval: BootstrapInterval) -> dict[str, Any]:
    figures = {name: getattr(interval, name) for name in ("value", "low", "high")}
    numbers = {name: round(v, 5) if math.isfinite(v) else None for name, v in figures.items()}
    return {**numbers, "n": interval.rows, "kernels": interval.clusters}


def summarize(evaluation: Evaluation, *, subject: str | None = None, draws: int = BOOTSTRAP_DRAWS) -> Summary:
    """All figures of all methods, and the baselines that `subject` does not beat.

    The subject is the method under test: by default `learned` when it was evaluated, else `analytic`,
    else the last method. Intervals come from resampling kernels, all seeds of a kernel together.
    Raises `ValueError` when the subject was not evaluated.
    """
    names = evaluation.methods
    default = next((name for name in ("learned", "analytic") if name in names), names[-1])
    subject_name = subject or default
    if subject_name not in names:
        raise ValueError(f"subject {subject_name!r} was not evaluated: it must be one of {', '.join(names)}")
    rows = {name: [r for r in evaluation.rows if r.method == name] for name in names}
    figures = {name: _intervals(rows[name], draws) for name in names}
    reliability = {name: _reliability(rows[name]) for name in names}
    unbeaten = [
        UnbeatenBaseline(
            name,
            key,
            figures[subject_name][key],
            figures[name][key],
            _difference(key, rows[subject_name], rows[name], draws),
        )
        for name in names
        for key in HEADLINE_FIGURES
        if name != subject_name and not figures[name][key].above(figures[subject_name][key])
    ]
    return Summary(evaluation, subject_name, figures, reliability, unbeaten)


def _intervals(rows: Sequence[EvaluationRow], draws: int) -> dict[str, BootstrapInterval]:
    intervals = {}
    for name, spec in _FIGURES.items():
        pairs = [(row.kernel, value) for row in rows if (value := spec.value(row)) is not None]
        values = np.array([value for _, value in pairs], dtype=float)
        statistic = partial(_on_rows, spec.statistic, values)
        intervals[name] = cluster_bootstrap(statistic, [kernel for kernel, _ in pairs], draws=draws)
    return intervals


def _on_rows(statistic: Callable[[FloatArray], float], values: FloatArray, rows: RowIndices) -> float:
    return statistic(values[rows])


def _difference(
    key: str, subject: Sequence[EvaluationRow], other: Sequence[EvaluationRow], draws: int
) -> BootstrapInterval:
    spec, kernels = _FIGURES[key], [r.kernel for r in subject]
    a, b = (np.array([spec.value(r) for r in rows], dtype=float) for rows in (other, subject))
    return paired_bootstrap(spec.statistic, a, b, kernels, draws=draws)


def _reliability(rows: Sequence[EvaluationRow]) -> list[metrics.ReliabilityBin]:
    risks = np.array([r.default_risk for r in rows])
    return metrics.reliability_of(metrics.bin_sums(risks, np.array([_slow(r) for r in rows]) > 0))


def _budget_text(name: str) -> str:
    """`best of 3 or 10%` for `max3_10%`: so many configs, or that share of the list where it is more."""
    return name.replace("max", "best of ").replace("_", " or ").replace("top", "best of ")


_STATIC_COLUMNS = {
    **{_budget_text(name): f"static.{name}" for name in ("top1", "top3", STATIC_BUDGETS[2])},
    "rank corr.": "static.spearman",
    "in 90 %": "static.coverage.90%",
}
_MEASURED_COLUMNS = {
    **{_budget_text(name): f"adaptive.{name}" for name in BUDGETS},
    "beyond": "default.beyond_tolerance",
    "stated": "default.mean_stated_risk",
    "ECE risk": "default.ece_risk",
    f"share n>={LONG_LIST}": "default.measured_share.long",
    f"n<{LONG_LIST}": "default.measured_share.short",
}
_HEADLINE_TEXTS = {
    **{figure: f"{name}, unmeasured" for name, figure in _STATIC_COLUMNS.items()},
    **{figure: f"{name}, measured" for name, figure in _MEASURED_COLUMNS.items()},
}
_PLAIN_COLUMNS = ("static.spearman", "default.ece_risk")
"""Not shown in percent."""


def shown(summary: Summary, *, width: int = 132) -> RenderableType:
    """Two tables and the list of what is not beaten; intervals where the terminal has `width` for them."""
    e = summary.evaluation
    count = sum(f["dropped"] for f in e.folds.values())
    pairs: list[tuple[str, str | Text]] = [
        ("problems", f"{len({r.problem for r in e.rows})} of {len({r.kernel for r in e.rows})} kernels"),
        ("left out", f"one {e.leave_out} at a time, {len(e.folds)} folds"),
        ("seeds", f"{len(e.seeds)}; 95 % intervals from resampling kernels"),
        ("tables", e.digest),
    ]
    if count:
        pairs.append(("dropped", f"{count} training tables in all, as they share a kernel with the tests"))
    if e.reused:
        pairs.append(("taken up", f"{e.reused} of {len(e.rows)} rows from an earlier run"))
    before, after = (
        _table(summary, f"{when} (regrets, risks and shares in %)", columns, wide=width >= 120)
        for when, columns in (
            ("before any measurement", _STATIC_COLUMNS),
            ("with measurements", _MEASURED_COLUMNS),
        )
    )
    return Group(Padding(key_value_table(pairs), (1, 0)), before, after, _unbeaten_text(summary))


def _table(summary: Summary, title: str, columns: dict[str, str], *, wide: bool) -> RenderableType:
    table = plain_table("method", *(f">{name}" for name in columns), title=title)
    for name, figures in summary.figures.items():
        cells = [_cell(key, figures[key], wide=wide and key in HEADLINE_FIGURES) for key in columns.values()]
        table.add_row(shown_text(name), *cells, style="bold" if name == summary.subject else "")
    return table


def _cell(key: str, interval: BootstrapInterval, *, wide: bool) -> Text:
    scale, digits = (1.0, 2) if key in _PLAIN_COLUMNS else (100.0, 1)
    if not math.isfinite(interval.value):
        return shown_text("-", style="dim")
    text = shown_text(f"{scale * interval.value:.{digits}f}")
    if wide and math.isfinite(interval.low):
        text.append(f" {scale * interval.low:.{digits}f}-{scale * interval.high:.{digits}f}", style="dim")
    return text


def _unbeaten_text(summary: Summary) -> RenderableType:
    baselines = [name for name in summary.figures if name != summary.subject]
    if not baselines:
        return shown_text("Nothing to compare with: one method was evaluated.", style="dim")
    if not summary.unbeaten:
        return shown_text(
            f"{summary.subject} beats {', '.join(baselines)} in all {len(HEADLINE_FIGURES)} headline figures."
        )
    table = plain_table("not beaten", "figure", f">{summary.subject}", ">other", ">other - mine, paired")
    for u in summary.unbeaten:
        cells = [(100 * i.value, 100 * i.low, 100 * i.high) for i in (u.subject, u.other, u.difference)]
        table.add_row(
            shown_text(u.method),
            shown_text(_HEADLINE_TEXTS[u.figure]),
            *(shown_text(f"{v:.1f} [{a:.1f}, {b:.1f}]") for v, a, b in cells),
        )
    note = (
        f"Their intervals are not wholly above those of {summary.subject} (all in %, smaller is better). "
        "A paired difference wholly above 0 still shows that it is better on the same kernels."
    )
    return Group(table, Padding(shown_text(note, style="dim"), (0, 0, 1, 0)))
