"""Whether times that were taken in turns tell the fastest from the others already."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

_CLEAR_ERRORS = 2.0
"""Standard errors by which a finalist has to be behind the fastest, or ahead of it, to be told from it."""
_SAME = 0.004
"""Share of the fastest's time below which a difference does not matter: a fraction of what do_bench moves by."""


def is_separated(times: Sequence[Sequence[float]]) -> bool:
    """Whether the median of one is below those of all others, as far as that matters.

    The standard error of a median is 1.25 sd / sqrt(n), with the sd of the middle 80 %, which strays do not reach, at
    2.56 sd of a normal distribution.
    """
    medians = [statistics.median(t) for t in times]
    errors = [_error_of_median(t) for t in times]
    fastest = medians.index(min(medians))
    for other, (median, error) in enumerate(zip(medians, errors, strict=True)):
        both = math.hypot(error, errors[fastest])
        is_clear = median - medians[fastest] > _CLEAR_ERRORS * both
        if other != fastest and not is_clear and _CLEAR_ERRORS * both > _SAME * medians[fastest]:
            return False
    return True


def _error_of_median(times: Sequence[float]) -> float:
    if len(times) < 2:
        return math.inf
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return 1.25 * (tenths[-1] - tenths[0]) / 2.56 / math.sqrt(len(times))
