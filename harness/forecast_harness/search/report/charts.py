"""The charts of a search: progress, forecasts against measurements, reliability. Only geometry."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, sqrt

from forecast_autotune.report.chart import percent
from forecast_harness.search.report.panel import (
    ChartLabel,
    ChartMark,
    ChartPanel,
    ChartPath,
    place_ticks,
    step_path,
    x_axis,
    y_axis,
)
from forecast_harness.search.report.report_model import Z90, ReportNode, SearchReport
from forecast_harness.search.report.scales import (
    amount_text,
    factor_text,
    factor_ticks,
    padded_bounds,
    round_ticks,
)
from forecast_harness.search.state import HistoryPoint

MOST_DOTS = 600
"""A chart has at most so many marks of single results; the best ones and every n-th of the others stay."""
RELIABILITY_BINS = 5
"""Bins of the reliability diagram: with the few dozen results of a search, more would each hold too few."""
_MIN_BIN_COUNT = 3


def progress_chart(story: SearchReport, labels: dict[str, str], *, by: str) -> ChartPanel:
    """Best speed-up so far over `by`: `measurements` or `device_seconds`. Each result is a mark."""
    unit = "measurements" if by == "measurements" else "device seconds"
    limit = getattr(story.budget, by)
    spent = [float(getattr(s, by)) for s in story.history]
    end = max([*spent, 6.0 if by == "measurements" else 1e-3])  # room for whole ticks
    if limit is not None and limit <= 3 * end:
        end = max(end, float(limit))
    heights = [-s.score for s in story.history if s.score is not None]
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
    if not story.history:
        panel.empty = "Nothing has been measured yet."
        return panel
    for step, cost in _thin_points(story.history, spent):
        name = labels.get(step.node, step.node)
        if step.score is None:
            panel.dots.append(ChartMark(x(cost), y(low), "failed", f"{name}: failed", step.node, 3.0, True))
        else:
            css = "faster" if step.score < 0 else "slower"
            title = f"{name}: {factor_text(-step.score)}"
            if story.entries[step.node].is_unverified:
                title += ", not verified in full"
            panel.dots.append(ChartMark(x(cost), y(-step.score), css, title, step.node, 3.0))
    best = [(x(cost), y(-step.best)) for step, cost in zip(story.history, spent, strict=True)]
    panel.lines.append(ChartPath(f"M{x(0):g} {y(0):g}H{x(end):g}", "zero"))
    panel.lines.append(ChartPath(step_path([(x(0), y(0)), *best], x(max(spent))), "best"))
    if limit is not None and limit <= end:
        panel.lines.append(ChartPath(f"M{x(limit):g} {y(low):g}V{y(high):g}", "limit", f"budget: {limit:g}"))
        panel.words.append(ChartLabel(x(limit) - 5, y(low) - 8, "budget", "end"))
    if len(panel.dots) < len(story.history):
        panel.note = (
            f"{len(panel.dots)} of {len(story.history)} results are marked; the line is drawn from all."
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
    told = [e for e in story.entries.values() if e.belief is not None and not e.belief.abstains]
    found = [e for e in told if e.measured is not None]
    pairs = [(-e.belief.mean, -(e.measured or 0.0)) for e in found if e.belief is not None]
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
    failed = [e for e in told if e.judged is not None and e.score is None]
    if not found:
        panel.empty = "Nothing that was forecast has run yet."
        return panel
    panel.lines.append(
        ChartPath(f"M{x(low):g} {y(low):g}L{x(high):g} {y(high):g}", "zero", "forecast = measured")
    )
    inside = 0
    shown = {e.node.id for e in found[:: -(-len(found) // MOST_DOTS)]}
    for e in found:
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
        f"{inside} of {len(found)} ({percent(inside / len(found))}) lie inside their 90 % interval "
        f"(blue; the others are orange), 90 % should. What was measured was chosen by these forecasts."
    )
    if failed:
        chance = sum(e.belief.p_fail for e in failed if e.belief is not None) / len(failed)
        ran = sum(e.belief.p_fail for e in found if e.belief is not None) / len(found)
        panel.note += (
            f" {len(failed)} failed and have no place here: they were given a {percent(chance)} chance "
            f"of that, what ran {percent(ran)}."
        )
    if len(shown) < len(found):
        panel.note += f" {len(shown)} are drawn, the counts are of all."
    return panel


def _forecast_title(e: ReportNode, labels: dict[str, str]) -> str:
    assert e.belief is not None
    assert e.measured is not None
    return (
        f"{labels.get(e.node.id, e.node.id)}: forecast {factor_text(-e.belief.mean)}, "
        f"measured {factor_text(-e.measured)}"
    )


def reliability_chart(story: SearchReport) -> ChartPanel:
    """P(runs and is faster than the reference) against how often that came true, in five bins.

    Bars are 95 % Wilson intervals; the Brier score is the mean squared error of the probabilities.
    """
    pairs = [
        (e.belief.p_better, e.measured is not None and e.measured < 0)
        for e in story.entries.values()
        if e.belief is not None
        and not e.belief.abstains
        and e.judged is not None
        and e.judged.outcome.is_label
    ]
    silent = sum(
        e.belief is not None and e.belief.abstains and e.judged is not None for e in story.entries.values()
    )
    x, y = x_axis(0.0, 1.0), y_axis(0.0, 1.0)
    shares = [(n / 5, percent(n / 5)) for n in range(6)]
    panel = ChartPanel(
        "Reliability of P(better)",
        x,
        y,
        "forecast probability of being faster",
        "came true",
        place_ticks(x, shares),
        place_ticks(y, shares),
    )
    if not pairs:
        panel.empty = "Nothing that was forecast has been measured yet."
        return panel
    panel.lines.append(ChartPath(f"M{x(0):g} {y(0):g}L{x(1):g} {y(1):g}", "zero", "forecast = came true"))
    for n in range(RELIABILITY_BINS):
        inside = [(p, hit) for p, hit in pairs if min(int(p * RELIABILITY_BINS), RELIABILITY_BINS - 1) == n]
        if not inside:
            continue
        count, hits = len(inside), sum(hit for _, hit in inside)
        mean = sum(p for p, _ in inside) / count
        low, high = wilson_interval(hits, count)
        css = "faster" if count >= _MIN_BIN_COUNT else "waiting"
        panel.lines.append(ChartPath(f"M{x(mean):g} {y(low):g}V{y(high):g}", f"interval {css}"))
        title = f"forecast {percent(mean)}, came true {hits} of {count}"
        panel.dots.append(ChartMark(x(mean), y(hits / count), css, title, radius=min(4 + sqrt(count) / 2, 9)))
        right = x(mean) < 540
        panel.words.append(
            ChartLabel(
                x(mean) + (12 if right else -12),
                y(hits / count) + 4,
                f"{hits}/{count}",
                "start" if right else "end",
            )
        )
    rate = sum(hit for _, hit in pairs) / len(pairs)
    brier = sum((p - hit) ** 2 for p, hit in pairs) / len(pairs)
    panel.note = (
        f"Brier score {brier:.3f} over {len(pairs)} results (0 is perfect); always saying {percent(rate)}, "
        f"the share that came true, would give {rate * (1 - rate):.3f}."
    )
    if silent:
        panel.note += f" Left out, like on the left: {silent} for which it said that it does not know."
    if story.reliability is not None:
        said, true = story.reliability["better"]
        panel.note += (
            f" Weighed by 1 / propensity, so that audits stand for what was passed over: forecast "
            f"{percent(said)}, came true {percent(true)}, Brier score {story.reliability['brier']:.3f}."
        )
    return panel


def wilson_interval(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a share (E. B. Wilson, 1927); (0, 1) where nothing was counted."""
    if count == 0:
        return 0.0, 1.0
    share, scale = hits / count, 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z * sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)
