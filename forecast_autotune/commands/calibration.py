"""`show --calibration`: stated risks and intervals against later measurements of the store."""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from forecast_autotune.commands.output import Output
from forecast_autotune.commands.store_access import first_forecasts, open_named_store
from forecast_autotune.llm.bins import BINS
from forecast_autotune.printable import count_text
from forecast_autotune.records import Decision, Measurement, RiskVerdict
from forecast_autotune.records.table import Table
from forecast_autotune.report.summary import ModelTally

if TYPE_CHECKING:
    from rich.console import RenderableType

_LARGEST_LOG2 = 60.0


def model_records(decisions: Iterable[Decision], tables: Iterable[Table]) -> list[dict[str, Any]]:
    """One entry per model, by name.

    `forecasts` counts the measured candidates that it had forecast; `error` is the median of its forecasts'
    distance from the measurements, `learned_error` that of the forecast it was added to: shares (0.1 is 10 %),
    after each problem's own level was taken off, as neither knows it.
    """
    tallies: defaultdict[str, ModelTally] = defaultdict(ModelTally)
    for decision in decisions:
        if decision.llm is not None:
            tallies[decision.llm.model].add(decision.llm)
    errors: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for table in tables:
        for model, result in _errors(table.measurements).items():
            errors[model] += result
    return [
        {"model": name, **tallies[name].to_json(), **_accuracy(errors[name])}
        for name in sorted({*tallies, *errors})
    ]


def model_record_text(record: Mapping[str, Any]) -> str:
    """One entry as lines for a person."""
    n, moved_in, moved_out = (record[name] for name in ("decisions", "moved_in", "moved_out"))
    text = f"language model {record['model']}: asked in {record['asked']} of {count_text(n, 'decision')}, "
    text += f"moved {moved_in} candidates into and {moved_out} out of the plans, {record['seconds']:.1f} s"
    for name in ("not_heard", "not_asked"):
        for why, count in record[name].items():
            text += f"\n  {name.replace('_', ' ')}: {why} ({count}x)"
    if record["error"] is not None:
        text += f"\n  its forecasts of {record['forecasts']} measured candidates were off by {record['error']:.0%} "
        text += f"(median), those of the surrogate alone by {record['learned_error']:.0%}"
    return text


def _accuracy(errors: Sequence[tuple[float, float]]) -> dict[str, Any]:
    if not errors:
        return {"forecasts": 0, "error": None, "learned_error": None}
    model, learned = (2.0 ** float(np.median(column)) - 1.0 for column in zip(*errors, strict=True))
    return {"forecasts": len(errors), "error": model, "learned_error": learned}


def _errors(rows: Sequence[Measurement]) -> dict[str, list[tuple[float, float]]]:
    """|error| of each model's forecasts, and of the learned ones beside them, log2, of one problem."""
    gaps_of: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for m in rows:
        if m.ok and (result := _noted(m)) is not None:
            gaps_of[result[0]].append(result[1])
    return {
        model: [tuple(row) for row in np.abs(np.array(gaps) - np.median(gaps, axis=0)).tolist()]
        for model, gaps in gaps_of.items()
        if len(gaps) > 1  # of one, the level is all there is
    }


def _noted(m: Measurement) -> tuple[str, tuple[float, float]] | None:
    """The model and (its, the learned) forecast over the measurement, log2; None where nothing usable is noted."""
    forecast = m.extra.get("forecast")
    note = forecast.get("llm") if isinstance(forecast, Mapping) else None
    if not isinstance(forecast, Mapping) or not isinstance(note, Mapping):
        return None
    try:
        shares = np.array([note["stated"]], dtype=float)
        values = float(note["reference_log2_ms"]), float(forecast["learned_log2_ms"])
        model = str(note["model"])
    except (KeyError, TypeError, ValueError):
        return None  # a table from elsewhere may carry anything under these names
    usable = (
        shares.shape == (1, len(BINS.labels)) and np.isfinite(shares).all() and abs(shares.sum() - 1.0) < 0.01
    )
    if not usable or not all(abs(v) < _LARGEST_LOG2 for v in values):
        return None
    reference, learned = values
    truth = math.log2(m.ms)
    return model, (reference + float(BINS.moments(shares)[0][0]) - truth, learned - truth)


RISK_BIN_EDGES = (0.05, 0.1, 0.2, 0.4, 1.0)
"""Upper ends of the bins of stated risk, inclusive."""


def calibration(options: argparse.Namespace, output: Output) -> int:
    """One table of risks, one line on intervals, and a section on language models."""
    store = open_named_store(options)
    decisions = [d for _, d in store.decisions(options.kernel, options.device)]
    verdicts = [v for d in decisions for v in d.verdicts]
    intervals = coverage(store.tables(options.kernel, options.device))
    data = {
        "store": store.place,
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
            share = sum(v.share for v in inside)
            beaten = sum(v.beaten for v in inside)
            rows.append(
                {
                    "low": low,
                    "high": high,
                    "n": len(inside),
                    "seen": share,
                    "refuted": beaten,
                    "stated": sum(v.stated * v.share for v in inside) / share,
                    "observed": min(1.0, beaten / share),
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
        forecasts = first_forecasts(table.problem, table.measurements)
        first = {m.candidate: m for m in reversed(table.measurements) if "forecast" in m.extra}
        for candidate, forecast in forecasts.items():
            if first[candidate].ok:
                n += 1
                inside += forecast["low_ms"] <= first[candidate].ms <= forecast["high_ms"]
    return {"nominal": 0.9, "n": n, "covered": inside / n if n else None}


def _render(data: dict[str, Any]) -> list[RenderableType]:
    from forecast_autotune.report.chart import percent
    from forecast_autotune.report.table import plain_table, shown_text

    parts: list[RenderableType] = []
    if data["risk"]:
        table = plain_table("stated risk", ">decisions checked", ">refuted", ">stated", ">observed")
        for row in data["risk"]:
            table.add_row(
                f"{percent(row['low'])} to {percent(row['high'])}",
                f"{row['n']} ({row['seen']:.1f} in full)",
                str(row["refuted"]),
                percent(row["stated"]),
                percent(row["observed"]),
            )
        parts.append(table)
    else:
        parts.append(
            shown_text(
                "no stated risk was checked yet: set FORECAST_AUTOTUNE_AUDIT=0.1, or tune again with "
                "FORECAST_AUTOTUNE_MODE=exhaustive"
            )
        )
    if (intervals := data["intervals"])["n"]:
        coverage = percent(intervals["covered"])
        parts.append(
            shown_text(f"{coverage} of {intervals['n']} first measurements fell inside their 90 % interval")
        )
    for record in data["language_models"]:
        parts.append(shown_text(model_record_text(record), lines=True))
    return [*parts, shown_text(f"store: {data['store']}", style="dim")]
