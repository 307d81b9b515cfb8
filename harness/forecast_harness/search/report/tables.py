"""The figures of a search as rows of text: cards, costs, arms, finalists, outcomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forecast_autotune.report.chart import milliseconds, percent, seconds
from forecast_harness.records import EVIDENCE_TEXTS, NodeForecast, NodeResult, SearchBudget, SearchCost
from forecast_harness.search.report.report_model import (
    Z95,
    BestResult,
    ReportNode,
    SearchReport,
    speedup_interval,
)
from forecast_harness.search.report.scales import factor_text
from forecast_harness.search.report.sources import escape_invisible

MAX_FINALISTS = 8
_LIMIT_NAMES = {
    "measurements": "measurements",
    "device_seconds": "device time",
    "wall_seconds": "wall time",
    "tokens": "tokens",
    "money": "money",
}


@dataclass(frozen=True)
class HeaderCard:
    """A figure of the header."""

    value: str
    name: str
    css: str = ""


@dataclass(frozen=True)
class ShareBar:
    """A share of something, with its figures."""

    name: str
    share: float
    """0 to 100."""
    text: str
    css: str = ""
    limited: bool = True
    """Whether there is a whole to have a share of."""


@dataclass(frozen=True)
class FinalistRow:
    """A row of the table of finalists."""

    id: str
    label: str
    note: str
    speedup: str
    css: str
    interval: str
    during: str
    forecast: str
    times: Sequence[str]
    config: str


def header_cards(story: SearchReport) -> list[HeaderCard]:
    """What the header says at a glance."""
    spent, final = story.total, story.final
    proposed = sum(a.proposals for a in story.arms)
    limit = "" if story.budget.measurements is None else f" of {story.budget.measurements:,}"
    return [
        best_card(final),
        HeaderCard(f"{spent.measurements:,}{limit}", f"candidates measured, of {proposed:,} proposed"),
        HeaderCard(seconds(spent.device_seconds), "device time"),
        HeaderCard(*per_percent(final, spent)),
        status_card(story),
    ]


_UNCONFIRMED_NOTE = "not confirmed yet: the best of many looks better than it is"


def best_card(final: BestResult | None) -> HeaderCard:
    """The claim, with its interval, and whether it was confirmed."""
    if final is None:
        return HeaderCard("-", "no source but the seed has run")
    if final.score >= 0.0:
        return HeaderCard(factor_text(-final.score), "nothing faster than the seed was found", "fair")
    low, _ = final.interval
    how = EVIDENCE_TEXTS[final.evidence] if final.evidence else _UNCONFIRMED_NOTE
    css = "good" if low > 1.0 else "fair"
    between = interval_text(final.score, final.sd)
    return HeaderCard(factor_text(-final.score), f"best speed-up, 95 % interval {between}; {how}", css)


def per_percent(final: BestResult | None, spent: SearchCost) -> tuple[str, str]:
    """What each per cent of the first seed's time that is saved cost: (in device time, in all else)."""
    saved = 0.0 if final is None else 100.0 * (1.0 - 1.0 / final.speedup)
    if saved <= 0.0:
        return "-", "cost per percent gained: nothing was gained"
    paid = [f"{spent.measurements / saved:.3g} measurements"]
    if spent.tokens:
        paid.append(f"{spent.tokens / saved:,.0f} tokens")
    if spent.money:
        paid.append(f"US$ {spent.money / saved:.3g}")
    return (
        seconds(spent.device_seconds / saved),
        f"of device time per percent of the seed's time saved; {', '.join(paid)}",
    )


def status_card(story: SearchReport) -> HeaderCard:
    """Whether it runs, and why it ended."""
    if story.stopped is None:
        return HeaderCard(f"batch {story.batch}", "under way, or ended without saying so")
    word = "interrupted" if story.stopped.interrupted else "finished"
    return HeaderCard(
        word,
        escape_invisible(story.stopped.reason) or "no reason given",
        "fair" if story.stopped.interrupted else "",
    )


def budget_bars(story: SearchReport) -> list[ShareBar]:
    """Each limit and what was spent of it; what has no limit is told by its sum."""
    return bars_of_budget(story.total, story.budget)


def bars_of_budget(spent: SearchCost, limits: SearchBudget) -> list[ShareBar]:
    """`budget_bars`, of anything; what is neither limited nor spent is left out."""
    found = []
    for name, shown in _LIMIT_NAMES.items():
        limit, used = getattr(limits, name), getattr(spent, name)
        if limit is None and not used:
            continue
        share = 0.0 if not limit else min(100.0, 100.0 * used / limit)
        text = _amount_text(name, used) + ("" if limit is None else f" of {_amount_text(name, limit)}")
        found.append(ShareBar(shown, round(share, 1), text, limited=limit is not None))
    return found


def _amount_text(name: str, value: float) -> str:
    if name.endswith("seconds"):
        return seconds(value)
    return f"US$ {value:.2f}" if name == "money" else f"{value:,.0f}"


def _cost_cells(spent: SearchCost) -> tuple[str, ...]:
    return (
        f"{spent.measurements:,}" if spent.measurements else "",
        seconds(spent.device_seconds) if spent.device_seconds else "",
        seconds(spent.wall_seconds) if spent.wall_seconds else "",
        *_payment_cells(spent),
    )


