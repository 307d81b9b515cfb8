"""Keep the learned surrogate up to date with a store: refit, judge on kernels held out, replace or roll back.

A fixed fifth of the kernels (by a digest of their names) is never learnt from here, so that two models of
different days are judged alike. The file in use is replaced in one step; the one before stays beside it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forecast_autotune.features.traced_texts import has_facts
from forecast_autotune.file_access import open_named_output
from forecast_autotune.records import digest
from forecast_autotune.records.codec import Record
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate
from forecast_autotune.surrogates.protocol import Query
from forecast_train.splits import kernel_of
from forecast_train.surrogate.fit import FitError, FitSettings, fit_model

_HOLD_OUT_EVERY = 5
"""One kernel in so many is held out."""
_WORSE_BY = 0.02
"""A new model may be worse by this much (log2 of the mean slowdown) without being rolled back: noise."""
JUDGED_SHARE, JUDGED_LEAST = 0.10, 3
"""Judged by the best of the first `max(LEAST, SHARE)` candidates of a forecast, and by its first."""


@dataclass(frozen=True)
class ForecastScore:
    """How good a surrogate's first forecasts are on held-out problems; log2 slowdowns, 0 is perfect."""

    problems: int
    first: float
    """Mean over problems of the slowdown of the candidate that was forecast fastest."""
    tenth: float
    """Mean over problems of the slowdown of the best among the first tenth."""

    def worse_than(self, other: ForecastScore) -> bool:
        """Whether it is worse by more than noise in either figure."""
        return self.first > other.first + _WORSE_BY or self.tenth > other.tenth + _WORSE_BY


@dataclass(frozen=True)
class RefreshResult(Record):
    """Result of one refresh."""

    kept: bool
    """Whether the new model is in use."""
    reason: str
    measurements: int
    """In the store when it was fitted."""
    before: ForecastScore | None
    after: ForecastScore | None


def is_held_out(table: Table) -> bool:
    """Whether a kernel is never learnt from here."""
    return int(digest("held out", kernel_of(table.problem).lower())[:8], 16) % _HOLD_OUT_EVERY == 0


def score_surrogate(surrogate: AnalyticSurrogate, tables: Sequence[Table]) -> ForecastScore:
    """Judge first forecasts. Tables where fewer than two candidates ran say nothing and do not count."""
    first, tenth = [], []
    for table in tables:
        log2_ms = np.array(table.log2_ms())
        if np.isfinite(log2_ms).sum() < 2:
            continue
        query = Query(table.problem, list(table.by_candidate()), table.grids(), ttir=table.problem.ttir)
        order = surrogate.forecast(query).order()
        # A failure costs a full measurement: three doublings.
        slow = np.where(np.isnan(log2_ms), np.nanmax(log2_ms) + 3.0, log2_ms) - np.nanmin(log2_ms)
        first.append(slow[order[0]])
        tenth.append(slow[order[: max(JUDGED_LEAST, math.ceil(JUDGED_SHARE * len(order)))]].min())
    if not first:
        return ForecastScore(0, 0.0, 0.0)
    return ForecastScore(len(first), float(np.mean(first)), float(np.mean(tenth)))


def refresh_model(
    tables: Sequence[Table],
    path: Path,
    current: LearnedModel | None,
    *,
    seed: int = 0,
    recipe: FitSettings | None = None,
) -> RefreshResult:
    """Fit a model to what is not held out and put it at `path`, unless `current` is better on what is.

    Nothing is written when the fit fails or is worse. Without held-out problems there is nothing to judge
    by, and nothing is replaced. Raises `OSError` where `path` cannot be written.
    """
    count = sum(len(t.by_candidate()) for t in tables)
    judged = [t for t in tables if is_held_out(t) and has_facts(t.problem)]
    learnt = [t for t in tables if not is_held_out(t)]
    before = score_surrogate(AnalyticSurrogate() if current is None else LearnedSurrogate(current), judged)
    if not before.problems:
        return RefreshResult(
            False,
            "no kernel of the store that is held out has IR (or facts of it) and times: nothing to judge by",
            count,
            None,
            None,
        )
    try:
        model = fit_model(learnt, seed=seed, recipe=recipe)
    except FitError as error:
        return RefreshResult(False, str(error), count, before, None)
    after = score_surrogate(LearnedSurrogate(model), judged)
    if after.worse_than(before):
        return RefreshResult(
            False, "worse on held-out kernels than the one in use: rolled back", count, before, after
        )
    if path.is_file():
        _replace_link(path, previous_model_path(path))
    model.save(path)
    return RefreshResult(True, "at least as good on held-out kernels as the one before", count, before, after)


def previous_model_path(path: Path) -> Path:
    """Where the model that was replaced last is kept."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def roll_back(path: Path) -> None:
    """Put the model before the last refresh into use again. Raises `FitError` where there is none."""
    if not previous_model_path(path).is_file():
        raise FitError(f"there is no {previous_model_path(path)}: nothing was replaced yet")
    previous_model_path(path).replace(path)


def _replace_link(path: Path, to: Path) -> None:
    """A second name for a file, in one step, so that `path` is never missing."""
    part = to.with_name(f".{to.name}.part")
    part.unlink(missing_ok=True)
    os.link(path, part)
    part.replace(to)


@dataclass(frozen=True)
class RefreshState(Record):
    """The state between refreshes, beside the model."""

    measurements: int = 0
    """In the store at the last refresh, kept or not."""

    @classmethod
    def read(cls, path: Path) -> RefreshState:
        """Read it; a missing or broken file is a fresh start."""
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return cls()

    def write(self, path: Path) -> None:
        """Put it there, in one step."""
        with open_named_output(path) as stream:
            stream.write(f"{json.dumps(self.to_json())}\n".encode())


def is_refresh_due(tables: Sequence[Table], state: RefreshState, every: int) -> bool:
    """Whether `every` measurements or more came in since the last refresh."""
    return sum(len(t.by_candidate()) for t in tables) - state.measurements >= every
