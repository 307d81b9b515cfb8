"""Any call is timed as kernels are: what can be recorded and what cannot, on a device that is read every 1.2 us."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from forecast_integrations.triton.timer.calls import CallTimer
from tests.core.stepped_cuda import SteppedGraph
from tests.integrations.stepped import SteppedDevice, stepped_device

RECORDED, BY_EVENTS = "graph-l2flush-1", "events-l2flush-2"


@pytest.fixture
def device(clean_environment: None) -> Iterator[SteppedDevice]:
    with stepped_device(lambda metadata: 1.0) as made:
        yield made


def working(device: SteppedDevice, microseconds: float) -> Callable[[], None]:
    return partial(device.cuda.run, 1e-6 * microseconds)


def test_short_calls_are_recorded_and_told_apart(device: SteppedDevice) -> None:
    timer = CallTimer()
    with timer.on_stream():
        fast, slow = (timer.time(working(device, us), math.inf) for us in (5.0, 5.3))
    assert 1e3 * (slow.ms - fast.ms) == pytest.approx(0.3, abs=0.08)
    assert 1e3 * fast.ms == pytest.approx(5.6, abs=0.2)
    assert {fast.protocol, slow.protocol} == {RECORDED}
    assert fast.recordable
    assert not fast.host_bound
    assert not timer._recorded, "graphs are gone"


def test_longer_and_hopeless_calls_are_timed_by_events(device: SteppedDevice) -> None:
    timer = CallTimer()
    captures = device.cuda.captures
    long, hopeless = timer.time(working(device, 50.0), math.inf), timer.time(working(device, 20.0), 0.005)
    assert {long.protocol, hopeless.protocol} == {BY_EVENTS}
    assert long.recordable, "nobody has tried"
    assert device.cuda.captures == captures
    # Beside a short one, it is timed as that one is.
    assert timer.time(working(device, 50.0), 0.029).protocol == RECORDED


def waiting(device: SteppedDevice) -> None:
    device.cuda.run(5e-6)
    device.cuda.synchronize()


def test_a_call_that_waits_for_the_device_is_timed_by_events(device: SteppedDevice) -> None:
    timer = CallTimer()
    found = timer.time(partial(waiting, device), math.inf)
    assert (found.protocol, found.recordable) == (BY_EVENTS, False)
    assert 1e3 * found.ms == pytest.approx(5.6, abs=1.2)
    captures = device.cuda.captures
    again = timer.time(partial(waiting, device), math.inf, may_record=False)
    assert (again.protocol, device.cuda.captures) == (BY_EVENTS, captures)
    assert timer.time(working(device, 5.0), math.inf).protocol == RECORDED, "others are still recorded"


def test_what_a_failed_recording_leaves_is_put_right(
    device: SteppedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait ends a recording in a way that torch cannot end: it stays in the allocator's books."""
    timer = CallTimer()
    heard: list[tuple[str, int]] = []

    def remembered(name: str) -> Callable[[int, int], None]:
        return lambda number, pool: heard.append((name, pool))

    names = ("_cuda_endAllocateToPool", "_cuda_releasePool")
    cuda: Any = device.cuda
    monkeypatch.setattr(cuda, "memory", SimpleNamespace(**{n: remembered(n) for n in names}), raising=False)
    monkeypatch.setattr(cuda, "current_device", lambda: 0, raising=False)
    broken: list[SteppedGraph] = []
    ended = SteppedGraph.capture_end

    def capture_end(self: SteppedGraph) -> None:
        ended(self)
        if broken:
            broken.clear()
            raise RuntimeError("operation failed due to a previous error during capture")

    def wait() -> None:
        device.cuda.run(5e-6)
        if device.cuda.recorded is not None:
            broken.append(SteppedGraph(device.cuda))
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(SteppedGraph, "capture_end", capture_end)
    assert not timer.time(wait, math.inf).recordable
    assert [name for name, _ in heard] == list(names)
    assert timer.time(working(device, 5.0), math.inf).protocol == RECORDED


def test_a_process_that_cannot_be_put_right_records_nothing_more(
    device: SteppedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = CallTimer()

    def fails(self: Any, *_: Any) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as broken:
        broken.setattr(SteppedGraph, "capture_begin", fails)
        assert not timer.time(working(device, 5.0), math.inf).recordable
    captures = device.cuda.captures
    assert timer.time(working(device, 5.0), math.inf).protocol == BY_EVENTS
    assert device.cuda.captures == captures
    assert CallTimer().stream is None


def test_work_on_another_stream_is_no_short_call(device: SteppedDevice) -> None:
    """It is not in the graph: the replay would seem to take no time at all."""

    def elsewhere() -> None:
        if device.cuda.recorded is None:
            device.cuda.run(20e-6)

    found = CallTimer().time(elsewhere, math.inf)
    assert (found.protocol, found.recordable) == (BY_EVENTS, False)
    assert 1e3 * found.ms == pytest.approx(20.6, abs=1.2)


def test_waits_for_the_host_are_told(device: SteppedDevice) -> None:
    device.cuda.host_is_slow = lambda: True
    assert CallTimer().time(working(device, 50.0), math.inf).host_bound


def test_a_failing_call_leaves_nothing_in_the_timer(device: SteppedDevice) -> None:
    timer = CallTimer()

    def fails() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        timer.time(fails, math.inf)
    assert not timer._recorded
    assert timer.time(working(device, 5.0), math.inf).protocol == RECORDED
