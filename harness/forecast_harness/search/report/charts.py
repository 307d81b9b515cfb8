"""The charts of a search: progress, and forecasts against measurements. Only geometry; the template draws it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log2

from forecast_autotune.report.chart import percent
from forecast_harness.search.report.figures import Z90, ReportNode, SearchReport, factor_text
from forecast_harness.search.state import HistoryPoint


@dataclass(frozen=True)
class AxisScale:
    """A linear map of [low, high] to [start, end]; what lies beyond is drawn at the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Place on paper, rounded to a tenth of a unit to keep pages small."""
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def padded_bounds(
    values: Iterable[float], *, least: float = 1e-9, margin: float = 0.06
) -> tuple[float, float]:
    """Bounds a little beyond all values, at least `least` apart; (-least / 2, least / 2) for none."""
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    middle, half = (low + high) / 2, max((high - low) / 2, least / 2)
    return middle - half * (1 + margin), middle + half * (1 + margin)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round values in [low, high]: multiples of 1, 2 or 5 times a power of ten, at most `most` + 1."""
    raw = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / unit - 1e-9)
    return [round(n * unit, 12) for n in range(first, math.floor(high / unit + 1e-9) + 1)]


def factor_ticks(low: float, high: float, most: int = 6) -> list[tuple[float, str]]:
    """Ticks of an axis in log2 of a speed-up, named as factors: (log2, `1.2x`).

    Round factors where the axis spans less than two doublings, powers of two where it spans more.
    """
    if high - low <= 2.0:
        ticks = [math.log2(v) for v in round_ticks(2.0**low, 2.0**high, most) if v > 0]
    else:
        unit = math.ceil((high - low) / most)
        ticks = [n * float(unit) for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
        if unit == 1 and len(ticks) < most:  # 1, 1.5, 2, 3, 4, 6, 8
            ticks = sorted([*ticks, *(v for n in ticks if (v := n + math.log2(1.5)) <= high)])
    return [(at, factor_text(at)) for at in ticks]


def amount_text(value: float) -> str:
    """A count or sum for a tick: `1,200`, `12 k`, `3.4 M`, `0.02`."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g} M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g} k"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


# --- a chart as plain data, in the units of its own paper ---


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


# --- the charts ---


MOST_DOTS = 600
"""A chart has at most so many marks of single results; the best ones and every n-th of the others stay."""


def progress_chart(story: SearchReport, labels: dict[str, str], *, by: str) -> ChartPanel:
    """Best speed-up so far over `by`: `measurements` or `device_seconds`. Each result is a mark."""
    unit = "measurements" if by == "measurements" else "device seconds"
    limit = getattr(story.state.settings.budget, by)
    spent = [float(getattr(s, by)) for s in story.state.history]
    end = max([*spent, 6.0 if by == "measurements" else 1e-3])  # room for whole ticks
    if limit is not None and limit <= 3 * end:
        end = max(end, float(limit))
    heights = [-s.score for s in story.state.history if s.score is not None]
    low, high = padded_bounds([0.0, *(max(h, -1.0) for h in heights)], least=log2(1.1))
    x, y = x_axis(0.0, end * 1.02), y_axis(low, high)
    panel = ChartPanel(
        f"Best speed-up over {unit}",
        x,
        y,
        unit,
        "speed-up",
        place_ticks(x, [(t, amount_text(t)) for t in round_ticks(0.0, end)]),
        place_ticks(y, factor_ticks(low, high)),
    )
    if not story.state.history:
        panel.empty = "Nothing has been measured yet."
        return panel
    for step, cost in _thin_points(story.state.history, spent):
        name = labels.get(step.node, step.node)
        if step.score is None:
            panel.dots.append(ChartMark(x(cost), y(low), "failed", f"{name}: failed", step.node, 3.0, True))
        else:
            css = "faster" if step.score < 0 else "slower"
            title = f"{name}: {factor_text(-step.score)}"
            if story.entries[step.node].is_unverified:
                title += ", not verified in full"
            panel.dots.append(ChartMark(x(cost), y(-step.score), css, title, step.node, 3.0))
    best = [(x(cost), y(-step.best)) for step, cost in zip(story.state.history, spent, strict=True)]
    panel.lines.append(ChartPath(f"M{x(0):g} {y(0):g}H{x(end):g}", "zero"))
    panel.lines.append(ChartPath(step_path([(x(0), y(0)), *best], x(max(spent))), "best"))
    if limit is not None and limit <= end:
        panel.lines.append(ChartPath(f"M{x(limit):g} {y(low):g}V{y(high):g}", "limit", f"budget: {limit:g}"))
        panel.words.append(ChartLabel(x(limit) - 5, y(low) - 8, "budget", "end"))
    if len(panel.dots) < len(story.state.history):
        panel.note = (
            f"{len(panel.dots)} of {len(story.state.history)} results are marked; the line is drawn from all."
        )
    return panel


def _thin_points(steps: Sequence[HistoryPoint], spent: Sequence[float]) -> list[tuple[HistoryPoint, float]]:
    pairs = list(zip(steps, spent, strict=True))
    if len(pairs) <= MOST_DOTS:
        return pairs
    before = [0.0, *(s.best for s in steps[:-1])]
    stay = {n for n, (s, b) in enumerate(zip(steps, before, strict=True)) if s.best < b}
    stay = set(sorted(stay)[-MOST_DOTS // 2 :])
    stride = -(-len(pairs) // (MOST_DOTS - len(stay)))
    return [pair for n, pair in enumerate(pairs) if n in stay or n % stride == 0]


def forecast_chart(story: SearchReport, labels: dict[str, str]) -> ChartPanel:
    """Forecast against measured speed-up, both over the reference of the forecast, with 90 % intervals."""
    forecasts = [e for e in story.entries.values() if e.belief is not None and not e.belief.abstains]
    timed = [e for e in forecasts if e.measured is not None]
    pairs = [(-e.belief.mean, -(e.measured or 0.0)) for e in timed if e.belief is not None]
    low, high = padded_bounds(
        [max(-3.0, min(3.0, v)) for pair in pairs for v in pair], least=log2(1.2), margin=0.15
    )
    x, y = x_axis(low, high), y_axis(low, high)
    panel = ChartPanel(
        "Forecast against measured speed-up",
        x,
        y,
        "forecast, over the best at that time",
        "measured",
        place_ticks(x, factor_ticks(low, high, 7)),
        place_ticks(y, factor_ticks(low, high)),
    )
    failed = [e for e in forecasts if e.judged is not None and e.score is None]
    if not timed:
        panel.empty = "Nothing that was forecast has run yet."
        return panel
    panel.lines.append(
        ChartPath(f"M{x(low):g} {y(low):g}L{x(high):g} {y(high):g}", "zero", "forecast = measured")
    )
    inside = 0
    shown = {e.node.id for e in timed[:: -(-len(timed) // MOST_DOTS)]}
    for e in timed:
        assert e.belief is not None
        assert e.measured is not None
        half = Z90 * e.belief.sd
        hit = abs(e.measured - e.belief.mean) <= half
        inside += hit
        if e.node.id not in shown:
            continue
        at, css = -e.belief.mean, "faster" if hit else "missed"
        panel.lines.append(
            ChartPath(f"M{x(at - half):g} {y(-e.measured):g}H{x(at + half):g}", f"interval {css}")
        )
        panel.dots.append(ChartMark(x(at), y(-e.measured), css, _forecast_title(e, labels), e.node.id, 3.5))
    panel.note = (
        f"{inside} of {len(timed)} ({percent(inside / len(timed))}) lie inside their 90 % interval "
        f"(blue; the others are orange), 90 % should. What was measured was chosen by these forecasts."
    )
    if failed:
        chance = sum(e.belief.p_fail for e in failed if e.belief is not None) / len(failed)
        ran = sum(e.belief.p_fail for e in timed if e.belief is not None) / len(timed)
        panel.note += (
            f" {len(failed)} failed and have no place here: they were given a {percent(chance)} chance "
            f"of that, what ran {percent(ran)}."
        )
    if len(shown) < len(timed):
        panel.note += f" {len(shown)} are drawn, the counts are of all."
    return panel


def _forecast_title(e: ReportNode, labels: dict[str, str]) -> str:
    assert e.belief is not None
    assert e.measured is not None
    return (
        f"{labels.get(e.node.id, e.node.id)}: forecast {factor_text(-e.belief.mean)}, "
        f"measured {factor_text(-e.measured)}"
    )
