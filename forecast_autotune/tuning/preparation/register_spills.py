"""Which candidates must spill registers, as another of their task that has more warps does."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList, group_rows
from forecast_autotune.records import Measurement
from forecast_autotune.surrogates.protocol import Array

SPILLED = 16
"""Registers that a thread spills from which on fewer warps are expected to lose: a program's tiles are shared out among
its threads, so that with half of the warps each has twice as much to hold. No such config of recorded kernels was
within 2 % of the best of its list (`benchmarks/forecasting/register_spills.py`)."""
_SLOWDOWN = 3.0
"""log2 of run time: in the median those configs took eight times as long as the best."""


def spill_slowdowns(
    candidates: CandidateList, measurements: Iterable[Measurement], least: int = SPILLED
) -> Array:
    """log2 by which each candidate should run slower than forecast, as a measured one with more warps spills: [n].

    The two agree in all else but the number of stages. `measurements` say what spilled in `extra["spills"]`, in
    registers of a thread; it counts from `least` on.
    """
    found = np.zeros(len(candidates))
    ran = [m for m in measurements if m.ok and m.candidate in candidates.row_of]
    spilled = [candidates.row_of[m.candidate] for m in ran if _spills(m) >= least]
    if not spilled:
        return found
    columns = candidates.columns
    alike = [c for name, c in columns.items() if name not in ("num_warps", "num_stages")]
    group = group_rows(alike, len(candidates))[1]
    warps = np.array([c.config.num_warps for c in candidates])
    for row in spilled:
        found[(group == group[row]) & (warps < warps[row])] = _SLOWDOWN
    return found


def _spills(m: Measurement) -> int:
    told = m.extra.get("spills")
    return told if isinstance(told, int) else 0
