"""Launches recorded as graphs of the driver's, and events around them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

from forecast_autotune.timing import GraphRecorder, RecordedGraph, pause_lengths
from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernels import RunnerKernels

_PAUSE_ROUNDS = 8


class RunnerEvent:
    """A mark in the runner's stream."""

    def __init__(self, driver: CudaDriver, handle: ctypes.c_void_p) -> None:
        self._driver, self._handle = driver, handle
        driver.record(handle)

    def elapsed_time(self, end_event: RunnerEvent, /) -> float:
        """Milliseconds to a later event, once both have passed."""
        return self._driver.elapsed_ms(self._handle, end_event._handle)


class DriverEvents:
    """Gives events; all are taken back together, to be given again. They are freed with the process."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._given: list[ctypes.c_void_p] = []
        self._free: list[ctypes.c_void_p] = []

    def mark(self) -> RunnerEvent:
        """An event behind all work queued so far."""
        self._given.append(self._free.pop() if self._free else self._driver.event())
        return RunnerEvent(self._driver, self._given[-1])

    def take_back(self) -> None:
        """Nobody asks the events any more that were given."""
        self._free += self._given
        self._given.clear()


class RunnerGraph:
    """A `RecordedGraph` of the core's timing."""

    def __init__(self, driver: CudaDriver) -> None:
        """Hold what was queued since the driver has begun to capture."""
        self._driver, self._handle = driver, driver.end_capture()

    def replay(self) -> None:
        """Queue it once more."""
        self._driver.launch_graph(self._handle)

    def free(self) -> None:
        """Give the graph back: it is replayed no more."""
        self._driver.destroy_graph(self._handle)


class LaunchRecorder(GraphRecorder):
    """Records launches behind pauses of all lengths, on the runner's one stream; nothing is allocated meanwhile."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._pause = driver, kernels.pause
        self._graphs: list[RunnerGraph] = []
        self._pause_cost: float | None = None
        self.nothing()  # loaded now: nothing may be loaded while a graph is recorded

    def record(self, call: Callable[[], Any], pause: int = 0, pool: Any = None) -> tuple[RecordedGraph, Any]:
        """See `GraphRecorder`."""
        self._driver.begin_capture()
        try:
            if pause:
                self._pause(pause)
            result = call()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._driver.end_capture()
            raise
        self._graphs.append(RunnerGraph(self._driver))
        return self._graphs[-1], result

    def replays(self, launch: Callable[[], None]) -> list[tuple[Callable[[], None], int]]:
        """(what queues a launch behind a pause, that pause in cycles), for every pause."""
        return [(self.record(launch, pause)[0].replay, pause) for pause in pause_lengths()]

    def forget(self) -> None:
        """Free all that was recorded."""
        while self._graphs:
            self._graphs.pop().free()

    def cost_of_pauses(self, flush: Callable[[], None]) -> float:
        """Seconds that a pause takes beyond its length, see `pause_cost`; `flush` comes before every replay."""
        if self._pause_cost is None:
            events = DriverEvents(self._driver)

            def replay(graph: RecordedGraph) -> tuple[Any, Any]:
                flush()
                start = events.mark()
                graph.replay()
                return start, events.mark()

            self._pause_cost = self.pause_cost(replay, self._driver.synchronize, _PAUSE_ROUNDS)
        return self._pause_cost
