"""Devices on the side of timing: facts by the driver, turns of threads, events around a cold launch.

Short launches are recorded as a graph while their inputs hold nothing, and replayed behind the flush of the L2; see
`forecast_autotune.timing` for why, and why behind pauses.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.features.devices import device_spec
from forecast_autotune.records import Device
from forecast_autotune.timing import (
    DeviceEvent,
    GraphRecorder,
    RecordedGraph,
    mean_without_strays,
    pause_lengths,
    pause_seconds,
    reading_flush,
)
from forecast_harness.clocks.times import DevicePeaks

_REPLAY_TIME_S, _MOST_REPLAYS = 1e-3, 16
"""Seconds that all replays of one question should take, and the most replays. A launch that needs so many is so
short (62 us) that it is recorded behind pauses, see `replay`."""
_PAUSE_ROUNDS = 8
"""Replays of nothing behind each pause, to measure the cost of pauses."""
ONE_QUEUE: Mapping[str, str] = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Variables of a process that launches kernels on one stream: with one queue instead of eight the driver has its
context ready in half the time, and what other processes ask of the driver meanwhile waits less."""
EVENTS_PROTOCOL = "events"
"""Timed as launched, including the host's seconds between the events."""
GRAPH_PROTOCOL = "graph"
"""Timed as a replay."""
SHORT_LAUNCH_S = 10e-3
"""The host's part of a launch may matter below so many seconds, of which it is 0.2 %."""

_LEAST_LAUNCH_S = 1e-7
"""Least seconds of a launch that is recorded behind pauses: their cost is known to within some 0.1 us."""
_LEAST_FLUSH_BYTES = 256 << 20
_FLUSH_L2_FACTOR = 3
_PERSISTING_L2_LIMIT = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of the driver's API."""
_DATASHEET_HEADROOM = 1.15
"""How far boards exceed their datasheet's bandwidth."""


class DeviceBusy(ForecastAutotuneError, TimeoutError):
    """Another process is timing on this device."""


@cache
def _nvml() -> Any:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def device_count() -> int:
    """NVIDIA devices the driver knows; 0 without a driver. Opens no context on any."""
    library, count = _nvml(), ctypes.c_uint(0)
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _nvml_handle(index: int) -> Any:
    library, handle = _nvml(), ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    return handle


def _nvml_text(function: str, handle: Any) -> str:
    buffer = ctypes.create_string_buffer(96)
    status = getattr(_nvml(), function)(handle, buffer, ctypes.c_uint(96))
    return buffer.value.decode(errors="replace") if status == 0 else ""


def _nvml_number(function: str, *arguments: Any, wide: bool = False) -> int | None:
    value: Any = ctypes.c_ulonglong(0) if wide else ctypes.c_uint(0)
    status = getattr(_nvml(), function)(*arguments, ctypes.byref(value))
    return int(value.value) if status == 0 else None


def identity(index: int) -> tuple[str, str]:
    """(name, UUID) of a device by the driver's index; two empty texts when there is none."""
    handle = _nvml_handle(index)
    if handle is None:
        return "", ""
    return _nvml_text("nvmlDeviceGetName", handle), _nvml_text("nvmlDeviceGetUUID", handle)


def device_index(text: str) -> int | None:
    """The driver's number of a device that `CUDA_VISIBLE_DEVICES` names by number, UUID or a UUID's start.

    None for one that the driver does not know, such as a part of a device.
    """
    if text.isdigit():
        return int(text)
    result = [n for n in range(device_count()) if text and identity(n)[1].startswith(text)]
    return result[0] if len(result) == 1 else None


def visible_devices() -> list[int]:
    """The driver's numbers of the devices that this process may use: all, or those of `CUDA_VISIBLE_DEVICES`.

    As CUDA reads it: entries behind one that names no device do not count.
    """
    variable, count = os.environ.get("CUDA_VISIBLE_DEVICES"), device_count()
    if variable is None:
        return list(range(count))
    result: list[int] = []
    for text in variable.split(","):
        number = device_index(text.strip())
        if number is None or not number < count or number in result:
            break
        result.append(number)
    return result


