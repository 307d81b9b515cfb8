"""Inert parameters: they do not change the work of one program, as the order of programs (`GROUP_M`).

In a large space few candidates can be traced, and the facts of all others are interpolated. A meta-parameter that
makes no difference between texts that differ in it alone is taken to make none anywhere, so that a few traces
stand for the whole space.

Triton's stages are those of a pipeline: of loads in a loop, ahead of the dots that use them, and of stores through
descriptors. Where no loop holds either, their number changes nothing (a loop that asks for stages itself has its own).
Lists cross it with all else all the same: of 2,079 configs of public libraries, one in six repeats another's binary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from forecast_autotune.features.candidate_list import (
    OPTIONS_OF_NO_TTIR,
    CandidateList,
    Codes,
    Column,
    group_rows,
)
from forecast_autotune.features.devices import DeviceSpec
from forecast_autotune.features.ttir.facts import TtirFacts

MIN_PAIRS = 3
"""Pairs that differ in nothing else and have the same facts, before a parameter counts as inert."""


def trace_parameters(candidates: CandidateList) -> dict[str, Column]:
    """The parameters that may change the TTIR, by name: all with several values, except warps and stages."""
    return {n: c for n, c in candidates.columns.items() if n not in OPTIONS_OF_NO_TTIR and len(c.values) > 1}


def find_inert(columns: Mapping[str, Column], rows: Codes, facts: Sequence[TtirFacts]) -> tuple[str, ...]:
    """The columns that make no difference to `facts`, which are those of the candidates in `rows`.

    The number of a text's operations may differ, as `x // 1` has none. A variant is never inert.
    """
    kinds = Column.of([replace(f, ops=0) for f in facts]).codes
    results = []
    for name in columns:
        if name == "variant":
            continue
        first, group = group_rows(_select_rows(columns, rows, without={name}), len(rows))
        # Each row of a group forms a pair with the group's first row.
        if np.array_equal(kinds[first][group], kinds) and len(rows) - len(first) >= MIN_PAIRS:
            results.append(name)
    return tuple(results)


def equivalence_classes(columns: Mapping[str, Column], rows: Codes, inert: Sequence[str]) -> Codes:
    """Class numbers of these rows, equal where their facts are, [rows]."""
    return group_rows(_select_rows(columns, rows, without=set(inert)), len(rows))[1]


def _select_rows(columns: Mapping[str, Column], rows: Codes, without: set[str]) -> list[Column]:
    return [Column(c.values, c.codes[rows]) for name, c in columns.items() if name not in without]


_STAGES = "num_stages"
_MATRIX_OPTIONS = ("matrix_instr_nonkdim", "kpack", "schedule_hint")
"""Options of AMD's compiler for matrix products: without a product they change nothing."""


def _ignores(option: str, facts: TtirFacts | None, device: DeviceSpec | None) -> bool:
    """Whether a program with these facts is the same for all values of a launch option."""
    if option == _STAGES:
        plain = device is not None and not (device.tensor_memory_bytes or device.copies_ahead)
        narrow = plain and device is not None and (device.backend == "cuda" or device.warp_size == 64)
        return facts is not None and _ignores_stages(facts, narrow)
    if device is None or device.backend != "hip":
        return False
    # RDNA has one shape of products; `kpack` is overwritten from CDNA4 on.
    is_fixed = option != "schedule_hint" and (
        device.warp_size == 32 or (option == "kpack" and device.copies_ahead)
    )
    return is_fixed or (facts is not None and not facts.dot_ops)


def _ignores_stages(facts: TtirFacts, narrow: bool) -> bool:
    """Whether stages change nothing; `narrow`: whether the compiler pipelines no loads of less than 4 bytes."""
    loose = facts.narrow_bytes == facts.direct_bytes > 0 and not facts.indirect_bytes + facts.streamed_bytes
    return not facts.staged_loops or (narrow and facts.staged_loops == 1 and loose)


def program_numbers(
    candidates: CandidateList, facts: Callable[[int], TtirFacts | None], device: DeviceSpec | None = None
) -> Codes:
    """Numbers [n] that two candidates share only if an NVIDIA or AMD device runs the same program for both.

    `facts` returns those of a row's IR; called for one row per assignment. None without IR: then stages count.
    On a `device` whose compiler pipelines no loads of less than 4 bytes, loops with such loads alone ignore stages.
    """
    columns = dict(candidates.columns)
    options = [n for n in (_STAGES, *_MATRIX_OPTIONS) if n in columns and len(columns[n].values) > 1]
    if not options:
        return np.arange(len(candidates))
    names, keys = candidates.assignments
    by_assignment = [facts(row) for row in np.unique(keys, return_index=True)[1].tolist()]
    for name in options:
        inert = np.array([_ignores(name, f, device) for f in by_assignment])
        column = columns[name]
        columns[name] = Column(("any", *column.values), np.where(inert[keys], 0, column.codes + 1))
    return group_rows([*columns.values(), Column(names, keys)], len(candidates))[1]
