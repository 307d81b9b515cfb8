"""The page as HTML: one file, nothing loaded from elsewhere, every text of the store's escaped and bounded.

A content security policy names the page's own style and script by their digests: were a text of the store to
become markup, a browser would still run nothing of it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from forecast_autotune.printable import LONGEST_NAME, count_text, printable
from forecast_autotune.records import Candidate, Decision, Measurement, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.report.chart import milliseconds, percent, seconds
from forecast_autotune.report.page_parts import STYLE, page_file, policy_source

MOST_PROBLEMS = 5000
"""Problems on one page, the latest first; those left out are counted."""
MOST_CHARTS, MOST_DOTS = 24, 300
"""Charts of a page, those of the latest kernels, and candidates in one of them."""
MOST_REASONS = 8
"""Sentences shown of one decision: the first ones, and the last."""
UNDECIDED = "undecided"


@dataclass(frozen=True)
class ProblemRow:
    """One problem: times in milliseconds, costs in seconds, `at` in ISO 8601 or whatever the store holds there."""

    kernel: str
    key: str
    device: str
    evidence: str
    """As in `Decision`, or `UNDECIDED`."""
    chosen: str
    median_ms: float | None
    candidates: int
    measured: int
    """Candidates with an outcome in the store."""
    failed: int
    at: str
    risk: float | None = None
    """P(the regret exceeds `tolerance`) as it was stated; None where nothing was."""
    tolerance: float = 0.0
    spent_s: float = 0.0
    saved_s: float = 0.0
    reasons: tuple[str, ...] = ()
    points: tuple[tuple[float, float, float, float], ...] = ()
    """(measured, forecast, low, high) of candidates that ran and had a forecast, in milliseconds; 90 % lie between."""

    @classmethod
    def of(
        cls,
        problem: Problem,
        rows: Sequence[Measurement],
        decision: Decision | None,
        forecasts: Mapping[Candidate, Mapping[str, float]] | None = None,
    ) -> ProblemRow:
        """A problem with its measurements, its decision, if it has one, and its `first_forecasts`."""
        labels = latest_labels(rows).values()
        timings = [m for m in labels if m.ok]
        best = min(timings, key=lambda m: m.ms, default=None)
        common: dict[str, Any] = {
            "kernel": problem.kernel.name,
            "key": " ".join(problem.key),
            "device": problem.device.name,
            "measured": len(labels),
            "failed": len(labels) - len(timings),
            "points": tuple(
                (m.ms, f["ms"], f["low_ms"], f["high_ms"])
                for m in timings
                if (f := (forecasts or {}).get(m.candidate)) is not None
            ),
        }
        if decision is None:
            choice, ms = ("", None) if best is None else (str(best.candidate), best.ms)
            at = max((m.at for m in rows), default="")
            return cls(
                **common, evidence=UNDECIDED, chosen=choice, median_ms=ms, candidates=len(labels), at=at
            )
        reasons = tuple(dict.fromkeys((*decision.rounds, decision.reason)))
        if len(reasons) > MOST_REASONS:
            remaining = len(reasons) - MOST_REASONS
            reasons = (*reasons[: MOST_REASONS - 1], f"({remaining} more)", reasons[-1])
        return cls(
            **common,
            evidence=str(decision.evidence),
            chosen=str(decision.chosen),
            median_ms=decision.median_ms,
            candidates=decision.candidates,
            at=decision.at,
            risk=decision.stated_risk,
            tolerance=decision.tolerance,
            spent_s=decision.cost.wall_s,
            saved_s=decision.saved_s,
            reasons=reasons,
        )


@dataclass(frozen=True)
class StoreOverview:
    """Everything that the page shows."""

    place: str
    rows: Sequence[ProblemRow]
    """The latest first, at most `MOST_PROBLEMS`."""
    problems: int
    decided: int
    measured: int
    spent_s: float
    saved_s: float
    reliability: Sequence[dict[str, Any]]
    """Bins of stated risk as `show --calibration --json` has them."""
    intervals: dict[str, Any]
    """Coverage of the 90 % intervals, likewise."""
    files: int
    disk_bytes: int
    misses: int
    remarks: Sequence[str] = field(default=())
    """Faults of the store's files."""

    @classmethod
    def of(cls, place: str, rows: Iterable[ProblemRow], **more: Any) -> StoreOverview:
        """The sums over all rows, and the latest of them."""
        every = sorted(rows, key=lambda row: (row.at, row.kernel, row.key), reverse=True)
        return cls(
            place=place,
            rows=every[:MOST_PROBLEMS],
            problems=len(every),
            decided=sum(row.evidence != UNDECIDED for row in every),
            measured=sum(row.measured for row in every),
            spent_s=sum(row.spent_s for row in every),
            saved_s=sum(row.saved_s for row in every),
            **more,
        )


