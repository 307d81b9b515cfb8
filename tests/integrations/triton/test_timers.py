"""The clocks: what is recorded and how it is told apart, what events time, and a device that is kept awake."""

from __future__ import annotations

import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.driver import driver

from forecast_autotune import autotune
from forecast_autotune.records import Candidate
from forecast_autotune.timing import reading_flush
from forecast_integrations.triton.background.key_decision import LaunchSeries, SlicedTimer
from forecast_integrations.triton.null_device import NullDevice, TimeModel, null_device
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.timer import timers
from forecast_integrations.triton.timer.timers import (
    CallTimer,
    EventTimer,
    prompt_turns,
)
from tests.core.stepped_cuda import SteppedCuda, SteppedGraph
from tests.integrations.null import double, fresh, kernel_call


class _OneBuffer:
    """Triton's driver, as far as a flush asks it."""

    def get_empty_cache_for_benchmark(self) -> Any:
        self.cache = torch.arange(1 << 20, dtype=torch.int32)
        return self.cache

    def clear_cache(self, cache: Any) -> None:
        raise AssertionError("a flush that writes leaves dirty lines")


def test_the_flush_reads_every_word_and_writes_none() -> None:
    active = _OneBuffer()
    flush = timers.l2_flush(active)
    active.cache.view(torch.float32).fill_(1.0)
    before = active.cache.clone()
    active.cache[-1] = before[-1] = 0
    least, largest = flush()  # type: ignore[misc]
    assert torch.equal(active.cache, before)
    assert [least.min(), largest.max()] == [0.0, 1.0]
    assert largest.numel() < active.cache.numel() / 100


def test_all_is_read_before_a_replay_where_nobody_knows_the_l2() -> None:
    whole, before_a_replay = timers.l2_flushes(_OneBuffer())
    assert before_a_replay is whole


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_no_mode_of_the_caller_sees_a_flush() -> None:
    buffer = torch.ones(1 << 20)
    with _Operations() as seen:
        flush = reading_flush(torch, buffer)
        flush()
    assert seen.names == []


def times(median: float, spread: float, rounds: int = 20, seed: int = 0) -> list[float]:
    """Times around a median, a few of which the machine has disturbed."""
    draw = random.Random(seed)
    return [median + draw.gauss(0.0, spread) for _ in range(rounds)] + [3.0 * median]


FLUSH_S = 80e-6


class SteppedDevice(NullDevice):
    """Stands in for the active driver; its device interface is a `SteppedCuda`."""

    def __init__(self, clock: TimeModel) -> None:
        super().__init__(clock)
        self.cuda = SteppedCuda()
        self.flushes = 0
        self.host_wait_s = 0.0
        """For which a launch that is not recorded waits where the host is slow."""

    def get_device_interface(self) -> Any:
        return self.cuda

    def clear_cache(self, cache: NullDevice) -> None:
        self.flushes += 1
        self.cuda.run(FLUSH_S)

    def _launcher(self, src: object, metadata: Any) -> Callable[..., None]:
        def launch(*args: object) -> None:
            self.launches += 1
            if self.cuda.recorded is None and self.cuda.host_is_slow():
                self.cuda.run(self.host_wait_s)
            self.cuda.run(1e-3 * self.clock(metadata))

        return launch


@contextmanager
def stepped_device(clock: TimeModel) -> Iterator[SteppedDevice]:
    """Make one the active driver for the length of a `with` block."""
    with null_device():
        made = SteppedDevice(clock)
        driver.set_active(made)
        yield made


MICROSECONDS = {1: 5.0, 2: 5.3, 4: 12.0, 8: 50.0, 16: 500.0, 32: 5000.0}
"""Of a launch, by the number of warps."""


WARM_UP = 40
"""Flushes of a warm-up."""


def by_warps(metadata: Any) -> float:
    return 1e-3 * MICROSECONDS[metadata.num_warps]


