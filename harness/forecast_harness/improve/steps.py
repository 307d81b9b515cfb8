"""The steps of a recorded program: the period of its launches, or the calls of a function that is named."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from forecast_autotune.records.program import ProgramRecording

_SHOWN_PERIODS = 3
"""A sequence repeats itself where so many periods follow each other at the end."""
_COVERED_SHARE = 1 / 3
"""Share of all launches that steps must cover; a shorter period is a loop inside of a step."""
_WARM_SHARE = 1 / 3
"""Share of the steps that are left out at the beginning."""


@dataclass(frozen=True)
class PartTimes:
    """The launches of one name, in the steps after warm-up."""

    calls: float
    """Calls per step."""
    seconds: float
    """Seconds of one step."""
    median_s: float


@dataclass(frozen=True)
class Steps:
    """The steps after warm-up."""

    count: int
    seconds: float
    """The median of their durations, as a busy host makes some of them long."""
    how: str
    launches: dict[str, PartTimes]


def steps_of(recording: ProgramRecording) -> Steps:
    """The steps of a recording: calls of the named function, else periods of its launches, else the whole run."""
    launches = recording.launches
    if recording.steps:
        warm_steps = recording.steps[int(len(recording.steps) * _WARM_SHARE) :]
        # The device has a clock of its own: all of its launches stand for all steps.
        warm = recording.device is None or recording.device.backend == "cpu"
        count = len(warm_steps if warm else recording.steps)
        inside = tuple(x for x in launches if not warm or x[1] >= warm_steps[0][0])
        seconds = statistics.median(s for _, s in warm_steps)
        return Steps(count, seconds, "by its function", _times(recording, inside, count))
    numbers = [number for number, _, _ in launches]
    period, length = launch_period(numbers)
    count = length // period if period else 0
    if count < _SHOWN_PERIODS:
        return Steps(1, recording.seconds, "the whole run is one step", _times(recording, launches, 1))
    count -= max(1, int(count * _WARM_SHARE))
    inside = launches[len(launches) - count * period - 1 :]
    seconds = statistics.median(b[1] - a[1] for a, b in pairwise(inside[::period]))
    how = f"{period} launches that repeat" if period > 1 else "one launch that repeats"
    return Steps(count, seconds, how, _times(recording, inside[1:], count))


def launch_period(numbers: Sequence[int]) -> tuple[int, int]:
    """The shortest period of the end of a sequence, and the elements that it covers; 0, 0 where there is none."""
    n = len(numbers)
    for period in range(1, n // _SHOWN_PERIODS + 1):
        length = period
        while length < n and numbers[n - 1 - length] == numbers[n - 1 - length + period]:
            length += 1
        if length >= max(_SHOWN_PERIODS * period, n * _COVERED_SHARE):
            return period, length
    return 0, 0


def _times(
    recording: ProgramRecording, launches: Sequence[tuple[int, float, float]], steps: int
) -> dict[str, PartTimes]:
    by_name: dict[str, list[float]] = defaultdict(list)
    for number, _, seconds in launches:
        by_name[recording.names[number]].append(seconds)
    return {
        name: PartTimes(len(s) / steps, sum(s) / steps, statistics.median(s)) for name, s in by_name.items()
    }
