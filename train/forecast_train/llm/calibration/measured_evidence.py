"""What a model adds to the learned forecast once some candidates are measured: evidence for its weight then.

The process corrects both by the same measurements, those that the learned forecast calls fastest, so what is left
of the model's disagreement is what the measurements have not told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.calibration import BlendWeight
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.blend import BlendedSurrogate
from forecast_autotune.surrogates.protocol import Query
from forecast_train.llm.calibration.answer_collection import FitSurrogate, ModelAnswers, cross_fitted
from forecast_train.llm.calibration.calibrate import (
    answer_distances,
    corrections_by_family,
    model_gap,
)
from forecast_train.llm.calibration.stacking import StackingEvidence, fast_end

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

KNOWN_COUNTS = (3, 5)
"""Measurements that are known, one of each class of `question_kinds.KNOWN_BOUNDS` but the first."""
_STEP = 0.5
"""A weight at which the model's effect is taken: forecasts are nearly straight in it."""


@dataclass(frozen=True, eq=False)
class FollowedForecasts:
    """A learned forecast after some measurements, and what following a model adds to it; log2 ms, [n]."""

    learned: Array
    sd: Array
    gap: Array
    measured: Flags


def forecasts_after(
    base: AnalyticSurrogate, table: Table, moved: Array, counts: Sequence[int]
) -> list[FollowedForecasts]:
    """The forecasts after each count of measurements. `moved` [n] is the model's disagreement with `base`."""
    rows = table.by_candidate()
    names = CandidateList(rows)
    query = Query(table.problem, names, table.grids(), ttir=table.problem.ttir)
    before = base.prior(query)
    column = {names[int(i)]: float(moved[i]) for i in np.flatnonzero(moved)}
    blend = BlendedSurrogate(base, before.informed, column, BlendWeight(_STEP))
    order = base.answer(query, before).order()
    followed = blend.prior(query)
    found = []
    for count in counts:
        first = order[:count]
        known = replace(query, measured=tuple(rows[names[int(i)]] for i in first))
        alone, both = base.answer(known, before), blend.answer(known, followed)
        seen = np.zeros(len(names), dtype=bool)
        seen[first] = True
        found.append(FollowedForecasts(alone.mean, alone.sd, (both.mean - alone.mean) / _STEP, seen))
    return found


def measured_evidence(
    tables: Sequence[Table], heard: Sequence[ModelAnswers], learn: FitSurrogate
) -> list[StackingEvidence]:
    """Evidence after `KNOWN_COUNTS` measurements of every problem; families are left out as before any."""
    apart = corrections_by_family(heard)
    of = {h.problem: (h, away) for h, away in zip(heard, answer_distances(heard), strict=True)}
    found = []
    for table, base in cross_fitted(tables, learn):
        h, away = of[table.problem.id]
        moved, told = model_gap(h, apart[h.family])
        counts = [c for c in KNOWN_COUNTS if c < len(h.learned)]
        for count, f in zip(counts, forecasts_after(base, table, moved, counts), strict=True):
            left = told & ~f.measured
            found.append(
                fast_end(
                    h.log2_ms,
                    f.learned,
                    f.gap,
                    left,
                    family=h.family,
                    kind=h.kind,
                    question=h.question,
                    known=count,
                    distance=away,
                )
            )
    return [e for e in found if e is not None]
