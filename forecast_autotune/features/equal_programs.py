"""Candidates that compile to one and the same program, as their IR tells before anything is compiled.

Triton's stages are those of a pipeline: of loads in a loop, ahead of the dots that use them, and of stores through
descriptors. Where no loop holds either, their number changes nothing (a loop that asks for stages itself has its own).
Lists cross it with all else all the same: of 2,079 configs of public libraries, one in six repeats another's binary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList, Codes, Column, group_rows
from forecast_autotune.features.ttir.facts import TtirFacts

_STAGES = "num_stages"


def program_numbers(listed: CandidateList, facts: Callable[[int], TtirFacts | None]) -> Codes:
    """Numbers [n] that two candidates share only if an NVIDIA device runs the same program for both.

    `facts` gives those of a row's IR, for one row of each assignment; None where there is none, and then stages count.
    """
    column = listed.columns[_STAGES]
    if len(column.values) < 2:
        return np.arange(len(listed))
    names, keys = listed.assignments
    first = np.unique(keys, return_index=True)[1].tolist()
    inert = np.array([known is not None and not known.staged_loops for known in map(facts, first)])
    stages = Column(("any", *column.values), np.where(inert[keys], 0, column.codes + 1))
    others = [other for name, other in listed.columns.items() if name != _STAGES]
    return group_rows([*others, Column(names, keys), stages], len(listed))[1]
