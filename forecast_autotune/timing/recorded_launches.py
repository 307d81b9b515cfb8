"""Launches recorded as device graphs: a replay takes what the kernels take, without the host's part.

The host needs 20 to 100 us to launch a kernel, as long as a short kernel runs or longer, and looks at the clock
only where it may. A graph of a pause and of the launch is one piece of work for the device: what lies between
events around its replay are the pause and the kernels alone. Nothing here loads a framework: `cuda` is the
interface of `torch.cuda`, given by whoever has it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from forecast_autotune.timing.pauses import mean_without_strays, pause_lengths, pause_seconds


class DeviceEvent(Protocol):
    """A mark in a stream, as `torch.cuda.Event` is."""

    def record(self) -> None:
        """Put it behind all work queued so far."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to the later one."""


class RecordedGraph(Protocol):
    """Work that was recorded, as `torch.cuda.CUDAGraph` is."""

    def replay(self) -> None:
        """Queue it once more."""


class GraphRecorder:
    """Records calls as graphs that share one pool of memory.

    Takes all it needs from `cuda` when it is made: before any code that is not trusted.
    """

    def __init__(self, cuda: Any) -> None:
        self._graph, self._use, self._current = cuda.CUDAGraph, cuda.stream, cuda.current_stream
        self.stream, self._pool, self._pause = cuda.Stream(), cuda.graph_pool_handle(), cuda._sleep
        """`stream`: the one that all is recorded on."""
        self._failed: list[Any] = []
        """Graphs whose recording could not be ended: the allocator may ask them about it for ever."""
        self.nothing()  # loaded now: nothing may be loaded while a graph is recorded
        self.empty: RecordedGraph = self.record(self.nothing)[0]
        """Of nothing. The pool lasts as long as a graph that uses it."""

    def nothing(self) -> None:
        """The least that can be recorded."""
        self._pause(1)

    def record(self, call: Callable[[], Any], pause: int = 0, pool: Any = None) -> tuple[RecordedGraph, Any]:
        """The graph of a `pause` (clock cycles), then of what `call` launches; and what it returned.

        `pool`: the id of a pool of torch's to allocate from instead of the one that all share.

        Nothing runs yet. Raises what `call` raises, and `RuntimeError` for what cannot be recorded: waiting
        for the device, or work on another stream that is not joined.
        """
        graph = self._graph()
        self.stream.wait_stream(self._current())
        collects = gc.isenabled()
        gc.disable()  # what is collected may give something back to the device, which ends a recording
        try:
            with self._use(self.stream):
                # Only this thread is watched: the program may well allocate in another one.
                graph.capture_begin(pool or self._pool, "thread_local")
                try:
                    if pause:
                        self._pause(pause)
                    result = call()
                except BaseException:
                    with suppress(RuntimeError):
                        self._end(graph)
                    raise
                self._end(graph)
        finally:
            if collects:
                gc.enable()
        return graph, result

    def _end(self, graph: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._failed.append(graph)
            raise

    def pause_cost(
        self,
        timed_replay: Callable[[RecordedGraph], tuple[DeviceEvent, DeviceEvent]],
        synchronize: Callable[[], object],
        rounds: int,
    ) -> float:
        """Seconds that a pause takes beyond its length: what a second pause adds to a graph, less its length.

        `timed_replay` queues a replay between two events. The second pause comes behind first ones of all
        lengths, as the kernels that are timed do, so that the clock's ticks are in neither mean.
        """
        second = pause_lengths()[-1]
        graphs = [
            (self.record(self.nothing, first)[0], self.record(self._paused(second), first)[0])
            for first in pause_lengths()
        ]
        events = [(timed_replay(one), timed_replay(two)) for _ in range(rounds) for one, two in graphs]
        synchronize()
        one_pause, two_pauses = (
            mean_without_strays([start.elapsed_time(end) * 1e-3 for start, end in of_kind])
            for of_kind in zip(*events, strict=True)
        )
        return two_pauses - one_pause - pause_seconds(second)

    def _paused(self, pause: int) -> Callable[[], None]:
        def call() -> None:
            self._pause(pause)
            self.nothing()

        return call
