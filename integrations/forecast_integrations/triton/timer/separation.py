"""Which of several may be the fastest, by times that were taken in turns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_CLEAR_ERRORS = 2.0
"""Standard errors by which one has to be behind the fastest to be told from it."""
_SAME = 0.004
"""Share of the fastest's time below which a difference does not matter: a fraction of what do_bench moves by."""


def contenders(times: Sequence[Sequence[float]]) -> list[int]:
    """Which of them more times may yet show to be the fastest: indices, the fastest's among them.

    None where that is settled: all others are behind, or as fast as far as it matters. The standard error of a
    median is 1.25 sd / sqrt(n), with the sd of the middle 80 %, which strays do not reach, at 2.56 sd of a normal
    distribution.
    """
    medians = [statistics.median(t) for t in times]
    errors = [_error_of_median(t) for t in times]
    fastest = medians.index(min(medians))
    open_ones = [
        i
        for i, (median, error) in enumerate(zip(medians, errors, strict=True))
        if i != fastest
        and median - medians[fastest] <= (unsure := _CLEAR_ERRORS * math.hypot(error, errors[fastest]))
        and unsure > _SAME * medians[fastest]
    ]
    return sorted([fastest, *open_ones]) if open_ones else []


def _error_of_median(times: Sequence[float]) -> float:
    if len(times) < 2:
        return math.inf
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return 1.25 * (tenths[-1] - tenths[0]) / 2.56 / math.sqrt(len(times))
