"""A summary for people (tables on the terminal) and for files (JSON, pictures)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding

from forecast_autotune.file_access import open_named_output
from forecast_autotune.report.table import key_value_table, plain_table, shown_text
from forecast_train.evaluation.figures import LARGE_PROBLEM
from forecast_train.evaluation.plots import write_plots
from forecast_train.evaluation.rows import ADAPTIVE_BUDGETS, STATIC_BUDGETS
from forecast_train.evaluation.summary import HEADLINE_FIGURES, Figure, Summary

if TYPE_CHECKING:
    from rich.text import Text

_STATIC_COLUMNS = (
    *(
        (name.replace("_", ", "), f"static.{name}.geomean_regret")
        for name in (*STATIC_BUDGETS[:2], STATIC_BUDGETS[4])
    ),
    ("rank corr.", "static.spearman"),
    ("AUROC fail", "static.auroc_fail"),
    ("CRPS", "static.crps_centred"),
    ("in 90 %", "static.coverage_stated.90%"),
    ("ECE", "static.ece_within"),
    ("AUROC conf.", "static.auroc_confidence"),
)
_MEASURED_COLUMNS = (
    *((name.replace("_", ", "), f"adaptive.{name}.geomean_regret") for name in ADAPTIVE_BUDGETS),
    ("to 2 %", "adaptive.measurements_to_2%"),
    ("beyond", "default.beyond_tolerance"),
    ("stated", "default.mean_stated_risk"),
    ("ECE risk", "default.ece_risk"),
    (f"share n>={LARGE_PROBLEM}", "default.measured_share.large"),
    (f"n<{LARGE_PROBLEM}", "default.measured_share.small"),
)
_BINNED_COLUMNS = (
    ("exact", "bins.accuracy"),
    ("off by one", "bins.off_by_one"),
    ("ECE", "bins.ece"),
    ("Brier", "bins.brier"),
    ("RPS", "bins.rps"),
    ("NLL", "bins.nll"),
    ("AURC", "bins.aurc"),
    ("10 % finds", "bins.recovery"),
)
_SHARE_COLUMNS = (
    "regret",
    "beyond_tolerance",
    "measured_share",
    "mean_stated_risk",
    "coverage",
    "accuracy",
    "off_by_one",
    "recovery",
)


def write_report(summary: Summary, folder: Path) -> list[Path]:
    """Write `summary.json` and the pictures into a folder, made if need be; returns the files.

    The figures are written before anything is drawn. Raises `MatplotlibMissing` without matplotlib, and
    `OSError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "summary.json"
    text = json.dumps(summary.to_json(), indent=1, allow_nan=False)
    with open_named_output(path) as stream:
        stream.write(f"{text}\n".encode())
    return [path, *write_plots(summary, folder)]


def shown(summary: Summary, *, width: int = 132) -> RenderableType:
    """Two tables and the list of what is not beaten; intervals where the terminal has `width` for them."""
    e = summary.evaluation
    dropped = sum(f["dropped"] for f in e.folds.values())
    pairs: list[tuple[str, str | Text]] = [
        ("problems", f"{len({r.problem for r in e.rows})} of {len({r.kernel for r in e.rows})} kernels"),
        ("left out", f"one {e.leave_out} at a time, {len(e.folds)} folds"),
        ("seeds", f"{len(e.seeds)}; 95 % intervals from resampling kernels"),
        ("tables", e.digest),
    ]
    if dropped:
        pairs.append(("dropped", f"{dropped} training tables in all, as they share a kernel with the tests"))
    if e.reused:
        pairs.append(("taken up", f"{e.reused} of {len(e.rows)} rows from an earlier run"))
    return Group(
        Padding(key_value_table(pairs), (1, 0)),
        _table(
            summary, "before any measurement (regrets and coverage in %)", _STATIC_COLUMNS, wide=width >= 120
        ),
        _table(
            summary,
            "with measurements (regrets, risks and shares in %)",
            _MEASURED_COLUMNS,
            wide=width >= 120,
        ),
        _table(
            summary,
            "as bins of time / reference time (exact, off by one, found in %)",
            _BINNED_COLUMNS,
            wide=False,
        ),
        _unbeaten_text(summary),
    )


def _table(
    summary: Summary, title: str, columns: tuple[tuple[str, str], ...], *, wide: bool
) -> RenderableType:
    made = plain_table("method", *(f">{name}" for name, _ in columns), title=title)
    for name, figures in summary.figures.items():
        style = "bold" if name == summary.subject else ""
        cells = [_cell(key, figures[key], wide=wide and key in HEADLINE_FIGURES) for _, key in columns]
        made.add_row(shown_text(name), *cells, style=style)
    return made


def _cell(key: str, figure: Figure, *, wide: bool) -> Text:
    scale, digits = (100.0, 1) if any(part in key for part in _SHARE_COLUMNS) else (1.0, 2)
    if ".measurements_to_" in key:
        digits = 0
    i = figure.interval
    if not math.isfinite(i.value):
        return shown_text("never" if math.isinf(i.value) else "-", style="dim")
    text = shown_text(f"{scale * i.value:.{digits}f}")
    if wide and math.isfinite(i.low) and math.isfinite(i.high):
        text.append(f" {scale * i.low:.{digits}f}-{scale * i.high:.{digits}f}", style="dim")
    return text


def _unbeaten_text(summary: Summary) -> RenderableType:
    others = [name for name in summary.figures if name != summary.subject]
    if not others:
        return shown_text("Nothing to compare with: one method was evaluated.", style="dim")
    if not summary.unbeaten:
        return shown_text(
            f"{summary.subject} beats {', '.join(others)} in all {len(HEADLINE_FIGURES)} headline figures."
        )
    made = plain_table("not beaten", "figure", f">{summary.subject}", ">other", ">other - mine, paired")
    for u in summary.unbeaten:
        cells = [(100 * i.value, 100 * i.low, 100 * i.high) for i in (u.subject, u.other, u.difference)]
        made.add_row(
            shown_text(u.method),
            shown_text(u.figure),
            *(shown_text(f"{v:.1f} [{a:.1f}, {b:.1f}]") for v, a, b in cells),
        )
    note = (
        f"Their intervals are not wholly above those of {summary.subject} (all in %, smaller is better). "
        "A paired difference wholly above 0 still shows that it is better on the same kernels."
    )
    return Group(made, Padding(shown_text(note, style="dim"), (0, 0, 1, 0)))
