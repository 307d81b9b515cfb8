"""Draw the README's picture: how soon a good config is found, by forecasts and by chance.

    python -m benchmarks.plots.replay_curve [--out docs/assets/replay.svg]

Every shipped table is replayed by the default policy with the untrained formula, which has seen none of
them. Beside it: configs in random order, the mean over many orders. Needs matplotlib, and no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from forecast_autotune import (
    AnalyticSurrogate,
    ReplayReport,
    RiskBounded,
    Settings,
    Table,
    read_tables,
    replay,
    shipped_tables,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = npt.NDArray[np.float64]
SHARES = np.linspace(0.01, 0.5, 99)
"""Shares of a problem's configs at which the curves are read."""
FAILURE = 9.0
"""Regret while nothing has run, as in a replay's report."""
ORDERS = 200
"""Random orders per problem."""
INK, SOFT, BLUE, GREEN = "#57606a", "#8c959f", "#1f6feb", "#2da44e"
"""Colours that can be read on a white and on a black page."""


def regret_at(path: Sequence[float], candidates: int) -> Curve:
    """Regret of the best config so far at `SHARES`; the last one holds for what is not measured."""
    reached = np.clip(np.ceil(SHARES * candidates).astype(int), 1, len(path))
    return np.asarray(np.asarray(path)[reached - 1])


def forecast_curve(report: ReplayReport) -> Curve:
    """Geometric mean over problems of time(best so far) / time(best), minus 1, shape [len(SHARES)]."""
    logs = [np.log1p(regret_at(row.path, row.candidates)) for row in report.rows]
    return np.asarray(np.expm1(np.mean(logs, axis=0)))


def random_curve(tables: Sequence[Table], seed: int = 0) -> Curve:
    """The same for configs in random order: the mean of the logarithm over orders, then over problems."""
    generator = np.random.default_rng(seed)
    logs = []
    for table in tables:
        rows = list(table.by_candidate().values())
        best = min(row.ms for row in rows if row.ok)
        regrets = np.array([min(row.ms / best - 1, FAILURE) if row.ok else FAILURE for row in rows])
        for _ in range(ORDERS):
            path = np.minimum.accumulate(generator.permutation(regrets))
            logs.append(np.log1p(regret_at(path.tolist(), len(rows))))
    return np.asarray(np.expm1(np.mean(logs, axis=0)))


def empty_picture(salt: str, height: float) -> tuple[Figure, Axes]:
    """A figure of this height in inches and its axes, in the style of all pictures; `salt` names its parts."""
    import matplotlib

    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 11})
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, height), layout="constrained")
    axes = figure.subplots()
    axes.tick_params(colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(SOFT)
    return figure, axes


def save_picture(figure: Figure, path: Path) -> None:
    """Write the picture, the same bytes for the same content."""
    figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})


def draw(report: ReplayReport, random: Curve, path: Path) -> None:
    """Write the picture as SVG, the same bytes for the same curves."""
    figure, axes = empty_picture("replay", 3.4)
    share = 100 * SHARES
    axes.plot(share, 100 * random, color=SOFT, lw=2, ls="--")
    axes.plot(share, 100 * forecast_curve(report), color=BLUE, lw=2.5)
    ends = [100 * row.measured / row.candidates for row in report.rows]
    axes.plot(ends, np.full(len(ends), 0.36), "|", color=BLUE, ms=9, clip_on=False)
    axes.axhspan(0.3, 100 * report.tolerance, color=GREEN, alpha=0.15, lw=0)
    axes.set_yscale("log")
    axes.set(xlim=(0, 50), ylim=(0.3, 150))
    ticks = [1, 2, 10, 100]
    axes.set_yticks(ticks, [f"{tick:g} %" for tick in ticks])
    axes.set_xticks(range(0, 51, 10), [f"{tick} %" for tick in range(0, 51, 10)])
    axes.minorticks_off()
    kernels = len({row.kernel for row in report.rows})
    axes.set_title(
        f"{len(report.rows)} recorded H200 problems of {kernels} kernels, replayed",
        loc="left", fontsize=11, color=INK,
    )  # fmt: skip
    axes.set_xlabel("configs compiled and timed", color=INK)
    axes.set_ylabel("slower than the best config", color=INK)
    at = len(SHARES) * 3 // 10
    axes.annotate(
        "random order", (share[at], 100 * random[at]), (4, 8), textcoords="offset points", color=SOFT
    )
    curve = 100 * forecast_curve(report)
    axes.annotate(
        "by forecasts", (share[at // 3], curve[at // 3]), (8, 8), textcoords="offset points", color=BLUE
    )
    axes.annotate("within the tolerance", (49.5, 1.35), ha="right", color=GREEN)
    axes.annotate("each mark: a decision ends here", (49.5, 0.36), ha="right", va="center", color=BLUE)
    axes.grid(axis="y", color=SOFT, lw=0.5, alpha=0.4)
    save_picture(figure, path)


def replay_by_default_policy(tables: Sequence[Table]) -> ReplayReport:
    """Replay with what an installation without a fitted model would do."""
    return replay(
        tables, surrogate=AnalyticSurrogate(), policy=lambda table: RiskBounded(), settings=Settings()
    )


def main() -> None:
    """Replay and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/assets/replay.svg"))
    options = parser.parse_args()
    tables = [table for path in shipped_tables() for table in read_tables(path)]
    report = replay_by_default_policy(tables)
    random = random_curve(tables)
    draw(report, random, options.out)
    for percent in (5, 10, 20):
        row = int(np.argmin(np.abs(SHARES - percent / 100)))
        print(
            f"{percent} % measured: {forecast_curve(report)[row]:.2%} by forecasts, {random[row]:.1%} at random"
        )


if __name__ == "__main__":
    main()
