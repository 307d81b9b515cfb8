"""Launches recorded as device graphs: a replay takes what the kernels take, without the host's part.

The host needs 20 to 100 us to launch a kernel, as long as a short kernel runs or longer. Events around such
a launch time the host. A graph is recorded first, while its inputs hold nothing, and replayed behind the
flush of the L2: what lies between the events then are kernels alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_PAUSE_COUNT = 8
"""Lengths of pauses that a short call is recorded behind."""
_LONGEST_PAUSE_S, _CLOCK_HZ = 2.5e-6, 2e9
"""The longest pause, two of the whiles after which an H200 looks for the end of its work, and its clock."""
_FIRST_REPLAY_FACTOR = 1.25
"""Times the others that a first replay may take by chance."""
_STRAY_FACTOR, _TICK_S = 1.1, 1e-6
"""Times the median, and seconds of the coarsest clock, beyond which a replay was disturbed."""
_UNTOUCHED_SHARE = 0.01
"""Share of the outputs' bytes that a replay may leave alone though a plain launch writes them."""


class ReplayBuffers:
    """What a launch reads and where it writes, as far as a replay has to know. This one: nothing."""

    def clear(self) -> None:
        """Take the contents away, so that nothing can be computed from them while a graph is recorded."""

    def restore(self, result: Any) -> None:
        """Bring the contents back, and spoil what was returned: a replay has to write it."""

    def output_copies(self, result: Any) -> list[Any]:
        """Copies of all outputs' bytes, those in `result` included."""
        return []


class GraphRecorder:
    """Records calls as graphs that share one pool of memory. Made before any code that is not trusted."""

    def __init__(self, torch: Any) -> None:
        cuda = torch.cuda
        self._graph, self._use, self._current = cuda.CUDAGraph, cuda.stream, cuda.current_stream
        self._stream, self._pool, self._pause = cuda.Stream(), cuda.graph_pool_handle(), cuda._sleep
        self._mark = torch.zeros(1, device="cuda")
        self.empty = self.record(self.nothing)[0]
        """Of nothing. The pool lasts as long as a graph that uses it."""

    def nothing(self) -> None:
        """The least that can be recorded."""
        self._mark.zero_()

    def record(self, call: Callable[[], Any], pause: int = 0) -> tuple[Any, Any]:
        """The graph of a `pause` (clock cycles), then of what `call` launches; and what it returned.

        Nothing runs yet. Raises what `call` raises, and `RuntimeError` for what cannot be recorded: waiting
        for the device, or work on another stream that is not joined.
        """
        graph = self._graph()
        self._stream.wait_stream(self._current())
        with self._use(self._stream):
            # Only this thread is watched: a harness may well allocate in another one.
            graph.capture_begin(self._pool, "thread_local")
            try:
                if pause:
                    self._pause(pause)
                result = call()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, result


def pause_lengths() -> list[int]:
    """Clock cycles of every pause."""
    return [round(_LONGEST_PAUSE_S * _CLOCK_HZ * (n + 1) / _PAUSE_COUNT) for n in range(_PAUSE_COUNT)]


def without_pause(seconds: float, pause: int) -> float:
    """Seconds without the pause, whose own launch is still in them."""
    return seconds - pause / _CLOCK_HZ


def typical_seconds(seconds: list[float]) -> float:
    """The mean of some replays' times but for strays; the first where it is clearly longer.

    Clocks tick: of times between two ticks a median, or the mean of the middle half, tells the nearer tick,
    while the mean of all tells the time. Replays have equal inputs: what remembers them may be faster from
    the second on, and nothing is gained by that.
    """
    longest = _STRAY_FACTOR * statistics.median(seconds) + _TICK_S
    mean = statistics.fmean([s for s in seconds if s <= longest])
    return seconds[0] if seconds[0] > _FIRST_REPLAY_FACTOR * mean else mean


def left_untouched(before: list[Any], spoiled: list[Any], after: list[Any]) -> bool:
    """Whether a replay left alone what a plain launch had written: not all of its work was recorded.

    The arguments are `ReplayBuffers.output_copies` after the plain launch, before the replay and after it. Equality
    is not asked for: sums by atomic additions differ from launch to launch.
    """
    if [t.shape for t in before] != [t.shape for t in after]:
        return True
    total = sum(int(t.numel()) for t in before)
    left = sum(
        int(((a == s) & (b != s)).sum().item()) for b, s, a in zip(before, spoiled, after, strict=True)
    )
    return left > _UNTOUCHED_SHARE * total
