"""A summary as pictures: reliability, risk against coverage, regret against budget. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.file_access import open_named_output
from forecast_train.evaluation.metrics import ReliabilityBin
from forecast_train.evaluation.summary import PlotCurves, Summary

_TEXT_COLOUR, _GRID_COLOUR = "#1b1f24", "#6e7781"
_COLOURS = ("#0b69c7", "#2da44e", "#bf3989", "#bc4c00", "#8250df", "#57606a", "#116329", "#9a6700")
_FEWEST_CASES = 5
"""Bins with fewer cases are left out of the picture (not of the figures): they are noise."""


class MatplotlibMissing(ForecastAutotuneError):
    """Pictures were asked for and matplotlib is not installed."""


def write_plots(summary: Summary, folder: Path) -> list[Path]:
    """Draw `reliability.png`, `risk_coverage.png` and `regret_budget.png` into a folder that exists.

    Raises `MatplotlibMissing` without matplotlib, and `OSError` when a file cannot be written.
    """
    panels: dict[str, list[tuple[str, str, str, Callable[[Any], None]]]] = {
        "reliability": [
            (
                "P(within 5 % of the best), before any measurement",
                "stated",
                "observed",
                lambda axes: _draw_reliability(axes, summary, lambda c: c.within),
            ),
            (
                "risk of the default policy's decisions",
                "stated",
                f"share beyond {summary.evaluation.tolerance:.0%}",
                lambda axes: _draw_reliability(axes, summary, lambda c: c.risk),
            ),
        ],
        "risk_coverage": [
            (
                "choosing without a clock, most confident problems first",
                "share of problems decided",
                "share of them slower than the best by more than 5 %",
                lambda axes: _draw_risk_coverage(axes, summary, lambda c: c.coverage),
            )
        ],
        "regret_budget": [
            (
                "measuring one by one, with an update after each",
                "share of candidates measured",
                "geometric mean regret",
                lambda axes: _draw_regret_budget(axes, summary),
            )
        ],
    }
    return [_write_figure(folder / f"{name}.png", parts, summary) for name, parts in panels.items()]


def _write_figure(
    path: Path, parts: Sequence[tuple[str, str, str, Callable[[Any], None]]], summary: Summary
) -> Path:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MatplotlibMissing(
            f"drawing needs matplotlib ({error}): pip install 'forecast-autotune[eval]'"
        ) from error
    figure = Figure(figsize=(6.6 * len(parts), 5.2), dpi=140, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(1, len(parts), squeeze=False)[0]
    for axes, (title, x, y, draw) in zip(grid, parts, strict=True):
        draw(axes)
        axes.set_title(title, loc="left", fontsize=11, color=_TEXT_COLOUR)
        axes.set_xlabel(x, color=_GRID_COLOUR)
        axes.set_ylabel(y, color=_GRID_COLOUR)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    drawn = {n: h for axes in grid for h, n in zip(*axes.get_legend_handles_labels(), strict=True)}
    named = {name: drawn[name] for name in summary.curves if name in drawn}
    figure.legend(
        list(named.values()), list(named), loc="outside lower center", ncols=5, frameon=False, fontsize=9
    )
    rows = summary.evaluation.rows
    figure.suptitle(
        f"{len({r.problem for r in rows})} problems of {len({r.kernel for r in rows})} kernels, one "
        f"{summary.evaluation.leave_out} left out at a time",
        x=0.01,
        ha="left",
        fontsize=12,
        fontweight="bold",
        color=_TEXT_COLOUR,
    )
    with open_named_output(path) as stream:
        figure.savefig(stream, format="png")
    return path


def _line_style(summary: Summary, name: str, place: int) -> dict[str, Any]:
    mine = name == summary.subject
    return {
        "label": name,
        "color": _COLOURS[place % len(_COLOURS)],
        "linewidth": 2.6 if mine else 1.2,
        "linestyle": "-" if place < len(_COLOURS) else "--",
        "zorder": 3 if mine else 2,
    }


def _draw_reliability(axes: Any, summary: Summary, of: Callable[[PlotCurves], list[ReliabilityBin]]) -> None:
    axes.plot((0, 1), (0, 1), color=_GRID_COLOUR, linewidth=1, linestyle=":")
    for place, (name, curves) in enumerate(summary.curves.items()):
        bins = [b for b in of(curves) if b.n >= _FEWEST_CASES]
        if bins:
            style = _line_style(summary, name, place)
            axes.plot([b.stated for b in bins], [b.observed for b in bins], marker="o", markersize=4, **style)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)


def _draw_risk_coverage(
    axes: Any, summary: Summary, of: Callable[[PlotCurves], tuple[list[float], list[float]]]
) -> None:
    for place, (name, curves) in enumerate(summary.curves.items()):
        x, y = of(curves)
        if x:
            axes.plot(x, y, **_line_style(summary, name, place))
    axes.set_ylim(bottom=0)


def _draw_regret_budget(axes: Any, summary: Summary) -> None:
    _draw_risk_coverage(axes, summary, lambda curves: curves.budget)
    # Linear where it matters, and still showing what is a hundred times off.
    axes.set_yscale("symlog", linthresh=0.02)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(_percent)
    axes.yaxis.set_major_formatter(_percent)


def _percent(value: float, place: object = None) -> str:
    return f"{100 * value:g} %"
