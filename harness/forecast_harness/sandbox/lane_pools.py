"""Several lanes, used by threads: opened when they are first needed, lent to one at a time, ended together."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

from forecast_autotune.processors import usable_processors
from forecast_harness.sandbox.api import ResourceLimits, SandboxJob
from forecast_harness.sandbox.jobs import JobResult, Resource, SandboxError
from forecast_harness.sandbox.lane import SandboxLane

_GIVE_UP_AGAIN_S = 0.2


class Closable(Protocol):
    """A lane or an owner of lanes, which has to be closed."""

    def close(self) -> None:
        """End all processes."""


C = TypeVar("C", bound=Closable)


def lane_count(most: int, processors_each: int) -> int:
    """Lanes, `most` at most, on this machine's processors, so many for each; at least one."""
    return max(1, min(most, usable_processors() // processors_each))


def end_pools(pools: Sequence[Executor], give_up: Callable[[], None]) -> None:
    """Cancel waiting jobs, and wait for running ones, which `give_up` ends."""
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)

    def wait() -> None:
        for pool in pools:
            pool.shutdown()

    ending = threading.Thread(target=wait)
    ending.start()
    while ending.is_alive():  # again, as the first call misses a lane that is about to begin a job
        give_up()
        ending.join(_GIVE_UP_AGAIN_S)


def close_lanes(lanes: list[C]) -> None:
    """Close all side by side, as each takes a second or two to end; the list is empty then."""
    if lanes:
        with ThreadPoolExecutor(len(lanes), "close-lane") as pool:
            list(pool.map(lambda lane: lane.close(), lanes))
        lanes.clear()


class OpeningLanes:
    """Lanes that threads are opening, which fail soon once they are given up."""

    def __init__(self) -> None:
        self._lanes: list[SandboxLane] = []
        self._given_up = False

    def enter(self, lane: SandboxLane) -> None:
        """Open a lane. Raises `SandboxError` also where it is given up."""
        self._lanes.append(lane)
        try:
            if self._given_up:
                raise SandboxError("nobody waits for this lane any more")
            lane.__enter__()
        finally:
            self._lanes.remove(lane)

    def give_up(self) -> None:
        """Have all lanes that are being opened, now or later, fail soon."""
        self._given_up = True
        lanes = tuple(self._lanes)
        for lane in lanes:
            lane.give_up_opening(len(lanes))


class LanePool(Resource):
    """Lanes that are opened when they are first needed; use as a context manager, or `close` it."""

    def __init__(self, opener: Callable[[], SandboxLane], most: int) -> None:
        """`opener` makes a lane that is not open yet; `most`: lanes that may be open at once."""
        self._opener, self.most = opener, most
        self._free: queue.SimpleQueue[SandboxLane | BaseException] = queue.SimpleQueue()
        self._open: list[SandboxLane] = []
        self._opening = OpeningLanes()
        self._openings: list[threading.Thread] = []
        self._count = 0
        self._lock = threading.Lock()
        self._began = 0.0
        self.opened_s: list[float] = []
        """Seconds from the request for the first lane until each was open, in order."""

    def close(self) -> None:
        """End all lanes, those that still open as well: none can be borrowed any more."""
        self._opening.give_up()
        for thread in self._openings:
            thread.join()
        close_lanes(self._open)

    def give_up(self) -> None:
        """End the jobs that are under way now."""
        for lane in tuple(self._open):
            lane.give_up()

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[SandboxLane]:
        """A lane that nobody else uses meanwhile. Raises `SandboxError` where none can be opened."""
        lane = self._take()
        try:
            yield lane
        finally:
            self._free.put(lane)

    def open_ahead(self, count: int) -> None:
        """Begin to open so many lanes, within the limit, before jobs for them are known."""
        with self._lock:
            for _ in range(min(count, self.most) - self._count):
                self._begin()

    def _take(self) -> SandboxLane:
        with self._lock:
            if self._free.empty() and self._count < self.most:
                self._begin()
        result = self._free.get()
        if isinstance(result, BaseException):
            self._free.put(result)  # other waiting threads would wait for ever
            raise result
        return result

    def _begin(self) -> None:
        if not self._count:
            self._began = time.monotonic()
        self._count += 1
        opening = threading.Thread(target=self._open_lane, name="open-lane")
        self._openings.append(opening)
        opening.start()

    def _open_lane(self) -> None:
        try:
            lane = self._opener()
            self._opening.enter(lane)
        except BaseException as error:
            self._free.put(error)
        else:
            self._open.append(lane)
            self.opened_s.append(time.monotonic() - self._began)
            self._free.put(lane)


# --- lanes without a device, for short jobs ---


_MOST_LANES = 8
_PROCESSORS_PER_LANE = 2
"""Others compile and verify at the same time."""


class CpuLanes:
    """Lanes without a device. Any thread may ask."""

    def __init__(
        self,
        folder: Path | None,
        limits: ResourceLimits,
        count: int = 0,
        *,
        warm: Sequence[str] = ("torch", "triton"),
    ) -> None:
        """`folder` is for scratch files; `count`: lanes at most, 0 for what suits the machine; `warm`: see
        `SandboxLane`."""
        most = count or lane_count(_MOST_LANES, _PROCESSORS_PER_LANE)
        self._limits, self._closed = limits, False
        self._pool = ThreadPoolExecutor(most, "cpu-lanes")
        self._lanes = LanePool(
            lambda: SandboxLane(scratch=folder, environment={"TRITON_INTERPRET": "0"}, warm=warm), most
        )

    def open_ahead(self) -> None:
        """Begin to open the first lane, so that the first job waits less."""
        self._lanes.open_ahead(1)

    def run(self, jobs: Sequence[SandboxJob]) -> list[JobResult]:
        """Results of the jobs, in their order. Raises `SandboxError` where no lane can be opened, and after `close`."""
        try:
            return list(self._pool.map(self._run, jobs))
        except (CancelledError, RuntimeError) as error:
            if not self._closed:
                raise
            raise SandboxError("the lanes are closed") from error

    def close(self) -> None:
        """End all lanes, and their jobs."""
        self._closed = True
        end_pools([self._pool], self._lanes.give_up)
        self._lanes.close()

    def _run(self, job: SandboxJob) -> JobResult:
        with self._lanes.borrowed() as lane:
            if self._closed:
                raise SandboxError("the lanes are closed")
            return lane.run(job, self._limits)
