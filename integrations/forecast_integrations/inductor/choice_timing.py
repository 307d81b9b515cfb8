"""Choices timed by the clock of the Triton integration instead of Inductor's.

Inductor puts events around a call, again and again for 25 ms. Where the host needs longer to launch it than the device
to run it (a library's product of 16 rows: 46 us for 19), that is what it tells, and whichever choice the host launches
fastest wins. This clock queues launches ahead of the device, replays those below 30 us from recorded graphs, and stops
early where a choice cannot win. One clock decides between all choices of an operation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from forecast_autotune.records import Measurement, Problem
from forecast_autotune.settings import Mode
from forecast_integrations.inductor.choices.records import candidate_of, unwrap_choice

if TYPE_CHECKING:
    import torch
    from torch._inductor.ir import ChoiceCaller

    from forecast_integrations.inductor.session import TuningSession
    from forecast_integrations.triton.timer.timers import CallTime, CallTimer

ChoiceTimings: TypeAlias = "dict[ChoiceCaller, float]"
"""Milliseconds by choice; inf for a failure."""
MAY_BE_SHORT_MS = 0.15
"""Up to here Inductor's own time may be the host's: it needs 0.02 to 0.1 ms to launch, on a busy machine more."""
INDUCTOR_CLOCK = "inductor"
"""Timing protocol of Inductor's own benchmarker, with its own number of repetitions."""
_CLOCK_ATTRIBUTE = "forecast_autotune_clock"
"""Attribute of a choice: its latest `CallTime`, where Inductor got that."""
CUDAGRAPH_OPTION = "_benchmark_with_cudagraphs"
"""Attribute of choices that Inductor itself times as CUDA graphs."""


def times_on_host(session: TuningSession, choices: Sequence[ChoiceCaller]) -> bool:
    """Whether choices are timed on the processor, in turns."""
    return bool(choices) and choices[0].layout.device.type == "cpu" and replaces_times(session)


def times_calls(session: TuningSession, problem: Problem) -> bool:
    """Whether an operation's choices are timed by a clock of the device."""
    on_cuda = problem.kernel.language == "inductor" and problem.device.backend == "cuda"
    return on_cuda and replaces_times(session)


def replaces_times(session: TuningSession) -> bool:
    """Whether Inductor gets other times than its own.

    Not while we only listen, nor where it times in another process: it times the library's kernels in this one even
    then, and two clocks would decide.
    """
    from torch._inductor import config

    elsewhere = config.autotune_in_subproc or getattr(config, "pipeline_max_autotune_gemm", False)
    # From torch 2.13 on, CUTLASS is timed in another process, and what it is compared with, too.
    elsewhere = elsewhere or "CUTLASS" in str(getattr(config, "max_autotune_gemm_backends", "")).upper()
    return not elsewhere and session.settings.mode is not Mode.LISTEN


def is_of_clock(measurement: Measurement, *, device_clock: bool) -> bool:
    """Whether a stored time is of the clock in use, and comparable with its times.

    Long times are: both clocks agree on them.
    """
    if not measurement.ok or measurement.ms > MAY_BE_SHORT_MS:
        return True
    return (not measurement.protocol.startswith(INDUCTOR_CLOCK)) == device_clock


def clock_of(choice: ChoiceCaller, ms: float) -> CallTime | None:
    """Return the clock of a choice's time, if it was not Inductor's benchmarker."""
    clock: CallTime | None = getattr(choice, _CLOCK_ATTRIBUTE, None)
    return clock if clock is not None and clock.ms == ms else None


class CallTiming:
    """Times calls in the place of Inductor's benchmarker."""

    def __init__(self, session: TuningSession, clock: CallClock | HostClock) -> None:
        self._session, self._clock = session, clock
        self._inside = False
        self.failed = False
        """Whether a call's time was left to Inductor, whose clock is another."""

    def benchmark_call(self, call: Callable[[], object], benchmark: Callable[[], Any]) -> Any:
        """Return the time of a call in milliseconds; the result of `benchmark` for a call that is not timed here.

        Raises the errors of the call.
        """
        if self._inside or not self._times_calls():
            return benchmark()
        self._inside = True
        try:
            call()  # it compiles, loads its module, and fails if it is to fail
            try:
                return self._find(call).ms
            except Exception as error:
                self._session.warn_once("time a call on the device", error)
                self.failed = True
                return benchmark()
        finally:
            self._inside = False

    def _times_calls(self) -> bool:
        return True

    def _find(self, call: Callable[[], object]) -> CallTime | HostTime:
        return self._clock.time(call, math.inf)


