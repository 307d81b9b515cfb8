"""Candidates whose launches are recorded as device graphs behind pauses, and those that cannot be.

A recording that fails may leave the user's process with a random generator that believes to be recorded. So what
could fail is asked for before, and after the first failure of a kernel nothing is recorded in this process any more.
Of calls that only their owner knows (`record_call`) nothing can be asked: what such a failure leaves is put right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from forecast_autotune.records import Candidate
from forecast_autotune.timing.pauses import pause_lengths, pause_seconds
from forecast_autotune.timing.recorded_launches import DeviceEvent, GraphRecorder, RecordedGraph
from forecast_integrations.triton.problem.call import KernelCall

_CALIBRATION_ROUNDS = 4
"""Replays behind each pause, to know what a pause costs: 6 ms of the device's time, once a process."""


@dataclass(frozen=True)
class TimedLaunch:
    """One way to launch a candidate once between two events."""

    launch: Callable[[], object]
    extra_s: float = 0.0
    """Seconds between the events that are not the candidate's: a pause."""


class ShortLaunchRecorder:
    """Records launches on one device; made once a process, as it has to find what pauses cost there."""

    def __init__(self, interface: Any, flush: Callable[[], None]) -> None:
        self._recorder, self._interface = GraphRecorder(interface), interface

        def timed_replay(graph: RecordedGraph) -> tuple[DeviceEvent, DeviceEvent]:
            start, end = (interface.Event(enable_timing=True) for _ in range(2))
            flush()
            start.record()
            graph.replay()
            end.record()
            return start, end

        self._pause_cost_s = self._recorder.pause_cost(
            timed_replay, interface.synchronize, _CALIBRATION_ROUNDS
        )

    @property
    def stream(self) -> Any:
        """What everything is recorded on."""
        return self._recorder.stream

    def record(
        self, launch: Callable[[], object], *, between: bool = False, pool: Any = None
    ) -> list[TimedLaunch]:
        """The launch behind every pause of `pause_lengths`; each was replayed once, so that the device holds it."""
        found = []
        for pause in pause_lengths(between=between):
            graph, _ = self._recorder.record(launch, pause, pool)
            graph.replay()
            found.append(TimedLaunch(graph.replay, pause_seconds(pause) + self._pause_cost_s))
        return found

    def record_allocating(
        self, call: Callable[[], object], *, between: bool = False
    ) -> list[TimedLaunch] | None:
        """The same of a call that may take memory: its graphs have a pool of their own, which goes with them.

        None where it cannot be recorded; then the process is as it was. Raises RuntimeError where it is not.
        """
        pool = self._interface.graph_pool_handle()
        with self._interface.stream(self.stream):
            call()  # libraries take their workspace of a stream at the first call there
        try:
            return self.record(call, between=between, pool=pool)
        except Exception:
            self._put_right(pool)
            return None

    def _put_right(self, pool: Any) -> None:
        """Take back what a recording left that could not be ended. Raises RuntimeError where that fails.

        The allocator believes that it goes on, and would refuse to give memory back; before torch 2.13 the random
        generator does so, too, until another recording ends well.
        """
        with suppress(RuntimeError):
            self._interface._sleep(1)  # hears of an error that the library has not asked for
        memory: Any = getattr(self._interface, "memory", None)
        end, release = (getattr(memory, n, None) for n in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
        if end is not None and release is not None:
            device = self._interface.current_device()
            with suppress(RuntimeError):  # it is not, where the recording could be ended
                end(device, pool)
                release(device, pool)
        self._interface.synchronize()
        self._recorder.record(self._recorder.nothing)


_RECORDERS: WeakKeyDictionary[Any, dict[int, ShortLaunchRecorder | None]] = WeakKeyDictionary()
"""By driver and device of this process; None for one that cannot record, or once failed to."""
_NEEDED = ("CUDAGraph", "Stream", "stream", "current_stream", "graph_pool_handle", "_sleep")


def _recorder_of(driver: Any, flush: Callable[[], None]) -> ShortLaunchRecorder | None:
    """The active device's recorder; made where it is asked for first."""
    made, device = _RECORDERS.setdefault(driver, {}), int(driver.get_current_device())
    if device not in made:
        made[device] = None
        interface = driver.get_device_interface()
        # Elsewhere a pause has other cycles.
        if driver.get_current_target().backend == "cuda" and all(hasattr(interface, n) for n in _NEEDED):
            with suppress(RuntimeError):
                made[device] = ShortLaunchRecorder(interface, flush)
    return made[device]


def prepare_recording(flush: Callable[[], None]) -> None:
    """Make ready to record on the active device, which takes some 50 ms, once a process."""
    from triton.runtime.driver import driver

    _recorder_of(driver.active, flush)


def recording_stream(flush: Callable[[], None]) -> Any:
    """The stream that calls are recorded on, on the active device; None where nothing can be recorded."""
    from triton.runtime.driver import driver

    recorder = _recorder_of(driver.active, flush)
    return None if recorder is None else recorder.stream


def record_call(
    call: Callable[[], object], flush: Callable[[], None], *, between: bool = False
) -> list[TimedLaunch] | None:
    """Launches of any call that has run before, recorded behind pauses; None where they cannot be.

    What it launches on streams other than the current one is not recorded.
    """
    from triton.runtime.driver import driver

    active = driver.active
    recorder = _recorder_of(active, flush)
    if recorder is None:
        return None
    try:
        return recorder.record_allocating(call, between=between)
    except RuntimeError:
        _RECORDERS[active][int(active.get_current_device())] = None
        return None


def record_launches(
    call: KernelCall, candidate: Candidate, flush: Callable[[], None], *, between: bool = False
) -> list[TimedLaunch] | None:
    """Launches of a candidate that has run before, recorded behind pauses; None where they cannot be.

    Not recorded is what does more at a launch than to launch: hooks of the user's or of a profiler, memory taken
    for the kernel, variants with code of their own on the host, kernels that are interpreted. Arguments that the
    tuner itself clears or restores are cleared and restored around replays, too.
    """
    from triton.runtime.driver import driver

    active = driver.active
    if not _may_be_recorded(call, candidate) or (recorder := _recorder_of(active, flush)) is None:
        return None
    full = call.run_before_hooks(candidate)
    try:
        launch = _bare_launch(call, candidate)
        return None if launch is None else recorder.record(launch, between=between)
    except Exception:
        # Whatever it was: launches that are not recorded need none of this.
        _RECORDERS[active][int(active.get_current_device())] = None
        return None
    finally:
        call.run_after_hook(full)


def _may_be_recorded(call: KernelCall, candidate: Candidate) -> bool:
    """Whether nobody but the tuner itself does anything at a launch."""
    import triton

    tuner = call.tuner
    hooked = call.configs[candidate].pre_hook or tuner.user_defined_pre_hook or tuner.user_defined_post_hook
    return not (hooked or candidate.variant in call.functions or _has_launch_hooks(triton))


def _bare_launch(call: KernelCall, candidate: Candidate) -> Callable[[], object] | None:
    """A launch that asks the device for nothing; it is made once to see whether it is one."""
    from triton.runtime.autotuner import Heuristics
    from triton.runtime.jit import JITFunction

    function: Any = call.function(candidate)
    keywords = call.launch_keywords(candidate)
    while isinstance(function, Heuristics):  # they may read tensors
        named = dict(zip(function.arg_names, call.args, strict=False))
        for name, value in function.values.items():
            keywords[name] = value({**named, **keywords})
        function = function.fn
    if not isinstance(function, JITFunction) or getattr(function, "pre_run_hooks", None):
        return None
    grid = _RememberedGrid(keywords["grid"])
    keywords["grid"] = grid if callable(keywords["grid"]) else keywords["grid"]

    def launch() -> object:
        return function.run(*call.args, **keywords)

    metadata: Any = getattr(launch(), "metadata", None)
    takes_memory = any(getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size"))
    return None if metadata is None or takes_memory else launch


class _RememberedGrid:
    """A user's function for the grid, called once: it may read tensors."""

    def __init__(self, given: Any) -> None:
        self._given, self._found = given, None

    def __call__(self, meta: Any) -> Any:
        if self._found is None:
            self._found = self._given(meta)
        return self._found


def _has_launch_hooks(triton: Any) -> bool:
    """Whether anybody listens to launches, a profiler for instance. Triton has a chain of them since 3.4."""
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    hooks = [getattr(runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook")]
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
