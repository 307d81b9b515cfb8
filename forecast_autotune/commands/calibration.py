"""`show --calibration`: what was stated, against what the store's own measurements found since."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from forecast_autotune.commands.model_record import model_record_text, model_records
from forecast_autotune.commands.output import Output
from forecast_autotune.commands.stores.access import first_forecasts
from forecast_autotune.commands.stores.named_store import open_named_store
from forecast_autotune.records import RiskVerdict
from forecast_autotune.records.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType

RISK_BIN_EDGES = (0.05, 0.1, 0.2, 0.4, 1.0)
"""Upper ends of the bins of stated risk, inclusive."""


def calibration(options: argparse.Namespace, output: Output) -> int:
    """One table of risks, one line on intervals, and a section on language models."""
    store = open_named_store(options)
    decisions = [d for _, d in store.decisions(options.kernel, options.device)]
    verdicts = [v for d in decisions for v in d.verdicts]
    intervals = coverage(store.tables(options.kernel, options.device))
    data = {
        "store": str(store.root),
        "verdicts": len(verdicts),
        "risk": reliability(verdicts),
        "intervals": intervals,
        "language_models": model_records(decisions, store.tables(options.kernel, options.device)),
    }
    output.emit(data, *([] if output.as_json else _render(data)))
    return 0


def reliability(verdicts: Sequence[RiskVerdict]) -> list[dict[str, Any]]:
    """Stated and observed risk per bin that holds a verdict, lowest first.

    `n` counts verdicts, `seen` adds up the shares of the trusted candidates that were measured, and
    `observed` is refuted / seen, at most 1: a winner is found with at least the probability of its share.
    """
    rows, low = [], 0.0
    for high in RISK_BIN_EDGES:
        inside = [v for v in verdicts if (low < v.stated or low == 0.0) and v.stated <= high]
        if inside:
            seen = sum(v.share for v in inside)
            beaten = sum(v.beaten for v in inside)
            rows.append(
                {
                    "low": low,
                    "high": high,
                    "n": len(inside),
                    "seen": seen,
                    "refuted": beaten,
                    "stated": sum(v.stated * v.share for v in inside) / seen,
                    "observed": min(1.0, beaten / seen),
                }
            )
        low = high
    return rows


def coverage(tables: Iterable[Table]) -> dict[str, Any]:
    """How many first measurements fell inside the 90 % interval that was forecast right before.

    Those measured were chosen for their forecasts, so a little less than nominal is to be expected.
    """
    inside = n = 0
    for table in tables:
        forecasts = first_forecasts(table.measurements)
        first = {m.candidate: m for m in reversed(table.measurements) if "forecast" in m.extra}
        for candidate, forecast in forecasts.items():
            if first[candidate].ok:
                n += 1
                inside += forecast["low_ms"] <= first[candidate].ms <= forecast["high_ms"]
    return {"nominal": 0.9, "n": n, "covered": inside / n if n else None}


def _render(data: dict[str, Any]) -> list[RenderableType]:
    from forecast_autotune.report.chart import percent
    from forecast_autotune.report.shown_text import shown_text
    from forecast_autotune.report.table import plain_table

    parts: list[RenderableType] = []
    if data["risk"]:
        made = plain_table("stated risk", ">decisions checked", ">refuted", ">stated", ">observed")
        for row in data["risk"]:
            made.add_row(
                f"{percent(row['low'])} to {percent(row['high'])}",
                f"{row['n']} ({row['seen']:.1f} in full)",
                str(row["refuted"]),
                percent(row["stated"]),
                percent(row["observed"]),
            )
        parts.append(made)
    else:
        parts.append(
            shown_text(
                "no stated risk was checked yet: set FORECAST_AUTOTUNE_AUDIT=0.1, or tune again with "
                "FORECAST_AUTOTUNE_MODE=exhaustive"
            )
        )
    if (intervals := data["intervals"])["n"]:
        covered = percent(intervals["covered"])
        parts.append(
            shown_text(f"{covered} of {intervals['n']} first measurements fell inside their 90 % interval")
        )
    for record in data["language_models"]:
        parts.append(shown_text(model_record_text(record), lines=True))
    return [*parts, shown_text(f"store: {data['store']}", style="dim")]
