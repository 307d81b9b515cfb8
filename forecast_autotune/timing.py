"""Timing kernels shorter than a device's clock can tell: pauses before short launches, and launches recorded as graphs.

A device may look for the end of its work at intervals, of 1.2 us where that was seen (not on an H200 with driver 580).
Events around a kernel of 5 us then say 4.8 or 6.0 us whatever is timed. Behind pauses that spread over one interval
the same kernel ends at every phase of it; the mean of the times less the pauses then moves with the kernel. As with
events around many long launches, it lies above the kernel's own time by half an interval, and by as much for all.

The host needs 20 to 100 us to launch a kernel, as long as a short kernel runs or longer, and looks at the clock
only where it may. A graph of a pause and of the launch is one piece of work for the device: between events around its
replay are the pause and the kernels alone. Nothing here loads a framework: `cuda` is the
interface of `torch.cuda`, given by whoever has it.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

CLOCK_INTERVAL_S = 1.2e-6
"""Seconds between two looks of a device for the end of its work, at most."""
SHORT_LAUNCH_S = 30e-6
"""Seconds below which launches are timed behind pauses: an interval is more than 4 % of them."""
_PAUSE_COUNT = 8
_CLOCK_HZ = 2e9
"""Cycles of a device's clock per second, near enough for pauses of a microsecond."""
_STRAY_FACTOR, _STRAY_S = 1.1, 1e-6
"""Times the median, and seconds (most of an interval), beyond which a launch was disturbed."""


def pause_lengths() -> list[int]:
    """Clock cycles of every pause: steps of one eighth of an interval."""
    step = CLOCK_INTERVAL_S * _CLOCK_HZ / _PAUSE_COUNT
    return [round(step * (n + 1)) for n in range(_PAUSE_COUNT)]


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


_FLUSH_ROWS = 4096
"""Rows whose ends a flush takes: enough for all multiprocessors, in few lines that it leaves to be written back."""


def reading_flush(torch: Any, buffer: Any) -> Callable[[], object]:
    """A function that queues a read of `buffer`, a tensor of some times the L2: nothing else is there behind it.

    A flush that writes leaves lines which are written back while the next kernel runs: on an H200 one that reads 10 to
    80 MB seems to take 16 to 29 % longer behind it, some configs more than others. No dispatch mode of the caller sees
    the read: it is no operation of the program's.
    """
    unseen = torch._C._DisableTorchDispatch
    with unseen():
        values = buffer.view(torch.float32)
        rows = values[: values.numel() // _FLUSH_ROWS * _FLUSH_ROWS].view(_FLUSH_ROWS, -1)
        ends = tuple(torch.empty_like(rows[:, 0], memory_format=torch.contiguous_format) for _ in range(2))

    def flush() -> object:
        with unseen():
            return torch.aminmax(rows, dim=1, out=ends)  # which comparing outputs needs, too

    return flush


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
        """A graph of nothing. The pool lasts as long as a graph that uses it."""

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
        """Seconds that a pause takes beyond its length: the time that a second pause adds to a graph, less its length.

        `timed_replay` queues a replay between two events. The second pause comes behind first ones of all
        lengths, as the kernels that are timed do, so that the clock's ticks are in neither mean.
        """
        second = pause_lengths()[-1]
        graphs = [
            (self.record(self.nothing, first)[0], self.record(self._paused(second), first)[0])
            for first in pause_lengths()
        ]
        events = [(timed_replay(single), timed_replay(two)) for _ in range(rounds) for single, two in graphs]
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
