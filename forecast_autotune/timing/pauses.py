"""Pauses before short launches: how a coarse clock is made to tell times between its ticks.

A device looks for the end of its work at intervals, an H200 every 1.2 us. Events around a kernel of 5 us
therefore say 4.8 or 6.0 us whatever is timed. Behind pauses that spread over one interval the same kernel ends
at every phase of it; the mean of the times less the pauses then moves with the kernel. As with events around
many long launches, it lies above the kernel's own time by half an interval, and by as much for all kernels.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

CLOCK_INTERVAL_S = 1.2e-6
"""Seconds between two looks of an H200 for the end of its work."""
SHORT_LAUNCH_S = 30e-6
"""Seconds below which launches are timed behind pauses: an interval is more than 4 % of them."""
_PAUSE_COUNT = 8
_CLOCK_HZ = 2e9
"""Cycles of a device's clock per second, near enough for pauses of a microsecond."""
_STRAY_FACTOR, _STRAY_S = 1.1, 1e-6
"""Times the median, and seconds (most of an interval), beyond which a launch was disturbed."""


def pause_lengths(*, between: bool = False) -> list[int]:
    """Clock cycles of every pause: steps of one eighth of an interval; `between`: those half a step longer."""
    step = CLOCK_INTERVAL_S * _CLOCK_HZ / _PAUSE_COUNT
    return [round(step * (n + (1.5 if between else 1.0))) for n in range(_PAUSE_COUNT)]


def pause_seconds(pause: int) -> float:
    """Seconds of a pause of so many clock cycles, without its own launch."""
    return pause / _CLOCK_HZ


def mean_without_strays(seconds: Sequence[float]) -> float:
    """The mean in seconds of all but those far above the median.

    Clocks tick: of times between two ticks a median, or the mean of the middle half, tells the nearer tick,
    while the mean of all tells the time.
    """
    longest = _STRAY_FACTOR * statistics.median(seconds) + _STRAY_S
    return statistics.fmean([s for s in seconds if s <= longest])