def device_conditions(index: int) -> dict[str, int]:
    """Clocks (MHz), temperature (C), power (mW) and throttle reasons (the driver's bits), as far as it tells them."""
    handle = _nvml_handle(index)
    if handle is None:
        return {}
    result = {
        "sm_mhz": _nvml_number("nvmlDeviceGetClockInfo", handle, 1),
        "memory_mhz": _nvml_number("nvmlDeviceGetClockInfo", handle, 2),
        "temperature_c": _nvml_number("nvmlDeviceGetTemperature", handle, 0),
        "power_mw": _nvml_number("nvmlDeviceGetPowerUsage", handle),
        "throttle": _nvml_number("nvmlDeviceGetCurrentClocksThrottleReasons", handle, wide=True),
    }
    return {name: value for name, value in result.items() if value is not None}


def device_peaks(name: str) -> DevicePeaks:
    """The most a device of this name can do, from its datasheet with some headroom."""
    spec = device_spec(Device(name, "cuda", "", 0, 0, 0, 0, 0))
    return DevicePeaks(
        spec.memory_gb_s * 1e9 * _DATASHEET_HEADROOM, spec.tensor_tflops * 2e12 * _DATASHEET_HEADROOM
    )


@contextmanager
def exclusive(name: str, timeout_s: float = 600.0, folder: Path | None = None) -> Iterator[None]:
    """Hold a device by its name (see `device_lock`), among all processes of this machine that ask in this way.

    Raises `DeviceBusy` after `timeout_s` seconds.
    """
    place = (folder or Path(tempfile.gettempdir())) / f"forecast-device-{name or 'host'}.lock"
    lock = FileLock(place, mode=0o666)
    try:
        lock.acquire(timeout=timeout_s)
    except Timeout as error:
        label = name or "the host"
        raise DeviceBusy(f"another process has been timing on {label} for {timeout_s:g} s") from error
    try:
        yield
    finally:
        lock.release()


class LaunchTiming(NamedTuple):
    """The answer to one question about a launch."""

    seconds: float
    """Seconds of one launch."""
    total_seconds: float
    """Seconds of all replays together, or the same: an outside clock has to see at least as many."""
    protocol: str
    result: Any