def disk_use(root: Path | None) -> tuple[int, int]:
    """Number and bytes of the regular files below a folder; unreadable ones count for nothing."""
    files = total = 0
    folders = [] if root is None else [os.fspath(root)]
    while folders:
        try:
            with os.scandir(folders.pop()) as result:
                for entry in result:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        files, total = files + 1, total + entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return files, total


_LONGEST_REASON = 300
_MOST_REMARKS = 10
_COLUMNS = (
    ("kernel", "text", ""),
    ("key", "text", ""),
    ("device", "text", "wide"),
    ("evidence", "text", "wide"),
    ("chosen", "text", "wide"),
    ("its time", "number", ""),
    ("risk", "number", "wide"),
    ("measured", "number", "wide"),
    ("spent", "number", "wide"),
    ("saved", "number", "wide"),
    ("age", "number", ""),
)
"""Name, order, and class of the columns; those that are `wide` are left out of narrow windows."""


def render_store_page(overview: StoreOverview, now: datetime | None = None) -> str:
    """The whole page; ages are those of `now`, by default this moment."""
    now = now or datetime.now(UTC)
    style, script = STYLE + page_file(__package__, "page.css"), page_file(__package__, "page.js")
    policy = (
        f"default-src 'none'; style-src {policy_source(style)}; script-src {policy_source(script)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n<title>forecast-autotune store</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>forecast-autotune store</h1>\n<p>{_text(overview.place, 400)}, as it was at "
        f"{now.astimezone(UTC):%Y-%m-%d %H:%M} UTC</p>\n"
        f'<div class="cards">{_cards(overview)}</div>\n'
        f"{_remarks(overview.remarks)}{_problems(overview, now)}{_charts(overview)}{_calibration(overview)}"
        f"</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def age_text(at: str, now: datetime) -> tuple[str, float]:
    """A time of day as its age, and the age in seconds; as it stands, and 0, where it is none."""
    try:
        then = datetime.fromisoformat(at)
        past = (now - (then if then.tzinfo else then.replace(tzinfo=UTC))).total_seconds()
    except (ValueError, OverflowError):
        return at, 0.0
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if past >= 2 * size:
            return f"{past / size:.0f} {unit}", past
    return f"{max(0.0, past):.0f} s", past


def size_text(count: int) -> str:
    """Bytes in words: `3.2 MB`."""
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _cards(o: StoreOverview) -> str:
    cards = (
        (f"{o.problems:,}", "problem" if o.problems == 1 else "problems"),
        (f"{o.decided:,}", "decided"),
        (f"{o.measured:,}", "candidates measured"),
        (seconds(max(0.0, o.spent_s)), "spent on decisions"),
        (seconds(max(0.0, o.saved_s)), "saved, as predicted"),
        (f"{o.misses:,}", "misses recorded"),
        (size_text(o.disk_bytes), f"on disk, in {o.files:,} files"),
    )
    return "".join(f'<div class="card"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in cards)


def _problems(o: StoreOverview, now: datetime) -> str:
    if not o.rows:
        return "<h2>Problems</h2>\n<p>The store holds nothing yet.</p>\n"
    remaining = o.problems - len(o.rows)
    more = f" {remaining:,} older ones are left out." if remaining > 0 else ""
    heads = "".join(
        f'<th scope="col" data-order="{order}" class="{name}"><button type="button">{title}</button></th>'
        for title, order, name in _COLUMNS
    )
    body = "\n".join(_row(row, now) for row in o.rows)
    return (
        "<h2>Problems</h2>\n"
        f'<p>A column\'s head sorts by it.{more} <span id="count" role="status"></span></p>\n'
        '<label>Show those with <input type="search" id="filter" autocomplete="off"></label>\n'
        '<div class="scroll" tabindex="0" role="region" aria-label="Problems"><table id="problems">\n'
        f'<thead><tr>{heads}<th scope="col" class="text">why</th></tr></thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>\n"
    )


def _row(row: ProblemRow, now: datetime) -> str:
    age, past = age_text(row.at, now)
    failures = f", {row.failed} failed" if row.failed else ""
    has_decision = row.evidence != UNDECIDED
    values: Sequence[tuple[str, float | None]] = (
        (row.kernel, None),
        (row.key, None),
        (row.device, None),
        (row.evidence, None),
        (row.chosen, None),
        (milliseconds(row.median_ms), -1.0 if row.median_ms is None else row.median_ms),
        ("-" if row.risk is None else percent(row.risk), -1.0 if row.risk is None else row.risk),
        (f"{row.measured} of {row.candidates}{failures}", row.measured),
        (seconds(row.spent_s) if has_decision else "-", row.spent_s),
        (seconds(row.saved_s) if has_decision and row.saved_s >= 1 else "-", row.saved_s),
        (age, past),
    )
    cells = "".join(
        f'<td class="{"text " if order == "text" else ""}{wide}"'
        + ("" if value is None else f' data-value="{value:.9g}"')
        + f">{_text(text, LONGEST_NAME)}</td>"
        for (_, order, wide), (text, value) in zip(_COLUMNS, values, strict=True)
    )
    return f'<tr>{cells}<td class="text why">{_why(row.reasons)}</td></tr>'


def _why(reasons: Sequence[str]) -> str:
    if not reasons:
        return "-"
    items = "".join(f"<li>{_text(reason, _LONGEST_REASON)}</li>" for reason in reasons)
    steps = count_text(len(reasons), "step")
    return f"<details><summary>{steps}</summary><ol>{items}</ol></details>"


def _charts(o: StoreOverview) -> str:
    """Forecast over measured time, a chart for each kernel on each device."""
    points: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for row in o.rows:
        points.setdefault((row.kernel, row.device), []).extend(row.points)
    parts = [_chart(*name, dots[:MOST_DOTS]) for name, dots in points.items() if dots][:MOST_CHARTS]
    text = (
        "Each dot is a config: to the right its time, upwards the forecast made just before, with the range of 90 %. "
        "Dots on the line were forecast exactly."
    )
    return f'<h2>Forecasts</h2>\n<p>{text}</p>\n<div class="charts">{"".join(parts)}</div>\n' if parts else ""


def _chart(kernel: str, device: str, dots: Sequence[tuple[float, ...]]) -> str:
    size, edge = 220.0, 14.0
    least, most = (math.log2(end(v for dot in dots for v in dot[:2])) for end in (min, max))
    scale = (size - 2 * edge) / max(most - least, 0.1)

    def place(ms: float) -> float:
        return min(max(edge + scale * (math.log2(ms) - least), 0.0), size)

    marks = "".join(
        f'<path d="M{place(ms):.1f} {size - place(low):.1f}V{size - place(high):.1f}"/>'
        f'<circle class="{"good" if low <= ms <= high else "fair"}" cx="{place(ms):.1f}" '
        f'cy="{size - place(forecast):.1f}" r="3"/>'
        for ms, forecast, low, high in dots
    )
    inside = f"{sum(low <= ms <= high for ms, _, low, high in dots)} of {len(dots)} within their range"
    ends = f"{milliseconds(2**least, 2)} to {milliseconds(2**most, 2)}"
    name = _text(kernel, LONGEST_NAME)
    role = f'role="img" aria-label="Forecast over measured time of {name}"'
    return (
        f'<figure><svg viewBox="0 0 {size:.0f} {size:.0f}" {role}>'
        f'<path class="line" d="M0 {size:.0f}L{size:.0f} 0"/>{marks}</svg>'
        f"<figcaption><b>{name}</b> {_text(device, LONGEST_NAME)}<br>{ends}; {inside}</figcaption></figure>"
    )


def _calibration(o: StoreOverview) -> str:
    share = o.intervals.get("covered")
    text = (
        "<p>No measurement with a forecast yet.</p>\n"
        if share is None
        else f"<p>{percent(share)} of {o.intervals['n']:,} first measurements fell inside their 90 % interval.</p>\n"
    )
    if not o.reliability:
        table = (
            "<p>No stated risk was checked yet: set FORECAST_AUTOTUNE_AUDIT=0.1, or tune again with "
            "FORECAST_AUTOTUNE_MODE=exhaustive.</p>\n"
        )
    else:
        heads = "".join(
            f'<th scope="col">{name}</th>'
            for name in ("stated risk", "decisions checked", "refuted", "stated", "observed")
        )
        rows = "\n".join(_bin(row) for row in o.reliability)
        table = (
            '<div class="scroll" tabindex="0" role="region" aria-label="Calibration"><table>\n'
            f"<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>\n"
        )
    return f"<h2>Calibration</h2>\n{text}{table}"


def _bin(row: dict[str, Any]) -> str:
    worse = row["observed"] > 2 * row["stated"] + 0.05
    cells = (
        ("", f"{percent(row['low'])} to {percent(row['high'])}"),
        ("", f"{row['n']} ({row['seen']:.1f} in full)"),
        ("", str(row["refuted"])),
        ("", percent(row["stated"])),
        ("bad" if worse else "good", percent(row["observed"])),
    )
    return "<tr>" + "".join(f'<td class="{name}">{escape(text)}</td>' for name, text in cells) + "</tr>"


def _remarks(remarks: Sequence[str]) -> str:
    if not remarks:
        return ""
    items = "".join(f"<li>{_text(text, _LONGEST_REASON)}</li>" for text in remarks[:_MOST_REMARKS])
    remaining = len(remarks) - _MOST_REMARKS
    return f'<ul class="remarks">{items}{f"<li>and {remaining:,} more</li>" if remaining > 0 else ""}</ul>\n'


def _text(text: object, limit: int) -> str:
    return escape(printable(text, limit))
