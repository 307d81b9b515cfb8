"""The clocks: device events around launches of a tuned kernel or any other call, or around recorded replays.

The protocol of `LaunchTimer` is `do_bench`'s (L2 flushed before each launch, device events around it) with these
differences: the flush reads, and leaves no lines to be written back; hooks run outside the timed region, launches that
the host queued too late do not count, a candidate that cannot win stops after a few launches, and finalists are timed
in turns.

A host that shares its cores may need ten times as long as usual to queue a launch, for a tenth of a second or for ever.
The device then waits for it between the two events, and the wait seems to be the kernel's. More flushes in front of
each launch cost such a host as much time as they give. So the device pauses before each launch, for longer than the
host has just needed for one, until it is behind the host again.

Launches below 30 us are recorded as device graphs behind pauses (protocol `graph-`, see `forecast_autotune.timing`):
the L2 is flushed before each replay, and the time is that of the replay less its pause. A recording that fails may
leave the user's process with a random generator that believes to be recorded. So possible causes are checked before,
and after the first failure of a kernel nothing is recorded in this process any more. Calls that only their owner knows
(`CallTimer`) cannot be checked: the effects of such a failure are undone.

While kernels compile a device idles, and its clock falls: an H200's from 1980 to 345 MHz. The first candidate then
looks slower than it is, so that a device is kept busy until its clock is up.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from forecast_autotune.records import Candidate, Config
from forecast_autotune.shared_setting import SharedSetting
from forecast_autotune.timing import (
    CLOCK_INTERVAL_S,
    SHORT_LAUNCH_S,
    DeviceEvent,
    GraphRecorder,
    RecordedGraph,
    mean_without_strays,
    pause_lengths,
    pause_seconds,
    reading_flush,
)
from forecast_autotune.tuning.results import LOOK_ERROR_MS
from forecast_integrations.device import current_device
from forecast_integrations.triton.device_access import is_alive
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.protocols import is_tensor

WARM_UP_S = 0.03
"""Seconds of load after which clocks are up."""
IDLE_S = 0.5
"""Seconds without load after which they may have fallen."""
_BYTES = 64 << 20


def keep_busy(step: Callable[[], object], wait: Callable[[], object], seconds: float = WARM_UP_S) -> int:
    """Keep a device busy with `step`s for a moment; `wait` waits for all of them. Returns how many it took."""
    limit = time.perf_counter() + seconds
    steps = 0
    while time.perf_counter() < limit:
        for _ in range(50):
            step()
        steps += 50
        wait()
    return steps


def warm_up_cuda() -> None:
    """Keep the current CUDA device busy for a moment, also during a compilation; do nothing where none is in use."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if torch.cuda.is_initialized():
        with unset_fake_temporarily():
            buffer = torch.empty(_BYTES, dtype=torch.uint8, device="cuda")
            keep_busy(buffer.zero_, torch.cuda.synchronize)


_PROMPT_S = 2e-5
_INTERVAL = SharedSetting(
    sys.getswitchinterval, sys.setswitchinterval, lambda usual_s: min(usual_s, _PROMPT_S)
)


def prompt_turns() -> AbstractContextManager[None]:
    """Busy threads of this process give way within some 20 us. Several threads may ask for it at once."""
    return _INTERVAL.changed()


_CLEAR_ERRORS = 2.0
"""Standard errors by which a median has to be larger than another to count as larger."""
_SAME = 0.004
"""Share of the fastest's time below which a difference does not matter: a fraction of do_bench's own scatter."""
_EDGE_ERRORS, _EDGE_TURNS, _PATIENCE = 1.5, 1 / 8, 6
"""The same where a class's first is looked for, after all rounds; share of these after which it may be known, and the
most in multiples."""


def contenders(
    times: Sequence[Sequence[float]], edge: float = 0.0, clear: float = _CLEAR_ERRORS
) -> list[int]:
    """Return the indices of candidates whose rank more times may change; none where the choice is clear.

    The choice is the first candidate that is slower than no other by more than the share `edge` (by `LOOK_ERROR_MS`
    where that is more, up to twice the share); candidates after a clear choice do not matter. Without an edge the
    choice is the fastest, and differences below `_SAME` do not matter.
    `clear` is the number of standard errors that makes a difference clear. The error of a median is 1.25 sd / sqrt(n);
    the sd is the width of the middle 80 %, which strays do not reach, over 2.56 as in a normal distribution.
    """
    medians = [statistics.median(t) for t in times]
    errors = [_error_of_median(t) for t in times]
    undecided: set[int] = set()
    for i, (median, error) in enumerate(zip(medians, errors, strict=True)):
        near = []
        for j, (other_median, other_error) in enumerate(zip(medians, errors, strict=True)):
            lead = min(max(edge * other_median, LOOK_ERROR_MS), 2.0 * edge * other_median)
            behind, unsure = median - other_median - lead, clear * math.hypot(error, other_error)
            if behind > unsure:
                break
            if i != j and behind >= -unsure and (edge or unsure > _SAME * other_median):
                near.append(j)
        else:
            if not near:
                break
            undecided.update([i, *near])
    return sorted(undecided)


