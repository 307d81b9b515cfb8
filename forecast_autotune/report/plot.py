"""A replay as a picture or a page: how fast regret falls, and what tuning costs. The picture needs matplotlib."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import Any

import numpy as np

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.printable import LONGEST_NAME, printable
from forecast_autotune.report.chart import milliseconds, percent, seconds, sparkline
from forecast_autotune.report.page_parts import STYLE
from forecast_autotune.tuning.replays.replay import ReplayReport, ReplayRow

_INK, _SOFT, _BLUE, _GREY, _GREEN = "#1b1f24", "#6e7781", "#0b69c7", "#c9d1d9", "#2da44e"
_TICKS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
_MAX_SHOWN_REGRET = 4.0
"""Regrets above this are cut off: a first measurement may be a thousandfold off, and nobody chooses it."""
_MAX_NAMED_BARS = 48
"""With more problems than this the bars lose their names."""


_LONGEST_BAR_NAME = 80


class MissingMatplotlibError(ForecastAutotuneError):
    """Drawing was asked for and matplotlib is not installed."""


def render_png(report: ReplayReport, *, dpi: int = 150) -> bytes:
    """The picture of a replay as a PNG file's bytes.

    Left: the incumbent's regret over the share of configs measured, a thin line per problem and their
    median. Right: seconds of tuning against measuring every config, on a log scale.

    Raises `MissingMatplotlibError` when matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise MissingMatplotlibError(
            f"drawing needs matplotlib ({error}): pip install 'forecast-autotune[plot]'"
        ) from error
    height = min(14.0, max(5.0, 2.0 + 0.22 * len(report.rows)))
    figure = Figure(
        figsize=(13.5, height),
        dpi=dpi,
        facecolor="white",
        layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.12),
    )
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.05])
    _regret_panel(left, report)
    _seconds_panel(right, report)
    s = report.summary()
    figure.suptitle(
        f"{s['problems']} problems replayed: {percent(s['median_measured_share'])} of configs measured "
        f"at the median, {percent(s['geomean_regret'])} mean regret, {s['speedup']:.1f}x faster tuning",
        x=0.01,
        ha="left",
        fontsize=14,
        fontweight="bold",
        color=_INK,
    )
    packed = io.BytesIO()
    figure.savefig(packed, format="png")
    return packed.getvalue()


def median_path(rows: list[ReplayRow], points: int = 200) -> tuple[Any, Any]:
    """Median over problems of the incumbent's regret, at equally spaced shares of configs measured.

    Returns two arrays of shape [points]: shares, from the first at which every problem has a
    measurement to the largest measured, and regrets. A problem that has ended counts with its last one.
    """
    start, end = max(1 / r.candidates for r in rows), max(len(r.path) / r.candidates for r in rows)
    shares = np.linspace(start, end, points)
    at = np.array(
        [
            np.asarray(r.path)[
                np.clip(np.floor(shares * r.candidates + 1e-9).astype(int), 1, len(r.path)) - 1
            ]
            for r in rows
        ]
    )
    return shares, np.median(at, axis=0)


def _style_axes(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK, pad=10)
    axes.tick_params(colors=_SOFT, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GREY)


