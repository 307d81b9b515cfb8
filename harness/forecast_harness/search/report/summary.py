"""The end of a search in a few lines."""

from __future__ import annotations

from forecast_autotune.report.chart import seconds
from forecast_harness.records import EVIDENCE_TEXTS
from forecast_harness.search.report import tables
from forecast_harness.search.report.report_model import SearchReport, build_report
from forecast_harness.search.report.scales import factor_text
from forecast_harness.search.report.sources import escape_invisible
from forecast_harness.search.state import SearchState


def summary_lines(state: SearchState) -> list[tuple[str, str]]:
    """What was found and what it cost: (name, text). Raises `RecordError` before the search has started."""
    story = build_report(state)
    per, what = tables.per_percent(story.final, story.total)
    spent = story.total
    paid = [f"{spent.measurements:,} measurements", f"{seconds(spent.device_seconds)} of device time"]
    paid += [f"{spent.tokens:,} tokens"] if spent.tokens else []
    paid += [f"US$ {spent.money:.2f}"] if spent.money else []
    end = tables.status_card(story)
    model = escape_invisible(story.model)
    return [
        ("best", _best_text(story)),
        ("spent", ", ".join(paid)),
        ("cost", what if per == "-" else f"{per} {what}"),
        *([("language model", model)] if model else []),
        ("ended", end.name if end.name.startswith(end.value) else f"{end.value}: {end.name}"),
    ]


def _best_text(story: SearchReport) -> str:
    final = story.final
    if final is None or final.score >= 0.0:
        return tables.best_card(final).name
    note = escape_invisible(story.entries[final.node].node.provenance.note)
    sure = EVIDENCE_TEXTS[final.evidence]
    return (
        f"{factor_text(-final.score)} over the seed, 95 % interval {tables.interval_text(final.score, final.sd)}, "
        f"{sure}{f': {note}' if note else ''}"
    )