def rounds_of(slowest_ms: float, ways: int, compare_ms: float) -> int:
    """Rounds in which finalists are timed in turns, in each of which every one is launched in all of its `ways`."""
    least = _FEWEST_RECORDED if ways > 1 else 5 if slowest_ms >= _LONG_MS else 10
    return min(200, max(least, int(compare_ms / (ways * (slowest_ms + _FLUSH_MS)))))


def rounds_in_turns(
    more: Callable[[list[int], int], list[list[float]]], count: int, rounds: int, even: bool, edge: float
) -> list[list[float]]:
    """Times of `count` candidates, in order of preference; `more` gives those of some of them in some rounds.

    Only `contenders` have all `rounds`; with an `edge`, `_PATIENCE` times as many where that is what it takes.
    """
    step = max(_FEWEST_TURNS, math.ceil(rounds * (_EDGE_TURNS if edge else _TURNS)))
    if even:
        rounds, step = rounds + rounds % 2, step + step % 2
    times: list[list[float]] = [[] for _ in range(count)]
    indices, rounds_done, most = list(range(count)), 0, rounds * (_PATIENCE if edge else 1)
    while indices and rounds_done < most:
        for i, new in zip(indices, more(indices, min(step, most - rounds_done)), strict=True):
            times[i] += new
        rounds_done += step
        # An early end needs more standard errors: frequent looks are more often misled.
        clear = _EDGE_ERRORS * math.sqrt(rounds / rounds_done) if edge else _CLEAR_ERRORS
        indices = contenders(times, edge, clear)
    return times


def _error_of_median(times: Sequence[float]) -> float:
    if len(times) < 2:
        return math.inf
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return 1.25 * (tenths[-1] - tenths[0]) / 2.56 / math.sqrt(len(times))


_CALIBRATION_ROUNDS = 4
"""Replays behind each pause, to know what a pause costs: 6 ms of the device's time, once a process."""
_MOST_LATE = 4
"""Share of replays, as a divisor, that may have waited for the host."""


@dataclass(frozen=True)
class TimedLaunch:
    """One way to launch a candidate once between two events."""

    launch: Callable[[], object]
    extra_s: float = 0.0
    """Seconds between the events that are not the candidate's: a pause."""
    count: int = 1
    """Launches of the candidate between the events."""


_HOST_SLACK, _LEAST_LEAD_S = 1.5, 1e-4
"""Multiple of the host's latest time for a launch, and seconds, that a device pauses at least where it was ahead."""


def longer_lead(lead_s: float, host_s: float) -> float:
    """Seconds to pause before each launch after pauses of `lead_s` were too short; the host took `host_s` for one."""
    return max(_LEAST_LEAD_S, 2 * lead_s, _HOST_SLACK * host_s)


def queue_pause(interface: Any, seconds: float) -> None:
    """Let the device wait, if it can; a clock that is not up makes it wait for longer."""
    if seconds > 0 and (sleep := getattr(interface, "_sleep", None)) is not None:
        sleep(round(seconds / pause_seconds(1)))


