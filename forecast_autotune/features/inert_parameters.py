"""Parameters that change nothing of what one program does: the order of programs (`GROUP_M`), say.

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
"""Pairs that differ in nothing else and have the same facts, before a parameter counts as mute."""


def trace_parameters(listed: CandidateList) -> dict[str, Column]:
    """The parameters that may change the TTIR, by name: all but warps and stages, as far as it differs."""
    return {n: c for n, c in listed.columns.items() if n not in OPTIONS_OF_NO_TTIR and len(c.values) > 1}


def find_inert(columns: Mapping[str, Column], rows: Codes, facts: Sequence[TtirFacts]) -> tuple[str, ...]:
    """The columns that made no difference: `facts` are those of the candidates in `rows`.

    How many operations a text has may differ, as `x // 1` has none. A variant is never mute.
    """
    kinds = Column.of([replace(one, ops=0) for one in facts]).codes
    results = []
    for name in columns:
        if name == "variant":
            continue
        first, group = group_rows(_select_rows(columns, rows, without={name}), len(rows))
        # One of each group's facts; a pair is whatever else is in the group.
        if np.array_equal(kinds[first][group], kinds) and len(rows) - len(first) >= MIN_PAIRS:
            results.append(name)
    return tuple(results)


def equivalence_classes(columns: Mapping[str, Column], rows: Codes, mute: Sequence[str]) -> Codes:
    """Which of these rows have the same facts, [rows]."""
    return group_rows(_select_rows(columns, rows, without=set(mute)), len(rows))[1]


def _select_rows(columns: Mapping[str, Column], rows: Codes, without: set[str]) -> list[Column]:
    return [Column(c.values, c.codes[rows]) for name, c in columns.items() if name not in without]


_STAGES = "num_stages"
_MATRIX_OPTIONS = ("matrix_instr_nonkdim", "kpack", "schedule_hint")
"""Options of AMD's compiler about products: without a product they change nothing."""


def _ignores(option: str, known: TtirFacts | None, device: DeviceSpec | None) -> bool:
    """Whether a program of these facts is the same for all values of a launch option."""
    if option == _STAGES:
        plain = device is not None and not (device.tensor_memory_bytes or device.copies_ahead)
        narrow = plain and device is not None and (device.backend == "cuda" or device.warp_size == 64)
        return known is not None and _ignores_stages(known, narrow)
    if device is None or device.backend != "hip":
        return False
    # RDNA has one shape of products; `kpack` is overwritten from CDNA4 on.
    fixed = option != "schedule_hint" and (
        device.warp_size == 32 or (option == "kpack" and device.copies_ahead)
    )
    return fixed or (known is not None and not known.dot_ops)


def _ignores_stages(known: TtirFacts, narrow: bool) -> bool:
    """Whether stages change nothing; `narrow`: as loads of less than 4 bytes are not pipelined."""
    loose = known.narrow_bytes == known.direct_bytes > 0 and not known.indirect_bytes + known.streamed_bytes
    return not known.staged_loops or (narrow and known.staged_loops == 1 and loose)


def program_numbers(
    listed: CandidateList, facts: Callable[[int], TtirFacts | None], device: DeviceSpec | None = None
) -> Codes:
    """Numbers [n] that two candidates share only if an NVIDIA or AMD device runs the same program for both.

    `facts` gives those of a row's IR, for one row of each assignment; None where there is none, and then stages count.
    On a `device` whose compiler pipelines no loads of less than 4 bytes, loops of such alone are as if without dots.
    """
    columns = dict(listed.columns)
    options = [n for n in (_STAGES, *_MATRIX_OPTIONS) if n in columns and len(columns[n].values) > 1]
    if not options:
        return np.arange(len(listed))
    names, keys = listed.assignments
    known = [facts(row) for row in np.unique(keys, return_index=True)[1].tolist()]
    for name in options:
        inert = np.array([_ignores(name, one, device) for one in known])
        column = columns[name]
        columns[name] = Column(("any", *column.values), np.where(inert[keys], 0, column.codes + 1))
    return group_rows([*columns.values(), Column(names, keys)], len(listed))[1]
