"""`show --calibration` on language models: what each did in the store's decisions, and how good its forecasts were."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from forecast_autotune.llm.bins import BINS
from forecast_autotune.printable import count_text
from forecast_autotune.records import Decision, Measurement
from forecast_autotune.records.table import Table
from forecast_autotune.report.summary import ModelTally

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
        for model, found in _errors(table.measurements).items():
            errors[model] += found
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
    """By model, |error| of its forecasts and of those it was added to, log2, of one problem."""
    told: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for m in rows:
        if m.ok and (found := _noted(m)) is not None:
            told[found[0]].append(found[1])
    return {
        model: [tuple(row) for row in np.abs(np.array(gaps) - np.median(gaps, axis=0)).tolist()]
        for model, gaps in told.items()
        if len(gaps) > 1  # of one, the level is all there is
    }


def _noted(m: Measurement) -> tuple[str, tuple[float, float]] | None:
    """The model and (its, the learned) forecast over the measurement, log2; None where nothing usable is noted."""
    forecast = m.extra.get("forecast")
    note = forecast.get("llm") if isinstance(forecast, Mapping) else None
    if not isinstance(forecast, Mapping) or not isinstance(note, Mapping):
        return None
    try:
        stated = np.array([note["stated"]], dtype=float)
        values = float(note["reference_log2_ms"]), float(forecast["learned_log2_ms"])
        model = str(note["model"])
    except (KeyError, TypeError, ValueError):
        return None  # a table from elsewhere may carry anything under these names
    usable = (
        stated.shape == (1, len(BINS.labels)) and np.isfinite(stated).all() and abs(stated.sum() - 1.0) < 0.01
    )
    if not usable or not all(abs(v) < _LARGEST_LOG2 for v in values):
        return None
    reference, learned = values
    truth = math.log2(m.ms)
    return model, (reference + float(BINS.moments(stated)[0][0]) - truth, learned - truth)