def _regret_panel(axes: Any, report: ReplayReport) -> None:
    rows = [r for r in report.rows if r.path]
    _style_axes(axes, "Regret of the best config so far, over configs measured")
    highest = max([x for r in rows for x in r.path] + [2 * report.tolerance, 0.1])
    top = 1.15 * min(highest, max(_MAX_SHOWN_REGRET, 2 * report.tolerance))
    unit = max(report.tolerance, 0.005)
    # Linear up to the tolerance, so that zero regret has a place; logarithmic beyond it.
    axes.set_yscale("symlog", linthresh=unit, linscale=0.7)
    axes.set_ylim(-0.12 * unit, top)
    axes.axhspan(-unit, report.tolerance, color=_GREEN, alpha=0.10, lw=0)
    for row in rows:
        shares = 100 * np.arange(1, len(row.path) + 1) / row.candidates
        axes.step(shares, row.path, where="post", color=_BLUE, alpha=0.22, lw=1.0)
        end = min(row.path[-1], top)
        axes.plot(shares[-1], end, "o", ms=4, color=_BLUE, alpha=0.55, mew=0, zorder=3, clip_on=False)
    if rows:
        shares, middle = median_path(rows)
        axes.step(100 * shares, middle, where="post", color=_INK, lw=2.4, label="median problem", zorder=4)
    axes.plot(
        [], [], color=_BLUE, alpha=0.5, lw=1.0, marker="o", ms=4, label="one problem; dot: what it chose"
    )
    axes.fill_between(
        [], [], [], color=_GREEN, alpha=0.2, label=f"within the tolerance of {percent(report.tolerance)}"
    )
    axes.set_xlim(left=0)
    axes.set_xlabel("configs measured, % of all", color=_SOFT, fontsize=10)
    ticks = [t for t in sorted({*_TICKS, report.tolerance}) if t <= top and (t == 0 or t >= unit)]
    axes.set_yticks(ticks, [percent(t) for t in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color=_GREY, lw=0.6, alpha=0.6)
    axes.set_axisbelow(True)
    axes.legend(
        loc="upper right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9, labelcolor=_INK
    )


def _seconds_panel(axes: Any, report: ReplayReport) -> None:
    rows = sorted(report.rows, key=lambda r: r.exhaustive_s)
    _style_axes(axes, "Seconds to tune (log scale)")
    places = np.arange(len(rows))
    tuned = np.array([max(r.tune_s, 1e-3) for r in rows])
    every = np.array([max(r.exhaustive_s, 1e-3) for r in rows])
    axes.barh(
        places, every, height=0.78, color=_GREY, label=f"every config: {seconds(float(every.sum()))} in all"
    )
    axes.barh(places, tuned, height=0.78, color=_BLUE, label=f"tuned: {seconds(float(tuned.sum()))} in all")
    axes.set_xscale("log")
    axes.set_xlim(
        10 ** np.floor(np.log10(min(tuned.min(), every.min()))), 3.0 * max(every.max(), tuned.max())
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    axes.set_ylim(-0.6, len(rows) - 0.4)
    if len(rows) <= _MAX_NAMED_BARS:
        # A dollar sign would begin a formula, and an incomplete one is an error.
        names = [printable(r.label or r.kernel, _LONGEST_BAR_NAME).replace("$", r"\$") for r in rows]
        axes.set_yticks(places, names)
        for place, (a, b) in enumerate(zip(tuned, every, strict=True)):
            axes.text(1.08 * max(a, b), place, f"{b / a:.0f}x", va="center", fontsize=8, color=_SOFT)
    else:
        axes.set_yticks([])
    axes.minorticks_off()
    axes.grid(axis="x", color="white", lw=0.8)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.4, -0.035),
        ncols=2,
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
        borderaxespad=0.5,
    )


_HEADS = (
    "problem",
    "measured",
    "regret per measurement",
    "regret",
    "stated risk",
    "chosen",
    "its time",
    "tuned in",
    "all configs",
    "evidence",
)


def render_page(report: ReplayReport, picture: bytes) -> str:
    """The page; `picture` is the PNG of `report.plot.png`."""
    s = report.summary()
    cards = (
        (f"{s['speedup']:.1f}x", "faster tuning"),
        (percent(s["median_measured_share"]), "of configs measured (median)"),
        (percent(s["geomean_regret"]), "regret (geometric mean)"),
        (percent(s["beyond_tolerance_share"]), f"of problems beyond {percent(s['tolerance'])}"),
        (percent(s["mean_stated_risk"]), "stated risk (mean)"),
        (seconds(s["tune_s"]), f"tuning, not {seconds(s['exhaustive_s'])}"),
    )
    shown = "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)
    about = (
        f"{s['problems']} problems of {s['kernels']} kernels; policy {s['policy']}, "
        f"surrogate {s['surrogate']}, prior {s['prior']}; "
        f"accepted: {percent(s['risk'])} risk of more than {percent(s['tolerance'])} regret."
    )
    heads = "".join(f"<th>{escape(name)}</th>" for name in _HEADS)
    body = "\n".join(_row(row, report.tolerance) for row in report.rows)
    image = base64.b64encode(picture).decode("ascii")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>forecast-autotune replay</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>forecast-autotune replay</h1>\n<p>{escape(printable(about))}</p>\n<div class="cards">{shown}</div>\n'
        '<img alt="Regret over measurements, and tuning seconds per problem" '
        f'src="data:image/png;base64,{image}">\n<div class="scroll"><table>\n'
        f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>\n"
        "</body>\n</html>\n"
    )


def _row(row: ReplayRow, tolerance: float) -> str:
    within = row.regret <= tolerance + 1e-9
    colour = "good" if within else "fair" if row.regret <= max(0.1, 5 * tolerance) else "bad"
    cells = (
        ("", printable(row.label or row.kernel, LONGEST_NAME)),
        ("", f"{row.measured} of {row.candidates}"),
        (f"line {colour}", sparkline(row.path, tolerance)),
        (colour, percent(row.regret)),
        ("", percent(row.stated_risk)),
        ("text", row.chosen),
        ("", milliseconds(row.chosen_ms)),
        ("", seconds(row.tune_s)),
        ("", seconds(row.exhaustive_s)),
        ("", row.evidence),
    )
    return (
        "<tr>"
        + "".join(f'<td class="{name}">{escape(printable(text))}</td>' for name, text in cells)
        + "</tr>"
    )
