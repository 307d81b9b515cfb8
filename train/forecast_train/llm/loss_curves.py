"""Losses of a run by step, as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forecast_autotune.file_access import open_named_output


def logged_series(log: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every loss and reward that a run logged, by name."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in log:
        for name, value in row.items():
            told = name in ("loss", "eval_loss", "reward") or name.startswith("rewards/")
            if told and isinstance(value, int | float):
                found.setdefault(name, []).append((int(row["step"]), float(value)))
    return found


def draw_curves(path: Path, log: Sequence[Mapping[str, Any]]) -> None:
    """Write a PNG with one line per series."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step")
    for name, points in logged_series(log).items():
        axes.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 30 else None)
    if axes.lines:
        axes.legend()
    with open_named_output(path) as stream:
        FigureCanvasAgg(figure).print_png(stream)
