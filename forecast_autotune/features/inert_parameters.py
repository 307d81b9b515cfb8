"""Meta-parameters that change nothing of what one program does: the order of programs (`GROUP_M`), say.

In a large space few candidates can be traced, and the facts of all others are interpolated. A parameter that
makes no difference between texts that differ in it alone is taken to make none anywhere, so that a few traces
stand for the whole space.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from forecast_autotune.features.candidate_list import (
    LAUNCH_OPTIONS,
    CandidateList,
    Codes,
    Column,
    group_rows,
)
from forecast_autotune.features.ttir.facts import TtirFacts

MIN_PAIRS = 3
"""Pairs that differ in nothing else and have the same facts, before a parameter counts as mute."""


def trace_parameters(listed: CandidateList) -> dict[str, Column]:
    """What may change the TTIR, by name: all but warps and stages, as far as it differs."""
    return {n: c for n, c in listed.columns.items() if n not in LAUNCH_OPTIONS[:2] and len(c.values) > 1}


def find_inert(columns: Mapping[str, Column], rows: Codes, facts: Sequence[TtirFacts]) -> tuple[str, ...]:
    """The columns that made no difference: `facts` are those of the candidates in `rows`.

    How many operations a text has may differ, as `x // 1` has none. A variant is never mute.
    """
    kinds = Column.of([replace(one, ops=0) for one in facts]).codes
    found = []
    for name in columns:
        if name == "variant":
            continue
        first, group = group_rows(_select_rows(columns, rows, without={name}), len(rows))
        # One of each group's facts; a pair is whatever else is in the group.
        if np.array_equal(kinds[first][group], kinds) and len(rows) - len(first) >= MIN_PAIRS:
            found.append(name)
    return tuple(found)


def equivalence_classes(columns: Mapping[str, Column], rows: Codes, mute: Sequence[str]) -> Codes:
    """Which of these rows have the same facts, [rows]."""
    return group_rows(_select_rows(columns, rows, without=set(mute)), len(rows))[1]


def _select_rows(columns: Mapping[str, Column], rows: Codes, without: set[str]) -> list[Column]:
    return [Column(c.values, c.codes[rows]) for name, c in columns.items() if name not in without]
