"""A chart as plain data, in the units of its own paper; the template draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from forecast_harness.search.report.scales import AxisScale


@dataclass(frozen=True)
class ChartMark:
    """A mark that stands for a node (`node` is its id) or for a bin (empty)."""

    x: float
    y: float
    css: str
    title: str
    node: str = ""
    radius: float = 4.0
    cross: bool = False


@dataclass(frozen=True)
class ChartPath:
    """A path; `path` is SVG's."""

    path: str
    css: str
    title: str = ""


@dataclass(frozen=True)
class ChartLabel:
    """A label inside the chart."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    css: str = "soft"


@dataclass
class ChartPanel:
    """One chart. `x` and `y` map values to paper; ticks are (place, name)."""

    title: str
    x: AxisScale
    y: AxisScale
    x_title: str
    y_title: str
    x_ticks: Sequence[tuple[float, str]] = ()
    y_ticks: Sequence[tuple[float, str]] = ()
    lines: list[ChartPath] = field(default_factory=list)
    dots: list[ChartMark] = field(default_factory=list)
    words: list[ChartLabel] = field(default_factory=list)
    note: str = ""
    """A sentence under it."""
    empty: str = ""
    """Why there is nothing to see; empty if there is."""
    width: float = 600.0
    height: float = 300.0

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom of the plotting area."""
        return self.x.start, self.y.end, self.x.end, self.y.start


LEFT, TOP, RIGHT, BOTTOM = 70.0, 14.0, 576.0, 254.0
"""Where the plotting area of a panel of the usual size lies."""


def x_axis(low: float, high: float) -> AxisScale:
    """The x axis of a panel of the usual size."""
    return AxisScale(low, high, LEFT, RIGHT)


def y_axis(low: float, high: float) -> AxisScale:
    """The y axis of a panel of the usual size."""
    return AxisScale(low, high, BOTTOM, TOP)


def place_ticks(scale: AxisScale, ticks: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Ticks by their places on paper."""
    return [(scale(value), name) for value, name in ticks]


def step_path(points: Sequence[tuple[float, float]], end: float) -> str:
    """A path that keeps each height until the next point, and the last one until `end`."""
    if not points:
        return ""
    (x, y), rest = points[0], points[1:]
    parts = [f"M{x:g} {y:g}"]
    for after_x, after_y in rest:
        if after_y != y:  # flat stretches need no points: thousands of results, a few dozen steps
            parts.append(f"H{after_x:g}V{after_y:g}")
            y = after_y
    return "".join([*parts, f"H{end:g}"])