class DeviceTimer:
    """Seconds of one launch with cold caches. Runs in the cell, so its word is checked against the judge's.

    The L2 is flushed by reading three times its size, after any part of it that was set aside for
    persisting lines has been given back. Device events count the launch's own stream; the host's clock, to
    the end of all work on the device, counts everything: the larger of the two is reported, so that work on
    another stream gains nothing.

    Launches below ten milliseconds are recorded and replayed where that can be done (see `replay`), several
    times, so that even a short one is long enough for the judge's clock.
    """

    def __init__(self, torch: Any) -> None:
        cuda = torch.cuda
        self._event, self._synchronize = cuda.Event, cuda.synchronize
        self._out_of_memory = cuda.OutOfMemoryError
        size = max(_LEAST_FLUSH_BYTES, _FLUSH_L2_FACTOR * int(cuda.get_device_properties(0).L2_cache_size))
        self._read_buffer = reading_flush(torch, torch.empty(size, dtype=torch.uint8, device="cuda"))
        self._driver: Any = None
        with suppress(OSError):
            self._driver = ctypes.CDLL("libcuda.so.1")
        self._clock = time.perf_counter
        self.recorder = GraphRecorder(cuda)
        self._replays: dict[object, int] = {}
        """The number of replays of a key's launches; 0: they are not replayed."""
        self._overhead = min(self._time_call(lambda: None)[1] for _ in range(20))
        self._chance = random.SystemRandom()
        self._pausing = self.recorder.pause_cost(self._timed_replay, self._synchronize, _PAUSE_ROUNDS)

    def flush(self) -> None:
        """Leave nothing of earlier launches in the L2."""
        if self._driver is not None:
            self._driver.cuCtxSetLimit(_PERSISTING_L2_LIMIT, ctypes.c_size_t(0))
            self._driver.cuCtxResetPersistingL2Cache()
        self._read_buffer()

    def time(
        self,
        call: Callable[[], Any],
        inputs: ReplayBuffers | None = None,
        key: object = None,
        protocol: str = "",
    ) -> LaunchTiming:
        """Time `call`.

        With `inputs`, launches of one `key` are recorded once a plain one of them has been short, and once
        a replay has done all of its work. `protocol` insists on one; what cannot be recorded is launched.
        """
        if inputs is None or protocol == EVENTS_PROTOCOL:
            return self._time_with_events(call)
        if count := self._replays.get(key, 0):
            result = self._time_with_graph(call, inputs, count)
            if result is not None:
                self._replays[key] = _replay_count(result.seconds)
                return result
            inputs.restore(None)
        timing = self._time_with_events(call)
        if key in self._replays or timing.seconds >= SHORT_LAUNCH_S:
            return timing
        self._replays[key] = 0
        try:
            result = self._time_with_graph(call, inputs, 1, inputs.output_copies(timing.result))
        except self._out_of_memory:  # three copies of the outputs, on a device that the candidate fills
            result = None
        if result is not None:
            self._replays[key] = _replay_count(result.seconds)
            return result
        inputs.restore(None)
        return self._time_with_events(call)

    def idle(
        self, inputs: ReplayBuffers, key: object, protocol: str = "", call: Callable[[], Any] | None = None
    ) -> None:
        """Do all that `time` does, around no launch.

        Where `time` would record and replay `call`, it is recorded and nothing is replayed: the host's part of
        many small kernels takes milliseconds, and belongs to the question, not to the launch.
        The candidate sees no difference while it is recorded, so a lie about the replays gains nothing.
        """
        if protocol != EVENTS_PROTOCOL and (count := self._replays.get(key, 0)):
            self._time_with_graph(call or self.recorder.nothing, inputs, count, replays=False)
        else:
            self._time_with_events(lambda: None)

    def _time_call(self, call: Callable[[], Any]) -> tuple[float, float, Any]:
        start, end = self._event(enable_timing=True), self._event(enable_timing=True)
        self._synchronize()
        begin = self._clock()
        start.record()
        result = call()
        end.record()
        self._synchronize()
        wall = self._clock() - begin
        return start.elapsed_time(end) * 1e-3, wall, result

    def _time_with_events(self, call: Callable[[], Any]) -> LaunchTiming:
        self.flush()
        events, wall, result = self._time_call(call)
        host_s = wall - self._overhead
        seconds = host_s if host_s > 1.5 * events + 50e-6 else events
        return LaunchTiming(seconds, seconds, EVENTS_PROTOCOL, result)

    def _time_with_graph(
        self,
        call: Callable[[], Any],
        inputs: ReplayBuffers,
        count: int,
        before: list[Any] | None = None,
        *,
        replays: bool = True,
    ) -> LaunchTiming | None:
        """None where the call cannot be recorded, or `before` shows that not all of it was.

        Without `replays`, an empty graph is replayed in its place.
        """
        inputs.clear()
        self._synchronize()
        behind = pause_lengths() if count == _MOST_REPLAYS else [0]
        try:
            graphs = [self.recorder.record(call, pause) for pause in behind]
        except Exception:  # whatever the candidate raises where it may not wait for the device
            return None
        self._synchronize()
        spoiled_copies: list[Any] = []
        events = []
        order = [n % len(behind) for n in range(count)]
        # The last replay is read, and so must be right; the recording did not know which one that is.
        self._chance.shuffle(order)
        for n in order:
            graph, result = graphs[n]
            # Only our code runs from here on, so that nothing can hide behind the flush.
            inputs.restore(result)
            if before is not None:
                spoiled_copies = inputs.output_copies(result)
            events.append(self._timed_replay(graph if replays else self.recorder.empty))
        self._synchronize()
        if before is not None and left_untouched(before, spoiled_copies, inputs.output_copies(result)):
            return None
        raw = [start.elapsed_time(end) * 1e-3 for start, end in events]
        if len(behind) == 1:
            return LaunchTiming(typical_seconds(raw), sum(raw), GRAPH_PROTOCOL, result)
        alone = [s - pause_seconds(behind[n]) - self._pausing for s, n in zip(raw, order, strict=True)]
        return LaunchTiming(max(typical_seconds(alone), _LEAST_LAUNCH_S), sum(raw), GRAPH_PROTOCOL, result)

    def _timed_replay(self, graph: RecordedGraph) -> tuple[DeviceEvent, DeviceEvent]:
        """Events around one replay with a cold L2."""
        start, end = self._event(enable_timing=True), self._event(enable_timing=True)
        self.flush()
        start.record()
        graph.replay()
        end.record()
        return start, end


