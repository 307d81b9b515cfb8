"""Several sandbox lanes that verify variants at once: what is only checked, and not timed, may share a device."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import TypeVar

from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.sandbox.lane_pools import close_lanes

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


class VerificationLanes:
    """Lanes that are opened when they are first needed; use as a context manager."""

    def __init__(self, opener: Callable[[], SandboxLane], most: int) -> None:
        """`opener` makes a lane that is not open yet; `most`: lanes that may be open at once."""
        self._opener, self.most = opener, most
        self._free: queue.SimpleQueue[SandboxLane | BaseException] = queue.SimpleQueue()
        self._open: list[SandboxLane] = []
        self._openings: list[threading.Thread] = []
        self._begun = 0
        self._lock = threading.Lock()

    def __enter__(self) -> VerificationLanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all lanes: none can be borrowed any more."""
        for opening in self._openings:
            opening.join()
        close_lanes(self._open)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[SandboxLane]:
        """A lane that nobody else uses meanwhile. Raises `SandboxError` where none can be opened."""
        lane = self._take()
        try:
            yield lane
        finally:
            self._free.put(lane)

    def open_ahead(self, count: int) -> None:
        """Begin to open so many lanes, as far as there may be, while others still decide what to do with them."""
        with self._lock:
            for _ in range(min(count, self.most) - self._begun):
                self._begin()

    def _take(self) -> SandboxLane:
        with self._lock:
            if self._free.empty() and self._begun < self.most:
                self._begin()
        found = self._free.get()
        if isinstance(found, BaseException):
            self._free.put(found)  # whoever waits, too, would wait for ever
            raise found
        return found

    def _begin(self) -> None:
        # A server takes seconds to start, most of them without the others' processors: they start side by side.
        self._begun += 1
        self._openings.append(threading.Thread(target=self._open_one, name="open-lane"))
        self._openings[-1].start()

    def _open_one(self) -> None:
        try:
            lane = self._opener()
            lane.__enter__()
        except BaseException as error:
            self._free.put(error)
            return
        self._open.append(lane)
        self._free.put(lane)

    def run_each(
        self, items: Sequence[Item], do: Callable[[Item, SandboxLane], Found]
    ) -> Iterator[tuple[int, Found]]:
        """(number, what `do` gave) of every item, as they are done; in order where there is one lane.

        Raises what `do` raises; the others are then not begun.
        """
        if self.most == 1 or len(items) == 1:
            for number, item in enumerate(items):
                with self.borrowed() as lane:
                    found = do(item, lane)
                yield number, found
            return

        def done(number: int) -> tuple[int, Found]:
            with self.borrowed() as lane:
                return number, do(items[number], lane)

        pool = ThreadPoolExecutor(min(self.most, len(items)), "verify")
        try:
            for future in as_completed([pool.submit(done, n) for n in range(len(items))]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