class ShortLaunchRecorder:
    """Records launches on one device; made once a process, as it has to find what pauses cost there."""

    def __init__(self, interface: Any, flush: Callable[[], object]) -> None:
        self._recorder, self._interface = GraphRecorder(interface), interface
        self.stream: Any = self._recorder.stream
        """Everything is recorded on it."""
        lead_s, late = 0.0, list[bool]()

        def timed_replay(graph: RecordedGraph) -> tuple[DeviceEvent, DeviceEvent]:
            start, end = (interface.Event(enable_timing=True) for _ in range(2))
            queue_pause(interface, lead_s)
            flush()
            start.record()
            graph.replay()
            end.record()
            late.append(start.query())
            return start, end

        while True:
            begin = time.perf_counter()
            self._pause_cost_s = self._recorder.pause_cost(
                timed_replay, interface.synchronize, _CALIBRATION_ROUNDS
            )
            if _MOST_LATE * sum(late) <= len(late) or lead_s >= LaunchTimer.most_lead_s:
                break
            lead_s = longer_lead(lead_s, (time.perf_counter() - begin) / len(late))
            late.clear()

    def record(self, launch: Callable[[], object], *, pool: Any = None, count: int = 1) -> list[TimedLaunch]:
        """`count` launches behind every pause of `pause_lengths`; each replayed once, so that the device holds it."""
        launches = []
        for pause in pause_lengths():
            graph, _ = self._recorder.record(lambda: [launch() for _ in range(count)], pause, pool)
            graph.replay()
            launches.append(TimedLaunch(graph.replay, pause_seconds(pause) + self._pause_cost_s, count))
        return launches

    def record_allocating(self, call: Callable[[], object]) -> list[TimedLaunch] | None:
        """Record a call that may allocate memory: its graphs have a pool of their own, which is freed with them.

        None where it cannot be recorded; then the process is as before. Raises RuntimeError where it is not.
        """
        pool = self._interface.graph_pool_handle()
        with self._interface.stream(self.stream):
            call()  # libraries take their workspace of a stream at the first call there
        try:
            return self.record(call, pool=pool)
        except Exception:
            self._put_right(pool)
            return None

    def _put_right(self, pool: Any) -> None:
        """Undo the effects of a recording that could not be ended. Raises RuntimeError where that fails.

        The allocator still counts as recording, and would refuse to free memory; before torch 2.13 the random
        generator does so, too, until another recording ends well.
        """
        with suppress(RuntimeError):
            self._interface._sleep(1)  # raises an error that is still pending
        memory: Any = getattr(self._interface, "memory", None)
        end, release = (getattr(memory, n, None) for n in ("_cuda_endAllocateToPool", "_cuda_releasePool"))
        if end is not None and release is not None:
            device = self._interface.current_device()
            with suppress(RuntimeError):  # where the recording could be ended, there is nothing to end
                end(device, pool)
                release(device, pool)
        self._interface.synchronize()
        self._recorder.record(self._recorder.nothing)


_RECORDERS: WeakKeyDictionary[Any, dict[int, ShortLaunchRecorder | None]] = WeakKeyDictionary()
"""By driver and device of this process; None for one that cannot record, or once failed to."""
_GRAPH_MEMBERS = ("CUDAGraph", "Stream", "stream", "current_stream", "graph_pool_handle", "_sleep")


def _may_be_recorded(call: KernelCall, candidate: Candidate) -> bool:
    """Whether a launch runs no hooks but the tuner's own."""
    import triton

    tuner = call.tuner
    hooks = call.configs[candidate].pre_hook or tuner.user_defined_pre_hook or tuner.user_defined_post_hook
    return not (hooks or candidate.variant in call.functions or _has_launch_hooks(triton))


def _bare_launch(call: KernelCall, candidate: Candidate) -> Callable[[], object] | None:
    """A launch that only queues the kernel, after one trial launch; None where a launch does more, or may."""
    from triton.runtime.autotuner import Heuristics
    from triton.runtime.jit import JITFunction

    function: Any = call.function(candidate)
    keywords = call.launch_keywords(candidate)
    while isinstance(function, Heuristics):  # they may read tensors
        arguments = dict(zip(function.arg_names, call.args, strict=False))
        for name, value in function.values.items():
            keywords[name] = value({**arguments, **keywords})
        function = function.fn
    if not isinstance(function, JITFunction) or getattr(function, "pre_run_hooks", None):
        return None
    grid = _CachedGrid(keywords["grid"])
    keywords["grid"] = grid if callable(keywords["grid"]) else keywords["grid"]

    def launch() -> object:
        return function.run(*call.args, **keywords)

    metadata: Any = getattr(launch(), "metadata", None)
    takes_memory = any(getattr(metadata, name, 0) for name in ("global_scratch_size", "profile_scratch_size"))
    return None if metadata is None or takes_memory else launch


class _CachedGrid:
    """A user's function for the grid, called once: it may read tensors."""

    def __init__(self, function: Any) -> None:
        self._function, self._grid = function, None

    def __call__(self, meta: Any) -> Any:
        if self._grid is None:
            self._grid = self._function(meta)
        return self._grid


