"""Launches recorded as graphs, with the driver behind that part of the interface of `torch.cuda` that it takes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

from forecast_autotune.timing import GraphRecorder, RecordedGraph, pause_lengths
from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernels import RunnerKernels

_PAUSE_ROUNDS = 8


class DriverEvents:
    """Gives events; all are taken back together, to be given again. They are freed with the process."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._given: list[ctypes.c_void_p] = []
        self._free: list[ctypes.c_void_p] = []

    def mark(self) -> RunnerEvent:
        """An event behind all work queued so far."""
        handle = self._free.pop() if self._free else self.driver.event()
        self._given.append(handle)
        event = RunnerEvent(self.driver, handle)
        event.record()
        return event

    def take_back(self) -> None:
        """Nobody asks the events any more that were given."""
        self._free += self._given
        self._given.clear()


class RunnerEvent:
    """A `DeviceEvent` of the core's timing."""

    def __init__(self, driver: CudaDriver, handle: ctypes.c_void_p) -> None:
        self._driver, self._handle = driver, handle

    def record(self) -> None:
        """Queue it."""
        self._driver.record(self._handle)

    def query(self) -> bool:
        """Whether the device has passed it."""
        return self._driver.passed(self._handle)

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds to a later event."""
        return self._driver.elapsed_ms(self._handle, end_event._handle)


class RunnerGraph:
    """A `RecordedGraph` of the core's timing."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._made: ctypes.c_void_p | None = None

    def capture_begin(self, pool: object, mode: str) -> None:
        """Write down launches from here on."""
        self._driver.begin_capture()

    def capture_end(self) -> None:
        """End of what is written down."""
        self._made = self._driver.end_capture()

    def replay(self) -> None:
        """Queue it once more."""
        if self._made is None:
            raise RuntimeError("a graph is replayed after its recording has ended")
        self._driver.launch_graph(self._made)

    def free(self) -> None:
        """Give the graph back."""
        if self._made is not None:
            self._driver.destroy_graph(self._made)
            self._made = None


class RunnerCuda:
    """What `GraphRecorder` takes for `torch.cuda`: one stream, the runner's."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._graphs: list[RunnerGraph] = []

    def CUDAGraph(self) -> RunnerGraph:
        """A new graph."""
        graph = RunnerGraph(self._driver)
        self._graphs.append(graph)
        return graph

    def Stream(self) -> RunnerCuda:
        """The one stream."""
        return self

    def wait_stream(self, other: object) -> None:
        """There is no other."""

    def current_stream(self) -> RunnerCuda:
        """The one stream."""
        return self

    def graph_pool_handle(self) -> None:
        """Nothing is allocated in a recording."""
        return

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        """The one stream."""
        yield

    def _sleep(self, cycles: int) -> None:
        self._kernels.pause(cycles)

    def free_graphs(self, keep: int) -> None:
        """Free all graphs but the first `keep`."""
        for graph in self._graphs[keep:]:
            graph.free()
        del self._graphs[keep:]

    @property
    def graph_count(self) -> int:
        """How many there are."""
        return len(self._graphs)


class LaunchRecorder:
    """Records launches behind pauses of all lengths."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._cuda = driver, RunnerCuda(driver, kernels)
        self._recorder = GraphRecorder(self._cuda)
        self._own_graphs = self._cuda.graph_count
        self._pause_cost: float | None = None

    def replays(self, launch: Callable[[], None]) -> list[tuple[Callable[[], None], int]]:
        """(what queues a launch behind a pause, that pause in cycles), for every pause."""
        return [(self._recorder.record(launch, pause)[0].replay, pause) for pause in pause_lengths()]

    def forget(self) -> None:
        """Free all that `replays` has recorded."""
        self._cuda.free_graphs(self._own_graphs)

    def pause_cost(self, flush: Callable[[], None]) -> float:
        """Seconds that a pause takes beyond its length, see `GraphRecorder`; `flush` comes before every replay."""
        if self._pause_cost is None:
            events = DriverEvents(self._driver)

            def replay(graph: RecordedGraph) -> tuple[RunnerEvent, RunnerEvent]:
                flush()
                start = events.mark()
                graph.replay()
                return start, events.mark()

            self._pause_cost = self._recorder.pause_cost(replay, self._driver.synchronize, _PAUSE_ROUNDS)
            events.take_back()
        return self._pause_cost
