"""Times of launches that are over when they return, by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

HOST_CLOCK = "host-clock-1"
"""The protocol of these times."""
_LEAST, _MOST = 3, 100


def timed_launches(launch: Callable[[], object], seconds: float = 0.05) -> list[float]:
    """Milliseconds of launches, for so many seconds: 3 at least, 100 at most.

    Only for launches that wait for their end. Those of a device need its own events.
    """
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() < end):
        begin = time.perf_counter_ns()
        launch()
        times.append(max(time.perf_counter_ns() - begin, 1) / 1e6)
    return times