@pytest.fixture
def device(clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[SteppedDevice]:
    monkeypatch.setattr(timers, "keep_busy", lambda step, *_: [step() for _ in range(WARM_UP)] and WARM_UP)
    monkeypatch.setattr(timers, "_HOT_S", 0.0)
    with stepped_device(by_warps) as made:
        yield made


def call_of(
    restored: tuple[str, ...] = (), hook: Callable[..., None] | None = None
) -> tuple[KernelCall, dict[int, Candidate]]:
    """A call of a kernel with one candidate for every number of warps."""
    listed = [triton.Config({"BLOCK": 128}, num_warps=w, pre_hook=hook) for w in MICROSECONDS]
    tuner = autotune(listed, ["n"], store=False, restore_value=list(restored))(fresh(double))
    x = torch.empty(4096)
    call, candidates = kernel_call(tuner, x, x, 4096)
    return call, {candidate.config.num_warps: candidate for candidate in candidates}


def timer_of(**options: Any) -> tuple[EventTimer, dict[int, Candidate]]:
    """A timer of such a call, and its candidates."""
    call, by = call_of(**options)
    return EventTimer(call), by


def looked_at(timer: EventTimer, candidate: Candidate, best_ms: float = math.inf) -> float:
    """Median microseconds of a look, as the measurer does it."""
    timer.first(candidate, 10.0)
    times = timer.time_adaptively(candidate, best_ms)
    assert times
    return 1e3 * statistics.median(times)


def test_a_look_tells_5_from_5_3_microseconds_and_events_alone_do_not(device: SteppedDevice) -> None:
    timer, by = timer_of()
    fast, slow = looked_at(timer, by[1]), looked_at(timer, by[2])
    assert slow - fast == pytest.approx(0.3, abs=0.08)
    # Half an interval is in every time, as it is, on average, in those that events give.
    assert fast == pytest.approx(5.6, abs=0.2)
    assert {timer.protocol_of(by[n]) for n in (1, 2)} == {"graph-l2read-2"}
    plain = timer._launches([by[1], by[2]], 40)
    assert statistics.median(plain[0]) == statistics.median(plain[1])


@pytest.mark.parametrize(("warps", "rested"), [(16, True), (8, False)])
def test_a_hungry_first_look_right_after_a_program_is_taken_at_rest(
    device: SteppedDevice, monkeypatch: pytest.MonkeyPatch, warps: int, rested: bool
) -> None:
    """This device is slower by a fifth until it has flushed for as long as a warm-up."""
    monkeypatch.setattr(timers, "_HOT_S", 600.0)
    timer, by = timer_of()
    timer.stay_awake()
    begin = device.flushes
    device.clock = lambda metadata: by_warps(metadata) * (1.0 if device.flushes >= begin + WARM_UP else 1.2)
    look = looked_at(timer, by[warps])
    assert look == pytest.approx(MICROSECONDS[warps] * (1.0 if rested else 1.2), abs=1.0)
    assert (device.flushes >= begin + WARM_UP) == rested


def test_finalists_are_told_apart_in_turns_however_many_pauses(device: SteppedDevice) -> None:
    timer, by = timer_of()
    fast, slow = (1e3 * statistics.median(t) for t in timer.in_turns([by[1], by[2]]))
    assert slow - fast == pytest.approx(0.3, abs=0.04)
    assert timer.protocol_of(by[1]) == "graph-l2read-2"
    captures = device.cuda.captures
    timer.in_turns([by[1], by[2]])
    assert device.cuda.captures == captures, "they replay what was recorded"


@pytest.mark.parametrize(
    ("ms", "edge", "undecided"),
    [
        ([1.001, 1.0, 1.03], 0.0, [0, 1]),
        ([1.01, 1.0], 0.01, [0, 1]),
        ([1.0, 1.01], 0.01, []),
        ([1.0, 1.0], 0.0003, [0, 1]),
        ([1.002, 1.01, 1.0], 0.01, []),
        ([1.03, 1.01, 1.002, 1.009, 1.0], 0.01, [1, 2, 4]),
    ],
    ids=[
        "the fastest",
        "at the edge",
        "preferred and fastest",
        "perhaps behind the edge",
        "the first ties",
        "before a sure one",
    ],
)
def test_more_times_are_taken_of_what_may_be_chosen(
    ms: list[float], edge: float, undecided: list[int]
) -> None:
    """The medians err by 0.2 % of the fastest."""
    noise = [i / 1000 for i in range(-10, 11)]
    times = [[one + by for by in noise] for one in ms]
    assert timers.contenders(times, edge) == undecided
    asked: list[int] = []

    def more(left: list[int], rounds: int) -> list[list[float]]:
        asked.append(rounds)
        return [times[i] for i in left]

    timers.rounds_in_turns(more, len(ms), 20, True, edge)
    assert sum(asked) == (6 if not undecided else 120 if edge else 12)


@pytest.mark.parametrize("background", [False, True])
def test_candidates_in_turns_are_launched_back_and_forth(
    device: SteppedDevice, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """Every other launch of a device takes longer: it is not to be the same candidate's."""
    call, by = call_of()
    order: list[int] = []
    launcher = KernelCall.launcher

    def noted(of: KernelCall, candidate: Candidate) -> Callable[[], object]:
        launch = launcher(of, candidate)
        return lambda: (order.append(candidate.config.num_warps), launch())

    monkeypatch.setattr(KernelCall, "launcher", noted)

    def run(series: LaunchSeries, timeout_s: float) -> None:
        while not series.is_launched:  # in slices of one launch or two
            series.advance(call, lambda: None, device.cuda, 1.0)

    sliced = SlicedTimer(call, run, lambda _: nullcontext(), lambda: None, 10.0, False)
    (sliced if background else EventTimer(call))._launches([by[8], by[16]], 4)
    assert order == [8, 16, 16, 8] * 2


def test_a_warm_launch_finds_its_own_data_and_nothing_is_flushed(device: SteppedDevice) -> None:
    call, by = call_of()
    timer, cold = EventTimer(call, warm=True), EventTimer(call)
    looked_at(timer, by[16])
    flushes, launches = device.flushes, device.launches
    assert looked_at(timer, by[16]) == pytest.approx(500.0, rel=1e-2)
    assert device.flushes - flushes < 8, "but to let the host get ahead of the first launch"
    warm = device.launches - launches
    assert warm % 2 == 1, "the first, and before each other one that is not timed"
    assert timer.protocol_of(by[16]) == "events-l2warm-3"
    # Eight launches, one after another: an eighth of half an interval is in the time of each.
    assert looked_at(timer, by[1]) == pytest.approx(5.07, abs=0.05)
    assert timer.protocol_of(by[1]) == "graph-l2warm-3"
    assert cold.protocol == "events-l2read-3"


def test_every_replay_is_behind_a_flush(device: SteppedDevice) -> None:
    timer, by = timer_of()
    looked_at(timer, by[1])
    replays, flushes = device.cuda.replays, device.flushes
    timer._extend([], by[1], timer._recordings[by[1]], 5)
    assert device.cuda.replays - replays == 5 * 8
    assert device.flushes - flushes == 5 * 8 + 2


@pytest.mark.parametrize("reason", ["hook", "profiler", "scratch"])
def test_what_cannot_be_recorded_is_timed_by_events(
    device: SteppedDevice, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    call, by = call_of(hook=lambda kwargs: None) if reason == "hook" else call_of()
    if reason == "profiler":
        monkeypatch.setattr(triton.knobs.runtime.launch_enter_hook, "calls", [lambda *args: None])
    if reason == "scratch":
        kernel: Any = call.compile(by[1])
        kernel.metadata = kernel.metadata._replace(global_scratch_size=512)
    timer = EventTimer(call)
    assert looked_at(timer, by[1]) == pytest.approx(6.0, abs=0.01)
    assert timer.protocol_of(by[1]) == "events-l2read-3"
    assert device.cuda.captures in (0, 17), "nothing but what pauses cost was recorded"


def test_what_the_tuner_restores_is_restored_around_replays_too(device: SteppedDevice) -> None:
    """The made-up launch adds to an argument, as a kernel that works in place does."""
    call, by = call_of(restored=("x",))
    x = call.args[0]
    assert isinstance(x, torch.Tensor)
    x.fill_(1.0)
    seen = []
    run = device.cuda.run

    def add_in_place(seconds: float) -> None:
        run(seconds)
        if 4e-6 < seconds < 6e-6:  # the kernel's: neither a flush nor a pause
            seen.append(float(x[0]))
            x.add_(1.0)

    device.cuda.run = add_in_place  # type: ignore[method-assign]
    timer = EventTimer(call)
    looked_at(timer, by[1])
    assert timer.protocol_of(by[1]) == "graph-l2read-2"
    assert float(x[0]) == 1.0, "the caller's values are back"
    replays = seen[-8 * 3 :]
    assert set(replays) == {1.0}, "every timed launch meets the values of the call"


def test_after_a_recording_that_failed_none_is_tried(
    device: SteppedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, by = call_of()
    looked_at(EventTimer(call), by[1])
    plain = device.launcher_cls

    def launcher(src: object, metadata: Any) -> Any:
        launch = plain(src, metadata)

        def waits(*args: object) -> None:
            device.cuda.synchronize()
            launch(*args)

        return waits

    device.launcher_cls = launcher
    other, also = call_of()  # compiled anew, and so with launchers that wait
    timer = EventTimer(other)
    assert looked_at(timer, also[1]) == pytest.approx(6.0, abs=0.01)
    captures = device.cuda.captures
    assert looked_at(timer, also[2]) == pytest.approx(6.0, abs=0.01)
    assert {timer.protocol_of(also[n]) for n in (1, 2)} == {"events-l2read-3"}
    assert device.cuda.captures == captures


def test_a_host_that_cannot_keep_ahead_is_noticed(device: SteppedDevice) -> None:
    timer, by = timer_of()
    looked_at(timer, by[8])
    assert not timer.is_host_bound(by[8])
    device.cuda.host_is_slow = lambda: True
    looked_at(timer, by[8])
    assert timer.is_host_bound(by[8])
    device.cuda.host_is_slow = lambda: False
    looked_at(timer, by[8])
    assert not timer.is_host_bound(by[8])


@pytest.mark.parametrize(("usual_us", "stall_us"), [(40.0, 40.0), (200.0, 200.0), (8.0, 400.0)])
def test_a_slow_host_does_not_make_kernels_slow(
    device: SteppedDevice, usual_us: float, stall_us: float
) -> None:
    """It takes so long for each of the five things that a timed launch needs, or for a sixth of them."""
    draw = random.Random(0)
    device.cuda.host_op_s = lambda: 1e-6 * (usual_us if draw.random() > 1 / 6 else stall_us)
    timer, by = timer_of()
    looks = {warps: looked_at(timer, by[warps]) for warps in (1, 2, 8, 16)}
    assert looks[8] == pytest.approx(50.0, abs=1.5)
    assert looks[16] == pytest.approx(500.0, abs=1.5)
    assert looks[1] == pytest.approx(5.6, abs=0.4), "what a pause costs was found, too"
    assert looks[1] < looks[2] < looks[1] + 0.6
    assert not any(map(timer.is_host_bound, by.values()))


def test_busy_threads_give_way_while_launches_are_queued(device: SteppedDevice) -> None:
    timer, by = timer_of()
    usual, seen = sys.getswitchinterval(), []
    run = device.cuda.run
    device.cuda.run = lambda seconds: (seen.append(sys.getswitchinterval()), run(seconds))[1]
    looked_at(timer, by[8])
    assert min(seen) < 1e-4 < usual
    assert sys.getswitchinterval() == usual
    first, second = prompt_turns(), prompt_turns()
    with first:
        with second, pytest.raises(ValueError, match="in between"), prompt_turns():
            raise ValueError("in between")
        assert sys.getswitchinterval() < 1e-4 < usual, "turns of several threads end as they began"
    assert sys.getswitchinterval() == usual


@pytest.mark.parametrize(
    ("warps", "hopeless_ms", "contender_ms"),
    [(1, 1.0, 14.0), (8, 1.5, 12.0), (16, 5.0, 14.0), (32, 12.0, 22.0)],
)
def test_a_candidate_costs_milliseconds(
    device: SteppedDevice, warps: int, hopeless_ms: float, contender_ms: float
) -> None:
    """Of the device's time: a candidate that cannot win, and one that may."""
    timer, by = timer_of()
    timer.first(by[1], 10.0)
    looked_at(timer, by[1])  # what is made once a process
    true_ms = 1e-3 * MICROSECONDS[warps]

    def spent(best_ms: float) -> float:
        begin = device.cuda.now_s
        timer._first_ms[by[warps]] = true_ms  # the made-up clock is not the host's
        timer.time_adaptively(by[warps], best_ms)
        return 1e3 * (device.cuda.now_s - begin) + true_ms

    assert spent(0.1 * true_ms - 0.0005 if warps == 1 else 0.1 * true_ms) < hopeless_ms
    assert spent(true_ms) < contender_ms


RECORDED, BY_EVENTS = "graph-l2read-2", "events-l2read-3"


@pytest.fixture
def steady_device(clean_environment: None) -> Iterator[SteppedDevice]:
    with stepped_device(lambda metadata: 1.0) as made:
        yield made


def working(steady_device: SteppedDevice, microseconds: float) -> Callable[[], None]:
    return partial(steady_device.cuda.run, 1e-6 * microseconds)


def test_short_calls_are_recorded_and_told_apart(steady_device: SteppedDevice) -> None:
    timer = CallTimer()
    with timer.on_stream():
        fast, slow = (timer.time(working(steady_device, us), math.inf) for us in (5.0, 5.3))
    assert 1e3 * (slow.ms - fast.ms) == pytest.approx(0.3, abs=0.08)
    assert 1e3 * fast.ms == pytest.approx(5.6, abs=0.2)
    assert {fast.protocol, slow.protocol} == {RECORDED}
    assert fast.recordable
    assert not fast.host_bound
    assert not timer._recordings, "graphs are gone"


def waiting(steady_device: SteppedDevice) -> None:
    steady_device.cuda.run(5e-6)
    steady_device.cuda.synchronize()


def test_a_call_that_waits_for_the_device_is_timed_by_events(steady_device: SteppedDevice) -> None:
    timer = CallTimer()
    found = timer.time(partial(waiting, steady_device), math.inf)
    assert (found.protocol, found.recordable) == (BY_EVENTS, False)
    assert 1e3 * found.ms == pytest.approx(5.6, abs=1.2)
    captures = steady_device.cuda.captures
    again = timer.time(partial(waiting, steady_device), math.inf, may_record=False)
    assert (again.protocol, steady_device.cuda.captures) == (BY_EVENTS, captures)
    assert timer.time(working(steady_device, 5.0), math.inf).protocol == RECORDED, "others are still recorded"


def test_what_a_failed_recording_leaves_is_put_right(
    steady_device: SteppedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait ends a recording in a way that torch cannot end: it stays in the allocator's books."""
    timer = CallTimer()
    heard: list[tuple[str, int]] = []

    def remembered(name: str) -> Callable[[int, int], None]:
        return lambda number, pool: heard.append((name, pool))

    names = ("_cuda_endAllocateToPool", "_cuda_releasePool")
    cuda: Any = steady_device.cuda
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
        steady_device.cuda.run(5e-6)
        if steady_device.cuda.recorded is not None:
            broken.append(SteppedGraph(steady_device.cuda))
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(SteppedGraph, "capture_end", capture_end)
    assert not timer.time(wait, math.inf).recordable
    assert [name for name, _ in heard] == list(names)
    assert timer.time(working(steady_device, 5.0), math.inf).protocol == RECORDED


def test_a_process_that_cannot_be_put_right_records_nothing_more(
    steady_device: SteppedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = CallTimer()

    def fails(self: Any, *_: Any) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as broken:
        broken.setattr(SteppedGraph, "capture_begin", fails)
        assert not timer.time(working(steady_device, 5.0), math.inf).recordable
    captures = steady_device.cuda.captures
    assert timer.time(working(steady_device, 5.0), math.inf).protocol == BY_EVENTS
    assert steady_device.cuda.captures == captures
    assert CallTimer().stream is None


def test_work_on_another_stream_is_no_short_call(steady_device: SteppedDevice) -> None:
    """It is not in the graph: the replay would seem to take no time at all."""

    def elsewhere() -> None:
        if steady_device.cuda.recorded is None:
            steady_device.cuda.run(20e-6)

    found = CallTimer().time(elsewhere, math.inf)
    assert (found.protocol, found.recordable) == (BY_EVENTS, False)
    assert 1e3 * found.ms == pytest.approx(20.6, abs=1.2)


def test_a_failing_call_leaves_nothing_in_the_timer(steady_device: SteppedDevice) -> None:
    timer = CallTimer()

    def fails() -> None:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        timer.time(fails, math.inf)
    assert not timer._recordings
    assert timer.time(working(steady_device, 5.0), math.inf).protocol == RECORDED
