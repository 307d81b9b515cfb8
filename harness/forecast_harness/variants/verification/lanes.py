"""Variants verified in several sandbox lanes at once: what is only checked, and not timed, may share a device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.sandbox.lane_pools import LanePool

Item = TypeVar("Item")
Found = TypeVar("Found")
_MOST_LANES = 8
"""Of one device: its driver makes one context after the other, and a verification needs two; sixteen lanes took as
long."""
_PROCESSORS_PER_LANE = 1
"""A lane's cells wait for the device and for the judge as often as they compile."""


def lane_count() -> int:
    """Lanes at most on this machine's processors; at least one."""
    return max(1, min(_MOST_LANES, len(os.sched_getaffinity(0)) // _PROCESSORS_PER_LANE))


def run_each(
    lanes: LanePool, items: Sequence[Item], do: Callable[[Item, SandboxLane], Found]
) -> Iterator[tuple[int, Found]]:
    """(number, what `do` gave) of every item, as they are done; in order where there is one lane.

    Raises what `do` raises; the others are then not begun.
    """
    if lanes.most == 1 or len(items) == 1:
        for number, item in enumerate(items):
            with lanes.borrowed() as lane:
                found = do(item, lane)
            yield number, found
        return

    def done(number: int) -> tuple[int, Found]:
        with lanes.borrowed() as lane:
            return number, do(items[number], lane)

    pool = ThreadPoolExecutor(min(lanes.most, len(items)), "verify")
    try:
        for future in as_completed([pool.submit(done, n) for n in range(len(items))]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
