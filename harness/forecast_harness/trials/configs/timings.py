"""What a search's lane has timed itself: evidence for forecasts of sources that it has not timed yet."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from forecast_autotune.records import Candidate, Measurement, Outcome

MAX_TIMINGS = 256
"""Timings that are kept, the latest: the work of a forecast grows with the cube of their number."""
Timing: TypeAlias = Sequence[float] | Outcome
"""Seconds of one launch by number of the call (NaN where it was not timed), or what it failed with."""
K = TypeVar("K", bound=Hashable)


def add_timings(memory: dict[K, Timing], timings: Mapping[K, Timing], calls: int) -> None:
    """Add timings to a memory, and forget the oldest. What is timed again replaces what was known.

    Left out is what teaches nothing: not one entry for each of `calls`, no positive time, a failure of the harness.
    """
    for key, timing in timings.items():
        if isinstance(timing, Outcome):
            sound = timing.is_label and timing is not Outcome.OK
        else:
            known = [s for s in timing if not math.isnan(s)]
            sound = len(timing) == calls and bool(known) and all(0 < s < math.inf for s in known)
        if sound:
            memory.pop(key, None)
            memory[key] = timing
    while len(memory) > MAX_TIMINGS:
        del memory[next(iter(memory))]


def is_known_at(timing: Timing, call: int) -> bool:
    """Whether a timing says something of a call."""
    return isinstance(timing, Outcome) or not math.isnan(timing[call])


def to_measurement(problem: str, candidate: Candidate, timing: Timing, call: int) -> Measurement:
    """A timing as surrogates read it: at one call, in milliseconds."""
    if isinstance(timing, Outcome):
        return Measurement(problem, candidate, timing)
    return Measurement(problem, candidate, Outcome.OK, 1e3 * timing[call])