class FusedKernelTiming(CallTiming):
    """Times kernels that Inductor benchmarks to see whether fusing pays, beside the times of choices."""


class CollectedCalls:
    """Calls that Inductor would benchmark, kept instead, to be timed in turns."""

    def __init__(self) -> None:
        self._call: Callable[[], object] | None = None

    def benchmark_call(self, call: Callable[[], object], benchmark: Callable[[], Any]) -> float:
        """Keep the call."""
        self._call = call
        return math.nan

    def take(self) -> Callable[[], object] | None:
        """Return the latest call; None if there was none since."""
        call, self._call = self._call, None
        return call


class ChoiceTiming(CallTiming):
    """The choices of one operation while one thread benchmarks them."""

    def __init__(self, session: TuningSession, operation: str, clock: CallClock | HostClock) -> None:
        super().__init__(session, clock)
        self._operation = operation
        self._choice: ChoiceCaller | None = None
        self._latest: Any = None
        """The time of the choice at hand."""
        self._times: dict[ChoiceCaller, Any] = {}
        self._best_ms = math.inf

    def benchmark_choice(self, choice: ChoiceCaller, benchmark: Callable[[], float]) -> float:
        """Return the time of one choice, which `benchmark` takes. Raises the errors of `benchmark`."""
        self._choice, self._latest = choice, None
        try:
            with self._clock.on_stream():
                ms = benchmark()
        finally:
            latest, self._choice, self._latest = self._latest, None, None
        # A time that was altered on its way counts as altered.
        if latest is not None and latest.ms == ms:
            self._times[choice] = latest
        return ms

    def _times_calls(self) -> bool:
        return self._choice is not None  # not a graph whose own kernels are tuned at its first run

    def _find(self, call: Callable[[], object]) -> CallTime | HostTime:
        assert self._choice is not None
        name = f"{self._operation} {candidate_of(self._choice)}"
        result = self._clock.time(call, self._best_ms, may_record=name not in self._session.not_recordable)
        if not result.recordable:
            self._session.not_recordable.add(name)
        self._best_ms, self._latest = min(self._best_ms, result.ms), result
        return result

    def note_clocks(self, timings: Mapping[ChoiceCaller, float]) -> str:
        """Keep with each choice the clock of its time (ms, inf for failures); returns a note for the user, or ''."""
        note = ""
        for choice, ms in timings.items():
            vars(choice).pop(_CLOCK_ATTRIBUTE, None)
            clock = self._times.get(choice)
            if clock is not None and clock.ms == ms:
                setattr(choice, _CLOCK_ATTRIBUTE, clock)
                if clock.host_bound:
                    note = (
                        note or "times of choices that wait for the device hold the host's part of a launch"
                    )
            elif 0 < ms <= MAY_BE_SHORT_MS:
                note = "times of short choices hold the host's part of a launch"
        return note


_SAMPLES, _TURNS = 20, 3
"""Undisturbed samples of a choice in one turn that are enough, and turns at least."""
_TURN_S, _TURNS_S = 0.025, 1.0
"""Seconds of one choice in one turn, and seconds after which no further turn begins."""
_LONG_MS = 50.0
"""A longer call is hardly ever undisturbed: its waits are a part of it."""
DISTURBED = "other work disturbed all samples of a choice: nothing of it is kept"


@dataclass(frozen=True)
class HostTime:
    """Time of a call on the processor; as a `CallTime`."""

    ms: float
    disturbed: bool
    """The scheduler took a thread away during each sample: the call may be far faster."""
    protocol: str = f"{INDUCTOR_CLOCK}: minimum, in turns"
    host_bound: bool = False
    recordable: bool = True

    def __lt__(self, other: HostTime) -> bool:
        return (self.disturbed, self.ms) < (other.disturbed, other.ms)


