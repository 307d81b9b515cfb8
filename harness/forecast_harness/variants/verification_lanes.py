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

Item = TypeVar("Item")
Found = TypeVar("Found")
_MOST_LANES = 8
"""Of one device: each holds a context on it."""
_PROCESSORS_PER_LANE = 2
"""A lane's cells compile while its judge calculates what is right."""


def lane_count(items: int) -> int:
    """Lanes for so many things to verify on this machine's processors; at least one."""
    most = min(_MOST_LANES, len(os.sched_getaffinity(0)) // _PROCESSORS_PER_LANE)
    return max(1, min(items, most))


class VerificationLanes:
    """Lanes that are opened when they are first needed; use as a context manager."""

    def __init__(self, opener: Callable[[], SandboxLane], most: int) -> None:
        """`opener` makes a lane that is not open yet; `most`: lanes that may be open at once."""
        self._opener, self.most = opener, most
        self._free: queue.SimpleQueue[SandboxLane] = queue.SimpleQueue()
        self._open: list[SandboxLane] = []
        self._lock = threading.Lock()

    def __enter__(self) -> VerificationLanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            self._open.pop().close()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[SandboxLane]:
        """A lane that nobody else uses meanwhile. Raises `SandboxError` where none can be opened."""
        with self._lock:
            fresh = self._free.empty() and len(self._open) < self.most
            if fresh:
                lane = self._opener()
                lane.__enter__()
                self._open.append(lane)
        if not fresh:
            lane = self._free.get()
        try:
            yield lane
        finally:
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