def _payment_cells(spent: SearchCost) -> tuple[str, str]:
    return f"{spent.tokens:,}" if spent.tokens else "", f"{spent.money:.3f}" if spent.money else ""


def cost_rows(story: SearchReport) -> list[tuple[str, ...]]:
    """Costs by kind of work, and their sum."""
    rows = [(name, *_cost_cells(spent)) for name, spent in story.spent.items() if spent != SearchCost()]
    return [*rows, ("in all", *_cost_cells(story.total))]


def arm_rows(story: SearchReport) -> list[tuple[str, ...]]:
    """A row per arm, the best first."""
    found = sorted(story.arms, key=lambda a: (a.best is None, a.best or 0.0, a.name))
    return [
        (
            escape_invisible(a.name),
            *(f"{n:,}" for n in (a.requests, a.proposals, a.new, a.measured, a.ran, a.better)),
            "" if a.best is None else factor_text(-a.best),
            *_payment_cells(a.spent),
        )
        for a in found
    ]


def outcome_bars(story: SearchReport) -> list[ShareBar]:
    """How many nodes ended how, and at which stage; what waits to be measured last."""
    counts = story.outcomes
    waiting = sum(e.judged is None for e in story.entries.values())
    again = story.duplicates.total()
    most = max([*counts.values(), waiting, again, 1])
    found = [
        ShareBar(
            f"{outcome.replace('_', ' ')}{f' at {stage}' if stage and outcome != 'ok' else ''}",
            round(100.0 * count / most, 1),
            f"{count:,} ({percent(count / counts.total())})",
            "" if outcome == "ok" else "bad",
        )
        for (outcome, stage), count in sorted(counts.items(), key=lambda i: (i[0][0] != "ok", -i[1], i[0]))
    ]
    if waiting:
        found.append(ShareBar("never measured", round(100.0 * waiting / most, 1), f"{waiting:,}", "soft"))
    if again:
        found.append(
            ShareBar("not new: not even a node", round(100.0 * again / most, 1), f"{again:,}", "soft")
        )
    return found


def finalist_rows(story: SearchReport, workloads: Sequence[str]) -> list[FinalistRow]:
    """The confirmed nodes, or without a confirmation the best of the search; fastest first."""
    judged = {n: j for n, j in story.confirmed.items() if n in story.entries}
    names = sorted(judged, key=lambda n: (judged[n].log2_ratio is None, judged[n].log2_ratio or 0.0))
    if not names:
        able = [e for e in story.entries.values() if e.score is not None and not e.is_unverified]
        ran = [e for e in able if e.node.id != story.root]
        names = [e.node.id for e in sorted(ran, key=lambda e: (e.score or 0.0, e.number))[:MAX_FINALISTS]]
    return [_finalist_row(story.entries[n], judged.get(n), workloads) for n in names]


def _finalist_row(entry: ReportNode, confirmed: NodeResult | None, workloads: Sequence[str]) -> FinalistRow:
    judged = confirmed or entry.judged
    score, sd = entry.score, entry.sd
    if confirmed is not None:
        score, sd = confirmed.log2_ratio, confirmed.sd
    low, _ = speedup_interval(score or 0.0, sd)
    took = {} if judged is None else judged.seconds
    config = (judged.config if judged and judged.config else None) or (
        entry.judged.config if entry.judged else {}
    )
    return FinalistRow(
        entry.node.id,
        f"#{entry.number}",
        escape_invisible(entry.node.provenance.note) or "the seed",
        str(judged.outcome if judged else "") if score is None else factor_text(-score),
        "bad" if score is None else "good" if low > 1.0 else "",
        "" if score is None else interval_text(score, sd),
        "" if entry.score is None else factor_text(-entry.score),
        "" if entry.belief is None else forecast(entry.belief),
        [milliseconds(1000 * took[w]) if w in took else "" for w in workloads],
        config_text(config),
    )


def workloads(story: SearchReport, most: int = 6) -> list[str]:
    """Names of the workloads that results tell times of; the first few."""
    names: dict[str, None] = {}
    for judged in (*story.confirmed.values(), *(e.judged for e in story.entries.values() if e.judged)):
        names.update(dict.fromkeys(judged.seconds))
    return list(names)[:most]


def forecast(belief: NodeForecast) -> str:
    """A belief in a few words."""
    return f"{factor_text(-belief.mean)} ({interval_text(belief.mean, belief.sd)})"


def interval_text(score: float, sd: float) -> str:
    """The 95 % interval of a speed-up: `1.19x to 1.23x`."""
    return f"{factor_text(-(score + Z95 * sd))} to {factor_text(-(score - Z95 * sd))}"


def config_text(config: Mapping[str, Any]) -> str:
    """A config on a line: nested mappings are written out."""
    parts: list[str] = []
    for name, value in config.items():
        if isinstance(value, Mapping):
            parts.append(config_text(value))
        elif value is not None:
            parts.append(f"{name}={value}")
    return escape_invisible(", ".join(p for p in parts if p))