def _replay_count(seconds: float) -> int:
    return max(1, min(_MOST_REPLAYS, math.ceil(_REPLAY_TIME_S / max(seconds, 1e-6))))


def device_facts(index: int | None) -> Mapping[str, Any]:
    """The facts of a device that a label holds: `device_uuid` and `clocks`; none for a host."""
    if index is None:
        return {}
    return {"device_uuid": identity(index)[1], "clocks": device_conditions(index)}


_FIRST_REPLAY_FACTOR = 1.25
"""Times the others that a first replay may take by chance."""
_UNTOUCHED_SHARE = 0.01
"""Share of the outputs' bytes that a replay may leave alone though a plain launch writes them."""


class ReplayBuffers:
    """The memory that a launch reads and writes, for a replay. This class has none."""

    def clear(self) -> None:
        """Remove the contents, so that nothing can be computed from them while a graph is recorded."""

    def restore(self, result: Any) -> None:
        """Restore the contents, and spoil the outputs, which a replay has to write."""

    def output_copies(self, result: Any) -> list[Any]:
        """Copies of all outputs' bytes, those in `result` included."""
        return []


def typical_seconds(seconds: list[float]) -> float:
    """The mean of some replays' times but for strays; the first where it is clearly longer.

    Replays have equal inputs: a solution that remembers them may be faster from the second on, and gains nothing.
    """
    mean = mean_without_strays(seconds)
    return seconds[0] if seconds[0] > _FIRST_REPLAY_FACTOR * mean else mean


def left_untouched(before: list[Any], at_replay: list[Any], after: list[Any]) -> bool:
    """Whether a replay did not write all that a plain launch had written: not all of its work was recorded.

    The arguments are `ReplayBuffers.output_copies` after the plain launch, before the replay and after it. Equality
    is not asked for: sums by atomic additions differ from launch to launch.
    """
    if [t.shape for t in before] != [t.shape for t in after]:
        return True
    total = sum(int(t.numel()) for t in before)
    unwritten = sum(
        int(((a == s) & (b != s)).sum().item()) for b, s, a in zip(before, at_replay, after, strict=True)
    )
    return unwritten > _UNTOUCHED_SHARE * total


class DeviceTurns:
    """A lock for threads; one that holds it may take it again."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: list[tuple[float, int]] = []
        self._holder = 0
        self._depth = 0

    @contextmanager
    def turn(self, began: float) -> Iterator[None]:
        """Hold the lock; `began`: the beginning of this thread's job; the earliest job goes first."""
        me = threading.get_ident()
        with self._condition:
            if self._holder != me:
                place = began, me
                self._waiting.append(place)
                self._condition.wait_for(lambda: not self._holder and min(self._waiting) == place)
                self._waiting.remove(place)
                self._holder = me
            self._depth += 1
        try:
            yield
        finally:
            with self._condition:
                self._depth -= 1
                if not self._depth:
                    self._holder = 0
                    self._condition.notify_all()


def reserve_processors() -> tuple[int, ...]:
    """Choose a processor for cells, by the kernel's number, and keep this process off it.

    All cells of a contest are bound to it, and take turns on it, so that more threads gain nothing. Where there is no
    other, this process shares it.
    """
    processors = os.sched_getaffinity(0)
    processor = random.SystemRandom().choice(sorted(processors))
    if rest := processors - {processor}:
        os.sched_setaffinity(0, rest)
    return (processor,)