def _has_launch_hooks(triton: Any) -> bool:
    """Whether a profiler, say, has a hook at launches. Triton has a chain of them since 3.4."""
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    hooks = [getattr(runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook")]
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


_FIRST_FLUSHES = 2
"""Flushes before the first launch of many: the host queues the next one meanwhile."""
_L2_FACTOR = 2
"""Times the L2 that is read before a replay. On an H200 (60 MB) that empties it as well as all of Triton's 256 MB, and
a replay of 5 us takes 56 us with it instead of 86. Launches by the host are queued no faster than all is read."""
_FLUSH_MS = 0.08
"""Time to flush 256 MB on a fast card."""
_WARM_PAUSE_S = 6e-5
"""Seconds of a pause in the place of a flush."""
_HUNGRY_MS, _HOT_S = 0.1, 0.1
"""Launches of so many ms or more are slower, if the program kept the device busy so many seconds ago, by more than
finalists may be: an H200's by 22 % after 10 ms, 16 % after 30 and 4.5 % after 60 to 100."""
_LONG_MS = 1.0
"""Beyond this a launch is told by few repetitions: neither the clock nor the first launch matters to it."""
_WARM_LAUNCHES = 8
"""Launches in a graph where data are to be in the L2: a program has its own there one after another, and what a launch
adds to the one before differs between configs by as much as short kernels do."""
_FEWEST_LAUNCHES, _FEWEST_LONG, _FEWEST_RECORDED = 8, 3, 3
"""Launches of a look, those of long kernels, and rounds over all pauses of recorded ones. Short launches are even in
number: every other one of a device's takes longer."""
_TURNS, _FEWEST_TURNS = 1 / 6, 5
"""Share of the rounds in turns after which finalists may be clear of each other, and how many these are at least."""
_HOPELESS_AT_ONCE = 1.5
"""Times hopeless: so slow that a single launch of a long kernel is enough, disturbed or not."""

_LOOK_MS, _COMPARE_MS = 2.5, 24.0
"""Milliseconds of the device for a look at a candidate, and for each finalist: these are timed in turns, which tells
more."""
_CONTENDER, _HOPELESS = 1.1, 2.0
"""Multiples of the fastest so far: a slower one's recording is not kept, or it is timed no longer than the estimate
took."""

_LAST_BUSY: WeakKeyDictionary[Any, dict[int, float]] = WeakKeyDictionary()
"""When the last timer saw a device at work, by driver and device of this process."""


class LaunchTimeoutError(TimeoutError):
    """The device gave no answer in time: the launch still occupies it."""


def l2_flush(active: Any) -> Callable[[], object]:
    """A function that queues a flush of the L2 on Triton's `active` driver. Raises torch's `OutOfMemoryError`."""
    return l2_flushes(active)[0]


def l2_flushes(active: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """`l2_flush`, and one that reads just enough to empty the L2; the same twice where a cache is behind it (AMD)."""
    import torch

    buffer = active.get_empty_cache_for_benchmark()
    if not is_tensor(buffer):
        # The buffer of a null device, which clears it itself.
        return (partial(active.clear_cache, buffer),) * 2
    tensor: Any = buffer
    flush, l2_bytes = reading_flush(torch, tensor), 0
    if tensor.is_cuda and torch.version.hip is None:
        l2_bytes = current_device().l2_bytes
    count = _L2_FACTOR * l2_bytes // tensor.element_size()
    return flush, reading_flush(torch, tensor[:count]) if 0 < count < len(tensor) else flush


def is_idle(interface: Any) -> bool:
    """Whether the current stream has nothing to do; a device that knows of no streams is idle."""
    current = getattr(interface, "current_stream", None)
    return current is None or bool(current().query())


class PlainCalls:
    """Functions that launch, by candidate, with no hooks around them; as much of a `KernelCall` as timing needs."""

    def __init__(self, functions: dict[Candidate, Callable[[], object]]) -> None:
        self.functions = functions

    def has_hooks(self, candidate: Candidate) -> bool:
        """Nothing has to run before or after a timed launch."""
        return False

    def launcher(self, candidate: Candidate) -> Callable[[], object]:
        """A function that launches once."""
        return self.functions[candidate]

    def launch_once(self, candidate: Candidate) -> None:
        """Launch once."""
        self.functions[candidate]()


class LaunchTimer:
    """Times with device events; `_record_ways` lists the launches that can be recorded."""

    compare_ms = _COMPARE_MS
    most_lead_s = 1e-3
    """Seconds that a device pauses before a launch at most: no pause helps a call that waits for the device."""

    def __init__(self, call: KernelCall | PlainCalls, *, warm: bool = False) -> None:
        """`warm`: launches find their data in the L2, as far as it holds them."""
        from triton.runtime.driver import driver

        self._call: Any = call
        self._driver = driver.active
        self._interface = driver.active.get_device_interface()
        (self._flush, self._replay_flush), cache_state = self._flusher(driver)
        self._warm, cache_state = warm, "l2warm" if warm else cache_state
        self.protocol = f"events-{cache_state}-3"
        """The protocol of launches that are not recorded."""
        self._recorded_protocol = f"graph-{cache_state}-{3 if warm else 2}"
        self._estimates: dict[Candidate, float] = {}
        """Milliseconds of one launch, roughly."""
        self._first_ms: dict[Candidate, float] = {}
        self._protocols: dict[Candidate, str] = {}
        self._host_bound: set[Candidate] = set()
        self._recordings: dict[Candidate, list[TimedLaunch]] = {}
        """The recordings of contenders: their finals replay the same graphs."""
        self._lead_s = {False: 0.0, True: 0.0}
        """Seconds that the device pauses before a launch by the host, and before a replay."""
        self._host_s = 0.0
        """Seconds that the host took for each of the launches that it queued last."""
        self._device = int(driver.active.get_current_device())
        self._last_busy = _LAST_BUSY.setdefault(driver.active, {})
        self._busy = self._last_busy.get(self._device, -math.inf)
        """Time of the device's last known work, by `time.perf_counter`; at first from an earlier timer."""
        self._hot_until = time.perf_counter() + _HOT_S if is_idle(self._interface) else math.inf
        """Time after which the program's earlier launches do not matter; a launch still running shows in `first`."""
        self._warm_up_flushes = 0
        """Flushes that take as long as a warm-up; 0 while that is not known."""

    def _flusher(self, driver: Any) -> tuple[tuple[Callable[[], object], Callable[[], object]], str]:
        import torch

        try:
            return l2_flushes(driver.active), "l2read"
        except torch.cuda.OutOfMemoryError:
            # The application took the memory first (a KV cache, say): a warm cache is better than none.
            return (lambda: None, lambda: None), "noflush"

    def protocol_of(self, candidate: Candidate) -> str:
        """The protocol of a candidate's latest times."""
        return self._protocols.get(candidate, self.protocol)

    def is_host_bound(self, candidate: Candidate) -> bool:
        """Whether the candidate's latest times contain waits for the host, which queues it slower than it runs."""
        return candidate in self._host_bound

    def _event(self) -> Any:
        return self._interface.Event(enable_timing=True)

    def _event_arguments(self) -> tuple[Any, ...]:
        """Return the arguments of an event's record: the launches' stream, as asking for it costs the host some 20 us.

        Nothing for a device that knows of no streams.
        """
        current = getattr(self._interface, "current_stream", None)
        return () if current is None else (current(),)

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """Launch once and wait, at most `timeout_s`. Raises `LaunchTimeoutError` when it does not come back."""
        self._interface.synchronize()  # what `stay_awake` queued is not the candidate's
        self._hot_until = min(self._hot_until, time.perf_counter() + _HOT_S)
        self._call.launch_once(candidate)
        end = self._event()
        end.record()
        begin = time.perf_counter()
        pause = 0.0
        while not end.query():
            if time.perf_counter() > begin + timeout_s:
                raise LaunchTimeoutError(f"no answer from the device after {timeout_s:g} s")
            time.sleep(pause)
            pause = min(0.01, pause + 1e-5)
        self._first_ms[candidate] = 1e3 * (time.perf_counter() - begin)

    def stay_awake(self) -> None:
        """Give the device work while compilations run, so that it needs no warm-up later.

        The work is queued, and only the first time waited for: a host with few cores needs them to compile.
        """
        if time.perf_counter() - self._busy < IDLE_S / 2:
            return
        with suppress(RuntimeError):  # a broken context shows in the next launch, which somebody waits for
            if not self._warm_up_flushes:
                self._warm_up_flushes = keep_busy(self._flush, self._interface.synchronize)
            else:
                for _ in range(self._warm_up_flushes):
                    self._flush()
        self._busy = time.perf_counter()

    def time_adaptively(self, candidate: Candidate, best_ms: float) -> list[float]:
        """Milliseconds per launch: few for a candidate that cannot win.

        For a recorded one, milliseconds per round: the mean of as many launches as there are pauses.
        """
        self._wake()
        self._protocols[candidate] = self.protocol
        hopeless_ms = _HOPELESS * best_ms + 1e3 * CLOCK_INTERVAL_S
        times = self._estimate(candidate, hopeless_ms)
        if min(times) >= _HUNGRY_MS and self._rest():
            times = self._estimate(candidate, hopeless_ms)
        # The fastest of them decides whether it is hopeless: a disturbance only ever adds time.
        estimate = self._estimates[candidate] = max(min(times), 1e-3)
        # Where it waited for the host, it may be as short as any: what is recorded does not wait.
        if estimate > hopeless_ms and candidate not in self._host_bound:
            return times
        if min(estimate, best_ms) <= 1e3 * SHORT_LAUNCH_S and (ways := self._record(candidate)):
            times, each_ms, least = [], len(ways) * (estimate + _FLUSH_MS), _FEWEST_RECORDED
        elif estimate > hopeless_ms:
            return times
        else:
            ways, each_ms = [self._plain(candidate)], estimate + _FLUSH_MS
            least = _FEWEST_LONG if estimate >= _LONG_MS else _FEWEST_LAUNCHES
        times = self._extend(times, candidate, ways, max(least, int(_LOOK_MS / each_ms)))
        if statistics.median(times) > _CONTENDER * best_ms:
            self._recordings.pop(candidate, None)
        return times

    def _wake(self) -> None:
        """Give a device that may have idled work, until its clock is up."""
        if time.perf_counter() - self._busy > IDLE_S:
            self._warm_up_flushes = keep_busy(self._flush, self._interface.synchronize)

    def _rest(self) -> bool:
        """Flush, once, while launches before this timer may slow others down; returns whether they may have."""
        hot_s, self._hot_until = self._hot_until - time.perf_counter(), -math.inf
        if hot_s > 0:
            keep_busy(self._flush, self._interface.synchronize, min(hot_s, WARM_UP_S))
        return hot_s > 0

    def _wait(self) -> None:
        """Wait for what was queued."""
        self._interface.synchronize()

    def _extend(
        self, times: list[float], candidate: Candidate, ways: Sequence[TimedLaunch], count: int
    ) -> list[float]:
        """Return `times` with more of them, up to `count` and at most 200."""
        more = min(count, 200) - len(times)
        if more <= 0:
            return times
        if len(ways) == 1 and self._estimates[candidate] < _LONG_MS:
            more += more % 2
        return times + self._rounds([candidate], [ways], more)[0]

    def _estimate(self, candidate: Candidate, hopeless_ms: float) -> list[float]:
        """Milliseconds of a few launches."""
        if self._first_ms.get(candidate, 0.0) < _LONG_MS:
            times = self._launches([candidate], 7)[0]
            return times[1:] or times
        times = self._launches([candidate], 1)[0]
        if times[0] > _HOPELESS_AT_ONCE * hopeless_ms:
            return times
        return times + self._launches([candidate], 1)[0]

    def in_turns(self, candidates: Sequence[Candidate], edge: float = 0.0) -> list[list[float]]:
        """Milliseconds per launch (or round, see `time_adaptively`) of each candidate; `edge` as in `contenders`.

        Launches are interleaved, so that drifting clocks meet all candidates alike. All are recorded or none.
        """
        for candidate in candidates:
            if candidate not in self._estimates:
                self._estimates[candidate] = min(self._launches([candidate], 3)[0])
        estimates = [self._estimates[c] for c in candidates]
        ways: list[list[TimedLaunch]] = []
        if min(estimates) <= 1e3 * SHORT_LAUNCH_S:
            for candidate in candidates:
                if not (recorded_ways := self._record(candidate)):
                    break
                ways.append(recorded_ways)
        replays = len(ways) == len(candidates)
        ways = ways if replays else [[self._plain(c)] for c in candidates]
        self._protocols |= dict.fromkeys(candidates, self._recorded_protocol if replays else self.protocol)
        slowest_ms = max(estimates) + 1e3 * self._lead_s[replays]
        rounds = rounds_of(slowest_ms, len(ways[0]), self.compare_ms)

        def more(indices: list[int], count: int) -> list[list[float]]:
            return self._rounds([candidates[i] for i in indices], [ways[i] for i in indices], count)

        return rounds_in_turns(more, len(candidates), rounds, not replays, edge)

    def _record(self, candidate: Candidate) -> list[TimedLaunch]:
        """Return recorded launches of the candidate behind pauses; none where it cannot be recorded."""
        ways = self._recordings.get(candidate) or self._record_ways(candidate)
        if not ways:
            return []
        self._recordings[candidate] = ways
        self._protocols[candidate] = self._recorded_protocol
        return ways

    def _record_ways(self, candidate: Candidate) -> list[TimedLaunch] | None:
        """Launches of a candidate that has run before, behind pauses; None where it cannot be recorded."""
        return None

    def _recorder(self) -> ShortLaunchRecorder | None:
        """Return the device's recorder, made in some 50 ms at the first call; None where nothing can be recorded."""
        recorders = _RECORDERS.setdefault(self._driver, {})
        if self._device not in recorders:
            recorders[self._device] = None
            # Elsewhere a pause has other cycles.
            is_cuda = self._driver.get_current_target().backend == "cuda"
            if is_cuda and all(hasattr(self._interface, n) for n in _GRAPH_MEMBERS):
                with suppress(RuntimeError):
                    recorders[self._device] = ShortLaunchRecorder(self._interface, self._flush)
        return recorders[self._device]

    def _record_no_more(self) -> None:
        """Stop recording on the device for the rest of this process."""
        _RECORDERS[self._driver][self._device] = None

    def _plain(self, candidate: Candidate) -> TimedLaunch:
        return TimedLaunch(self._call.launcher(candidate))

    def _launches(self, candidates: Sequence[Candidate], rounds: int) -> list[list[float]]:
        """Milliseconds of `rounds` launches of each candidate, in turns and not recorded."""
        return self._rounds(candidates, [[self._plain(c)] for c in candidates], rounds)

    def _rounds(
        self, candidates: Sequence[Candidate], ways: Sequence[Sequence[TimedLaunch]], rounds: int
    ) -> list[list[float]]:
        """Milliseconds of each candidate in `rounds`, in each of which it is launched in all of its ways."""
        replays = len(ways[0]) > 1
        while True:
            with prompt_turns():
                slots = self._queue(candidates, ways, rounds)
            self._wait()
            self._busy = time.perf_counter()
            late = [sum(late for *_, late in slot) for slot in slots]
            most = _MOST_LATE if replays else 2  # the mean over all pauses needs most of them
            slow = {c for c, n, slot in zip(candidates, late, slots, strict=True) if most * n > len(slot)}
            lead_s = self._lead_s[replays]
            if not slow or lead_s >= self.most_lead_s:
                break
            self._lead_s[replays] = min(self.most_lead_s, longer_lead(lead_s, self._host_s))
        self._host_bound = (self._host_bound - set(candidates)) | slow
        return [_round_ms(slot, own) for slot, own in zip(slots, ways, strict=True)]

    def _queue(
        self, candidates: Sequence[Candidate], ways: Sequence[Sequence[TimedLaunch]], rounds: int
    ) -> list[list[tuple[DeviceEvent, DeviceEvent, bool]]]:
        """Queue launches between events; the third entry tells whether a launch came late.

        If the device has passed the first event before the second is queued, it may have waited for the host, and the
        wait would count as kernel time.
        """
        call, place = self._call, self._event_arguments()
        has_hooks = [call.has_hooks(c) for c in candidates]
        count = max(map(len, ways))
        flush, lead_s = self._replay_flush if count > 1 else self._flush, self._lead_s[count > 1]
        events = [[(self._event(), self._event()) for _ in range(rounds * count)] for _ in candidates]
        slots: list[list[tuple[DeviceEvent, DeviceEvent, bool]]] = [[] for _ in candidates]
        begin = time.perf_counter()
        for _ in range(_FIRST_FLUSHES):
            flush()
        for i in range(rounds * count):
            # Back and forth: a device's launches take longer and shorter in turn, by some 0.5 us.
            for j, candidate in list(enumerate(candidates))[:: -1 if i % 2 else 1]:
                full = call.run_before_hooks(candidate) if has_hooks[j] else None
                launch = ways[j][i % count].launch
                if self._warm:  # the launch leaves its data in the L2
                    launch()
                    queue_pause(self._interface, _WARM_PAUSE_S + lead_s)
                else:
                    queue_pause(self._interface, lead_s)
                    flush()
                start, end = events[j][i]
                start.record(*place)
                launch()
                end.record(*place)
                slots[j].append((start, end, start.query()))
                if full is not None:
                    call.run_after_hook(full)
        self._host_s = (time.perf_counter() - begin) / max(1, rounds * count * len(candidates))
        return slots

    def is_alive(self) -> bool:
        """False when an earlier launch has broken the context for good."""
        return is_alive()

    def close(self) -> None:
        """Free the flush buffer and what was recorded."""
        self._last_busy[self._device] = self._busy
        self._flush = self._replay_flush = lambda: None
        self._recordings.clear()


class EventTimer(LaunchTimer):
    """Times the candidates of one call of a tuned kernel."""

    most_lead_s = 4e-3

    def stay_awake(self) -> None:
        """Give the device work as any timer does, and make the recorder before a short launch needs it."""
        super().stay_awake()
        with suppress(RuntimeError):
            self._recorder()

    def _record_ways(self, candidate: Candidate) -> list[TimedLaunch] | None:
        """Record launches that do nothing else: no hooks of the user's or of a profiler, no memory for the kernel, no
        variants with host code of their own, no interpreted kernels.

        Arguments that the tuner itself clears or restores are cleared and restored around replays, too.
        """
        call: KernelCall = self._call
        if not _may_be_recorded(call, candidate) or (recorder := self._recorder()) is None:
            return None
        full = call.run_before_hooks(candidate)
        try:
            launch = _bare_launch(call, candidate)
            count = _WARM_LAUNCHES if self._warm else 1
            return None if launch is None else recorder.record(launch, count=count)
        except Exception:
            # Launches are then timed without a recording.
            self._record_no_more()
            return None
        finally:
            call.run_after_hook(full)


def _round_ms(
    slot: Sequence[tuple[DeviceEvent, DeviceEvent, bool]], ways: Sequence[TimedLaunch]
) -> list[float]:
    """Milliseconds per round: a launch that was not late, or the mean of those behind all pauses."""
    count = len(ways)
    if count == 1:
        clean = [(start, end) for start, end, late in slot if not late]
        return [start.elapsed_time(end) for start, end in clean or [(s, e) for s, e, _ in slot]]
    # A late one is a stray if it waited for long, and as good as the others otherwise.
    seconds = [
        (1e-3 * start.elapsed_time(end) - (way := ways[i % count]).extra_s) / way.count
        for i, (start, end, _) in enumerate(slot)
    ]
    means = [mean_without_strays(seconds[i : i + count]) for i in range(0, len(seconds), count)]
    return [1e3 * max(mean, 1e-7) for mean in means]


_ONLY = Candidate(Config.of({}))
"""The candidate of the one call that a `CallTimer` times."""
_LEAST_SHARE = 0.5
"""Share of a launch's time below which its replay must lack work."""


@dataclass(frozen=True)
class CallTime:
    """Time that a call occupies the device."""

    ms: float
    protocol: str
    host_bound: bool = False
    """Whether the time contains waits for the host, which queues the call slower than the device runs it."""
    recordable: bool = True
    """False if it was to be recorded as a graph and could not be."""


class CallTimer(LaunchTimer):
    """Times one call after another. They have run before, and the device is awake.

    Launches of a call have to go to the current stream, and that has to be `stream`: enter `on_stream` before
    calls are made that remember a stream.
    """

    def __init__(self) -> None:
        self._calls = PlainCalls({})
        super().__init__(self._calls)
        self._may_record = self._recordable = True
        recorder = self._recorder()
        self.stream: Any = None if recorder is None else recorder.stream
        """None where no call can be recorded on this device."""

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Make `stream` the current one, after the work queued on the present stream and before its later work."""
        home = self._interface.current_stream()
        self.stream.wait_stream(home)
        try:
            with self._interface.stream(self.stream):
                yield
        finally:
            home.wait_stream(self.stream)

    def time(self, call: Callable[[], object], best_ms: float, *, may_record: bool = True) -> CallTime:
        """Milliseconds of one call; few launches where it cannot be better than `best_ms`.

        Raises what the call raises, unless it does so only while it is recorded. Graphs are gone when it returns.
        """
        self._calls.functions[_ONLY], self._lead_s = call, {False: 0.0, True: 0.0}
        self._may_record, self._recordable = may_record, True
        try:
            times = self.time_adaptively(_ONLY, best_ms)
            return CallTime(
                statistics.median(times),
                self.protocol_of(_ONLY),
                self.is_host_bound(_ONLY),
                self._recordable,
            )
        finally:
            self._recordings.clear()
            self._calls.functions.clear()

    def _wake(self) -> None:
        pass

    def _record_ways(self, candidate: Candidate) -> list[TimedLaunch] | None:
        """Launches on streams other than the current one are not recorded."""
        if not self._may_record:
            return None
        ways, recorder = None, self._recorder()
        try:
            ways = None if recorder is None else recorder.record_allocating(self._calls.functions[_ONLY])
        except RuntimeError:
            self._record_no_more()
        if ways and not self._does_all(ways):
            ways = None
        self._recordable = ways is not None
        return ways

    def _does_all(self, ways: list[TimedLaunch]) -> bool:
        """Whether replays take about as long as launches: launches on another stream are not in them."""
        if self.is_host_bound(_ONLY):  # then times of launches are no reference
            return True
        (replay_ms,) = self._rounds([_ONLY], [ways], 1)
        return replay_ms[0] >= _LEAST_SHARE * self._estimates[_ONLY]


class _OneStreamTimer(LaunchTimer):
    """Waits for the current stream alone: a wait for the device would end a graph that another thread records."""

    compare_ms = 1.5
    """Some fifteen launches of a short call."""

    def _wait(self) -> None:
        self._interface.current_stream().synchronize()


def times_in_turns(calls: Sequence[Callable[[], object]], *, one_stream: bool = False) -> list[list[float]]:
    """Milliseconds of launches of each of some calls that have run before, in turns, each behind a flush.

    `one_stream`: nothing but the current stream is waited for. Very short ones may hold waits for the host.
    """
    launches = PlainCalls({Candidate(Config.of({"call": place})): call for place, call in enumerate(calls)})
    timer = (_OneStreamTimer if one_stream else LaunchTimer)(launches)
    try:
        return timer.in_turns(list(launches.functions))
    finally:
        timer.close()
