"""Variants verified in several sandbox lanes at once: what is only checked, and not timed, may share a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Generic, TypeVar

from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.sandbox.lane_pools import LanePool, end_pools, lane_count

Item = TypeVar("Item")
Found = TypeVar("Found")
_MOST_LANES = 8
"""Of one device: its driver makes one context after the other, and a verification needs one; sixteen lanes took as
long where it needed two."""
_PROCESSORS_PER_LANE = 1
"""A lane's cells wait for the device and for the judge as often as they compile."""


def verification_lanes() -> int:
    """Lanes at most on this machine; at least one."""
    return lane_count(_MOST_LANES, _PROCESSORS_PER_LANE)


class LaneJobs(Generic[Item, Found]):
    """Things done side by side in the lanes of a pool; more may be added while others are done."""

    def __init__(self, lanes: LanePool, do: Callable[[Item, SandboxLane], Found]) -> None:
        self._lanes, self._do = lanes, do
        self._pool = ThreadPoolExecutor(lanes.most, "verify")
        self._under_way: list[Future[tuple[Item, Found]]] = []

    def add(self, items: Iterable[Item]) -> None:
        """Have these done, too, after those that were added before."""
        self._under_way += [self._pool.submit(self._done, item) for item in items]

    def results(self) -> Iterator[tuple[Item, Found]]:
        """(item, what `do` gave) of all that were added since the last time, as they are done.

        Raises what `do` raises.
        """
        futures, self._under_way = self._under_way, []
        for future in as_completed(futures):
            yield future.result()

    def close(self) -> None:
        """Begin nothing more, and end what is under way."""
        end_pools([self._pool], self._lanes.give_up)

    def _done(self, item: Item) -> tuple[Item, Found]:
        with self._lanes.borrowed() as lane:
            return item, self._do(item, lane)