class HostClock:
    """Times calls on the processor: the minimum of the samples during which the scheduler took no thread away.

    With a thread for each core and another busy process, a call of 0.01 ms takes a time slice of 4 to 20 ms, whatever
    it does.
    """

    def on_stream(self) -> AbstractContextManager[None]:
        """Nothing: calls on the processor have no stream."""
        return nullcontext()

    def time(self, call: Callable[[], object], best_ms: float, *, may_record: bool = True) -> HostTime:
        """Return the time of a call that has run before."""
        from resource import RUSAGE_SELF, getrusage

        until, clean_count, best = time.perf_counter() + _TURN_S, 0, HostTime(math.inf, True)
        while time.perf_counter() < until and clean_count < _SAMPLES:
            switches, begin = getrusage(RUSAGE_SELF).ru_nivcsw, time.perf_counter()
            call()
            ms = (time.perf_counter() - begin) * 1e3
            sample = HostTime(ms, ms < _LONG_MS and getrusage(RUSAGE_SELF).ru_nivcsw > switches)
            clean_count += not sample.disturbed
            best = min(best, sample)
        return best


class ChoiceTurns(ChoiceTiming):
    """The choices of one operation on the processor, timed in turns."""

    disturbed = False
    """Whether a choice was disturbed in all of its turns."""

    def in_turns(
        self, timings: ChoiceTimings, again: Callable[[list[ChoiceCaller]], ChoiceTimings]
    ) -> ChoiceTimings:
        """Times in milliseconds after further turns of those that ran; `again` benchmarks choices once.

        A time that somebody has altered on its way is left as it is.
        """
        best: dict[ChoiceCaller, HostTime] = {c: t for c, t in self._times.items() if timings.get(c) == t.ms}
        until, turn = time.perf_counter() + _TURNS_S, 1
        while time.perf_counter() < until:
            is_disturbed = any(t.disturbed for t in best.values())
            if not is_disturbed and (turn >= _TURNS or len(best) < 2):
                break
            turn_ms = again(list(best))
            # A failure now, or a time that was altered on its way, counts as reported.
            timings |= {c: ms for c, ms in turn_ms.items() if (t := self._times.get(c)) is None or t.ms != ms}
            best = {c: min(t, self._times[c]) for c, t in best.items() if self._times[c].ms == turn_ms.get(c)}
            turn += 1
        self._times.update(best)
        self.disturbed = any(t.disturbed for t in best.values())
        return {**timings, **{c: t.ms for c, t in best.items()}}

    def note_clocks(self, timings: Mapping[ChoiceCaller, float]) -> str:
        """Keep with each choice the clock of its time; returns a note for the user, or ''."""
        super().note_clocks(timings)
        return DISTURBED if self.disturbed else ""


def has_own_graphs(choices: Iterable[ChoiceCaller]) -> bool:
    """Whether Inductor itself times these choices as CUDA graphs: then their times hold no part of the host's."""
    return any(getattr(unwrap_choice(choice), CUDAGRAPH_OPTION, False) for choice in choices)


def can_time(device: torch.device) -> bool:
    """Whether calls on a device can be timed: not where the program records a graph just now."""
    import torch

    is_open = device.type == "cuda" and torch.cuda.is_initialized()
    return is_open and not torch.cuda.is_current_stream_capturing()


def open_clock(device: torch.device) -> CallClock | None:
    """A clock of calls on a device; None where there can be none."""
    import torch
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    if not can_time(device):
        return None
    from forecast_integrations.triton.timer.timers import CallTimer

    with torch.cuda.device(device), unset_fake_temporarily():
        timer = CallTimer()
    return None if timer.stream is None else CallClock(timer, device)


class CallClock:
    """A timer of calls for the middle of a compilation: other devices may be current, and tensors fake ones."""

    def __init__(self, timer: CallTimer, device: torch.device) -> None:
        self._timer, self._device = timer, device

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes the device's stream current that calls are to be made on."""
        import torch

        with torch.cuda.device(self._device), self._timer.on_stream():
            yield

    def time(self, call: Callable[[], object], best_ms: float, *, may_record: bool = True) -> CallTime:
        """Return the time of a call that has run before."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            return self._timer.time(call, best_ms, may_record=may_record)
