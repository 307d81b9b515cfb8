"""Calibrate anew from what a user's own store has noted: no model is asked, and no table need be complete.

With every measurement the tuner keeps what a language model had said of the candidate. These answers belong
to candidates that were worth measuring, so they correct what the model says (temperature, means) and how far it is
followed; its savings can only be replayed on complete tables and are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.records import Measurement
from forecast_autotune.records.table import Table
from forecast_train.llm.calibration.answers import ModelAnswers
from forecast_train.llm.calibration.fit import fit_calibration
from forecast_train.splits import family_of, kernel_of

Array = npt.NDArray[np.float64]

_FEWEST_CANDIDATES = 3
"""Noted candidates that a problem needs to teach anything."""


def stored_answers(tables: Sequence[Table], model: str) -> list[ModelAnswers]:
    """This model's answers about the measured candidates of tables, as `export` writes them."""
    return [a for table in tables if (a := _answers_of_table(table, model)) is not None]


def recalibrate(answers: Sequence[ModelAnswers], old: LLMCalibration) -> LLMCalibration:
    """The calibration fitted to noted answers; scope, pace and saving are those of the old one.

    Raises `SplitError` for fewer than three families of kernels.
    """
    fresh = fit_calibration(answers, {"noted": sum(len(a.rows) for a in answers)})
    return replace(fresh, scope=old.scope, pace=old.pace, saved=old.saved if fresh.skilled else 0.0)


def _answers_of_table(table: Table, model: str) -> ModelAnswers | None:
    rows = list(table.by_candidate().values())
    noted = [(m, note) for m in rows if (note := _note_of(m, model)) is not None]
    if len(noted) < _FEWEST_CANDIDATES:
        return None
    first = noted[0][1]["llm"]
    times = {m.candidate.id: math.log2(m.ms) for m in rows if m.ok}
    log2_ms = np.array([times.get(m.candidate.id, math.nan) for m, _ in noted])
    stated = np.array([n["llm"]["stated"] for _, n in noted])
    stated = stated / stated.sum(axis=1, keepdims=True)  # they were rounded
    problem = table.problem
    return ModelAnswers(
        problem=problem.id,
        label=str(problem.extra.get("label") or f"{problem.kernel.name}/{problem.id}"),
        kernel=kernel_of(problem),
        family=family_of(problem),
        device=problem.device.slug,
        language=problem.kernel.language,
        learned=np.array([n["learned_log2_ms"] for _, n in noted]),
        log2_ms=log2_ms,
        rows=np.arange(len(noted), dtype=np.intp),
        stated=stated,
        mass=np.ones(len(noted)),
        ratios=log2_ms - _reference_level(log2_ms, stated, times.get(first["reference"])),
        reference=str(first["reference"]),
        reference_log2_ms=float(first["reference_log2_ms"]),
        model=model,
        prompt=str(first["prompt"]),
        characters=0,
        tokens=0,
        seconds=0.0,
        candidates=tuple(m.candidate.id for m, _ in noted),
    )


def _note_of(m: Measurement, model: str) -> Mapping[str, Any] | None:
    """The note on a candidate, if it is whole: stores are edited and merged by people."""
    note = m.extra.get("forecast")
    answer = note.get("llm") if isinstance(note, Mapping) else None
    if not isinstance(note, Mapping) or not isinstance(answer, Mapping) or answer.get("model") != model:
        return None
    numbers, stated = [note.get("learned_log2_ms"), answer.get("reference_log2_ms")], answer.get("stated")
    if not isinstance(stated, list) or len(stated) != len(BINS) + 1:
        return None
    fine = all(isinstance(x, int | float) and math.isfinite(x) for x in (*numbers, *stated))
    named = isinstance(answer.get("reference"), str) and "prompt" in answer
    return note if fine and named and min(stated) >= 0 and sum(stated) > 0.5 else None


def _reference_level(log2_ms: Array, stated: Array, reference: float | None) -> float:
    """log2 milliseconds of what ratios are against: the reference's, if it was measured.

    Else the level under which the stated means are right on the whole: the shown estimate may be far off, and
    that would shift all ratios alike.
    """
    if reference is not None:
        return reference
    gap = log2_ms - BINS.moments(stated)[0]
    return float(np.median(gap[np.isfinite(gap)])) if np.isfinite(gap).any() else 0.0
