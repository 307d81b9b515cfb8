"""Short launches behind pauses, against a clock that is read every 1.2 us."""

from __future__ import annotations

import gc
import statistics
from functools import partial

import pytest

from forecast_autotune.timing import (
    CLOCK_INTERVAL_S,
    DeviceEvent,
    GraphRecorder,
    RecordedGraph,
    mean_without_strays,
    pause_lengths,
    pause_seconds,
)
from tests.core.stepped_cuda import SteppedCuda


def timed_replay(cuda: SteppedCuda, graph: RecordedGraph) -> tuple[DeviceEvent, DeviceEvent]:
    start, end = cuda.Event(), cuda.Event()
    cuda.run(80e-6)
    start.record()
    graph.replay()
    end.record()
    return start, end


def seconds_behind_pauses(cuda: SteppedCuda, seconds: float, pauses: list[int]) -> float:
    """What a kernel of so many seconds is said to take."""
    recorder = GraphRecorder(cuda)
    cost = recorder.pause_cost(partial(timed_replay, cuda), cuda.synchronize, 2)
    results = []
    for pause in pauses:
        start, end = timed_replay(cuda, recorder.record(partial(cuda.run, seconds), pause)[0])
        results.append(1e-3 * start.elapsed_time(end) - pause_seconds(pause) - cost)
    return mean_without_strays(results)


def seconds_by_events(cuda: SteppedCuda, seconds: float) -> float:
    results = []
    for _ in range(50):
        start, end = cuda.Event(), cuda.Event()
        cuda.run(80e-6)
        start.record()
        cuda.run(seconds)
        end.record()
        results.append(1e-3 * start.elapsed_time(end))
    return statistics.median(results)


def test_kernels_of_5_and_of_5_3_microseconds_are_told_apart() -> None:
    slow, fast = 5.3e-6, 5.0e-6
    cuda = SteppedCuda()
    assert seconds_by_events(cuda, slow) == seconds_by_events(cuda, fast)
    taken = [seconds_behind_pauses(cuda, s, pause_lengths()) for s in (slow, fast)]
    assert taken[0] - taken[1] == pytest.approx(slow - fast, abs=0.08e-6)


def test_what_is_left_of_the_steps_is_the_pauses_own() -> None:
    """The error is half an interval for all kernels, and less than one step of the pauses beside that."""
    pauses = pause_lengths()
    kernels = [3e-6 + n * 0.073e-6 for n in range(40)]
    errors = [seconds_behind_pauses(SteppedCuda(), s, pauses) - s for s in kernels]
    assert max(errors) - min(errors) < 0.16e-6
    assert statistics.mean(errors) == pytest.approx(CLOCK_INTERVAL_S / 2, abs=0.15e-6)
    steps = [seconds_by_events(SteppedCuda(), s) - s for s in kernels]
    assert max(steps) - min(steps) > 1.0e-6


def test_what_cannot_be_recorded_raises_and_leaves_nothing_behind() -> None:
    cuda = SteppedCuda()
    recorder = GraphRecorder(cuda)

    def waits() -> None:
        cuda.synchronize()

    with pytest.raises(RuntimeError, match="capturing"):
        recorder.record(waits)
    assert cuda.recorded is None
    assert gc.isenabled()
    before = cuda.now_s
    graph, result = recorder.record(lambda: cuda.run(1e-3) or "returned")
    assert (result, cuda.now_s) == ("returned", before), "nothing runs while it is recorded"
    graph.replay()
    assert cuda.now_s - before == pytest.approx(1e-3)
