"""A device on a made-up clock that is read at intervals only: as much of `torch.cuda` as timing asks for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CYCLES_PER_S = 2e9


class SteppedCuda:
    """Work takes the seconds it is said to; the end of work is seen at the next of the clock's intervals."""

    def __init__(self, interval_s: float = 1.2e-6, gap_s: float = 0.7e-6) -> None:
        self.interval_s, self.gap_s = interval_s, gap_s
        """`gap_s` is what a pause takes beyond its length."""
        self.now_s = 0.0
        self.captures, self.replays = 0, 0
        self.recorded: list[float] | None = None
        """Seconds of what is being recorded; None while nothing is."""
        self.host_is_slow: Callable[[], bool] = lambda: False
        self.host_now_s = 0.0
        self.host_op_s: Callable[[], float] | None = None
        """The host's clock, and its seconds for the next thing that it queues or asks for; None: no time at all."""

    def run(self, seconds: float) -> None:
        """A piece of work: done once it is queued and all before it is done, or recorded."""
        if self.recorded is None:
            self.queue()
            self.now_s += seconds
        else:
            self.recorded.append(seconds)

    def queue(self) -> None:
        """The host queues something, for which a device that has done all else waits."""
        if self.host_op_s is not None:
            self.host_now_s += self.host_op_s()
        self.now_s = max(self.now_s, self.host_now_s)

    def _sleep(self, cycles: int) -> None:
        self.run(cycles / CYCLES_PER_S + self.gap_s)

    def Event(self, enable_timing: bool = True) -> SteppedEvent:
        return SteppedEvent(self)

    def CUDAGraph(self) -> SteppedGraph:
        return SteppedGraph(self)

    def Stream(self) -> SteppedStream:
        return SteppedStream()

    def current_stream(self) -> SteppedStream:
        return SteppedStream(self)

    @contextmanager
    def stream(self, stream: SteppedStream) -> Iterator[None]:
        yield

    def graph_pool_handle(self) -> int:
        return 1

    def synchronize(self, device: int | None = None) -> None:
        """Refused while something is recorded, as on a device."""
        if self.recorded is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.host_now_s = max(self.host_now_s, self.now_s)


class SteppedStream:
    """One of several; all work is done in order anyway."""

    def __init__(self, cuda: SteppedCuda | None = None) -> None:
        self._cuda = cuda

    def synchronize(self) -> None:
        """Let all work be done."""
        if self._cuda is not None:
            self._cuda.synchronize()

    def wait_stream(self, other: SteppedStream) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        """Whether all work is done."""
        return True


class SteppedGraph:
    """What was recorded, to be done at a replay."""

    def __init__(self, cuda: SteppedCuda) -> None:
        self._cuda = cuda
        self._work: list[float] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert self._cuda.recorded is None
        assert capture_error_mode == "thread_local"
        self._cuda.captures += 1
        self._cuda.recorded = self._work

    def capture_end(self) -> None:
        self._cuda.recorded = None

    def replay(self) -> None:
        assert self._cuda.recorded is None
        self._cuda.replays += 1
        self._cuda.queue()
        op_s, self._cuda.host_op_s = self._cuda.host_op_s, None  # all of it is one thing to queue
        for seconds in self._work:
            self._cuda.run(seconds)
        self._cuda.host_op_s = op_s


class SteppedEvent:
    """Two of them tell how many intervals lie between."""

    def __init__(self, cuda: SteppedCuda) -> None:
        self._cuda = cuda
        self.at_s = 0.0
        self._asked = False

    def record(self, stream: SteppedStream | None = None) -> None:
        self._cuda.queue()
        self.at_s = self._cuda.now_s
        self._asked = False

    def query(self) -> bool:
        if (op_s := self._cuda.host_op_s) is not None:
            is_done = self.at_s <= self._cuda.host_now_s
            self._cuda.host_now_s += op_s()
            return is_done
        # Done when asked a second time: a device is always a little behind a host that is fast enough.
        before, self._asked = self._asked, True
        return before or self._cuda.host_is_slow()

    def elapsed_time(self, end_event: SteppedEvent) -> float:
        steps = math.ceil((end_event.at_s - self.at_s) / self._cuda.interval_s - 1e-9)
        return 1e3 * steps * self._cuda.interval_s
