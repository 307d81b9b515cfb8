"""The live measurer: compile in parallel, time each candidate as it is ready, record what happens."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

from forecast_autotune.errors import (
    DeviceLostError,
    code_of,
    codes_in_traceback,
    is_from_signal_handler,
    is_of_caller,
    mark_of_caller,
)
from forecast_autotune.printable import utc_now
from forecast_autotune.records import Candidate, Measurement, MeasuringCost, Outcome
from forecast_autotune.records.candidate import IN_TURNS
from forecast_autotune.telemetry.spans import record, span
from forecast_autotune.tuning.results import NEGLIGIBLE_GAIN
from forecast_integrations.triton.compile.pool import CompilePool, CompileResult, make_pool
from forecast_integrations.triton.problem.call import KernelCall, outcome_of
from forecast_integrations.triton.protocols import Times
from forecast_integrations.triton.timer.output_comparison import OutputComparison
from forecast_integrations.triton.timer.timers import EventTimer, LaunchTimeoutError

_LAUNCHING = ("kernel_call", KernelCall.launch_once.__name__)
"""Functions that a benchmark function is given to call: Triton's and ours."""
_MOST_WARM = 8
"""The fastest with a cold L2 that are timed with a warm one, too."""
_DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "HIP error")
"""In texts of errors that a device tells of later, to whoever waits for it."""


class UserBenchmarkTimer:
    """Times through the tuner's own `_bench`: a user's `do_bench=`, or a subclass with its own."""

    protocol = "user-do-bench"

    def __init__(self, call: KernelCall) -> None:
        self._call = call
        self.raw: dict[Candidate, Times] = {}

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """One call of the benchmark function is all there is; see `time_adaptively`.

        Errors of its own, or of a hook, are for the caller to see.
        """
        try:
            self._benchmark(candidate)
        except Exception as error:
            if not self._is_of_launch(candidate, error):
                mark_of_caller(error)
            raise

    def _is_of_launch(self, candidate: Candidate, error: Exception) -> bool:
        """Whether the candidate failed, and not the function that times it: Triton forgives what does not fit."""
        if outcome_of(error) in (Outcome.COMPILE_ERROR, Outcome.OUT_OF_RESOURCES):
            return True
        if any(text in str(error) for text in _DEVICE_ERRORS):
            return True
        codes = codes_in_traceback(error)
        launched = any(code.co_name in _LAUNCHING for code in codes)
        return launched and codes.isdisjoint(map(code_of, self._call.hooks(candidate)))

    def _benchmark(self, candidate: Candidate) -> None:
        call = self._call
        if candidate.variant in call.functions:
            # `_bench` knows the tuner's own kernel alone.
            once = partial(call.launch_once, candidate)
            self.raw[candidate] = call.tuner.do_bench(once, quantiles=(0.5, 0.2, 0.8))
            return
        config = call.configs[candidate]
        self.raw[candidate] = call.tuner._bench(*call.args, config=config, **call.kwargs)

    def time_adaptively(self, candidate: Candidate, best_ms: float) -> list[float] | None:
        """Return the result of `first` as [20 %, 50 %, 80 %]; None for a failure."""
        result = self.raw[candidate]
        values = [float(v) for v in result] if isinstance(result, list | tuple) else [float(result)]
        if not math.isfinite(values[0]):
            return None
        if len(values) >= 3:
            middle, low, high = values[:3]
            return [low, low, middle, high, high] if low <= middle <= high else [middle]
        return values[:1]

    def stay_awake(self) -> None:
        """Nothing: the function warms the device up itself, or means not to."""

    def protocol_of(self, candidate: Candidate) -> str:
        """The same for all: the function's work is not known."""
        return self.protocol

    def is_host_bound(self, candidate: Candidate) -> bool:
        """Not known of a benchmark function."""
        return False

    def is_alive(self) -> bool:
        """The benchmark function has its own view of the device."""
        return True

    def close(self) -> None:
        """Nothing is held."""


class TritonMeasurer:
    """A `Measurer` for one call of a Triton kernel on the current device.

    `guard(candidate)` is entered around each candidate's first launch, where a bad kernel may hang
    or kill the process; the store remembers whom it was watching.
    """

    def __init__(
        self,
        call: KernelCall,
        problem: str,
        *,
        workers: int,
        timeout_s: float,
        guard: Callable[[Candidate], AbstractContextManager[object]],
        say: Callable[[Candidate], None],
        compiler: str = "auto",
        compiled: Collection[Candidate] = (),
        bench: bool = False,
        timer: EventTimer | None = None,
        l2: str = "cold",
        edge: float = NEGLIGIBLE_GAIN,
    ) -> None:
        """`compiler` is `auto`, `fork`, `threads`, or `none` where nothing is compiled (the interpreter).

        `compiled` are candidates that this process has compiled for arguments of the same kind. `timer` takes
        the place of the one that launches on this thread. `edge` is the share by which a choice may be behind the
        fastest of those that are compared.
        """
        self.workers = workers
        self._call, self._problem, self._timeout_s = call, problem, timeout_s
        self._guard, self._say = guard, say
        self._timer: UserBenchmarkTimer | EventTimer = (
            UserBenchmarkTimer(call) if bench else timer or EventTimer(call, warm=l2 == "warm")
        )
        self._both = l2 == "both" and timer is None and not bench
        self._edge = edge
        self._begin = time.perf_counter()
        self._timing_s = 0.0
        self._best_ms = math.inf
        self._lost: str | None = None
        self._pool: CompilePool | None = None
        if compiler != "none":
            self._pool = make_pool(call.compile, workers, timeout_s, compiler, call)
        if self._pool is not None:
            self._pool.while_waiting = self._timer.stay_awake
        self._earlier = frozenset(compiled)
        self._ready = {c: CompileResult(c) for c in compiled}
        """Compiled ahead, not asked for yet."""
        self._timed: dict[Candidate, float] = {}
        """Median milliseconds of those that were right."""
        own = timer is None and not bench
        self._outputs = OutputComparison(call) if own else None
        self._struck: list[Measurement] = []
        self._tried: set[Candidate] = set()

    @property
    def raw(self) -> dict[Candidate, Times]:
        """Return the results of a user's own benchmark function per candidate; empty with ours."""
        return self._timer.raw if isinstance(self._timer, UserBenchmarkTimer) else {}

    @property
    def built(self) -> set[Candidate]:
        """Candidates this measurer knows to be compiled: timed, or ready to be. Asked after `close`."""
        ahead = {c for c, done in self._ready.items() if done.outcome is None and not done.doubtful}
        return ahead | self._timed.keys()

    @property
    def quiet(self) -> bool:
        """Whether candidates can be timed while others compile."""
        return self._pool is not None and self._pool.quiet

    def ready(self) -> Collection[Candidate]:
        """Return the candidates that are compiled, in this decision or an earlier one here, and not timed."""
        self._collect()
        return self._ready.keys()

    def compiling(self) -> Mapping[Candidate, float]:
        """Running compilations, with their seconds so far."""
        return {} if self._pool is None else self._pool.compiling()

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Start compiling in children; nothing where compilations would hold this interpreter's lock."""
        if self._pool is not None and self._pool.quiet:
            self._pool.schedule([c for c in candidates if c not in self._ready])

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """Yield measurements in the order in which compilations finish; of what is ready, in the order given."""
        if self._pool is None:
            for candidate in candidates:
                yield from self._measured(CompileResult(candidate))
                self._check()
            return
        # Timing what an earlier decision has compiled takes no longer than forking a child or two does.
        ahead = prefetch if self._pool.quiet and not self._earlier.issuperset(candidates) else ()
        self._pool.schedule([c for c in (*candidates, *ahead) if c not in self._ready])
        wanted = dict.fromkeys(candidates)
        while wanted:
            if self._pool.quiet:
                self._collect()
            ready = [c for c in wanted if c in self._ready]
            # Where compiling disturbs timing, everything is compiled before anything is timed.
            if not ready or (not self._pool.quiet and len(ready) < len(wanted)):
                if (result := self._pool.next(None if self.is_undecided else within_s)) is None:
                    return
                _record_compilation(result)
                self._ready[result.candidate] = result
                continue
            del wanted[ready[0]]
            yield from self._measured(self._ready.pop(ready[0]))
            self._check()
            if not wanted and self.is_undecided:
                others = (c for c in (*self._ready, *self._call.configs) if c not in self._tried)
                wanted = dict.fromkeys(itertools.islice(others, 1))
                self._pool.schedule([c for c in wanted if c not in self._ready])

    def _collect(self) -> None:
        """Take what has been compiled by now."""
        if self._pool is not None:
            for done in self._pool.done():
                _record_compilation(done)
                self._ready[done.candidate] = done

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time in turns. A user's own benchmark function has had its say: it is not called again."""
        if isinstance(self._timer, UserBenchmarkTimer) or self._lost:
            return []
        begin = time.perf_counter()
        try:
            with span("measure", in_turns=len(candidates)):
                times = self._timer.in_turns(candidates, self._edge)
        except Exception as error:
            if outcome_of(error) is None or is_of_caller(error):
                raise
            return []  # each of them ran before; the single timings stand
        finally:
            self._timing_s += time.perf_counter() - begin
        return [self._ok(c, t, None, {}, IN_TURNS) for c, t in zip(candidates, times, strict=True)]

    def with_bits_of(self, before: Candidate, others: Sequence[Candidate]) -> tuple[Candidate | None, str]:
        """As `OutputComparison.with_bits_of`."""
        if self._outputs is None or self._pool is None:
            return before, "outputs cannot be compared here"
        begin = time.perf_counter()
        try:
            self._outputs.prepare(self._call.compile(before))
            return self._outputs.with_bits_of(before, others)
        except Exception as error:
            if is_of_caller(error):
                raise
            return before, f"outputs cannot be compared: {error!r:.100}"
        finally:
            self._timing_s += time.perf_counter() - begin

    def remark(self, chosen: Candidate, tolerance: float) -> str:
        """A sentence for a decision that is to be known `both` ways: whether another config is faster in a warm L2."""
        fast = sorted(self._timed, key=self._timed.__getitem__)[:_MOST_WARM]
        if not self._both or chosen not in fast or len(fast) < 2 or not self._call.fits_l2():
            return ""
        begin = time.perf_counter()
        timer = EventTimer(self._call, warm=True)
        try:
            warm = dict(zip(fast, map(statistics.median, timer.in_turns(fast)), strict=True))
        finally:
            timer.close()
            self._timing_s += time.perf_counter() - begin
        best = min(warm, key=warm.__getitem__)
        gain = warm[chosen] / warm[best] - 1
        if gain <= tolerance:
            return "it is as fast as any with its data in the L2, too"
        return f"with its data in the L2, {best} is {100 * gain:.3g} % faster: l2='warm' takes it"

    def spent(self) -> MeasuringCost:
        """Seconds so far; `timing_s` is wall time spent on the device."""
        compile_s, finished = (0.0, 0) if self._pool is None else (self._pool.compile_s, self._pool.finished)
        return MeasuringCost(compile_s, self._timing_s, finished, time.perf_counter() - self._begin)

    def close(self) -> None:
        """Give up compilations nobody waits for, and free the flush buffer and the outputs."""
        self._collect()
        if self._pool is not None:
            self._pool.close()
        self._timer.close()
        self._outputs = None

    @property
    def is_undecided(self) -> bool:
        """Whether two configs compute different things, and a third one will be measured to tell which is right."""
        untried = not self._tried.issuperset(self._call.configs)
        return untried and self._outputs is not None and self._outputs.is_undecided

    def _measured(self, compiled: CompileResult) -> list[Measurement]:
        """Of a candidate, behind those that it shows to compute something else."""
        self._tried.add(compiled.candidate)
        with span("measure", candidate=compiled.candidate) as shown:
            m = self._time(compiled)
            shown.set(outcome=m.outcome, median_ms=m.median_ms, repeats=m.repeats)
        struck, self._struck = self._struck, []
        return [*struck, m]

    def _time(self, compiled: CompileResult) -> Measurement:
        candidate = compiled.candidate
        seconds = compiled.seconds if self._pool is not None else None
        if compiled.outcome is not None:
            if compiled.raised and (
                self._call.hears_failures() or isinstance(self._timer, UserBenchmarkTimer)
            ):
                self._repeat_failure(candidate)
            return self._no_time(candidate, compiled.outcome, seconds, {"message": compiled.message})
        self._say(candidate)
        facts: dict[str, object] = {}
        begin = time.perf_counter()
        try:
            kernel = self._compiled(compiled)
            if self._outputs is not None:
                self._outputs.prepare(kernel)
            with self._guard(candidate):
                self._timer.first(candidate, self._timeout_s)
            facts = _facts(kernel)
            times = self._timer.time_adaptively(candidate, self._best_ms)
            ms = math.inf if times is None else statistics.median(times)
            strange = {} if self._outputs is None else self._outputs.compare(candidate, ms)
        except Exception as error:
            return self._failed(candidate, error, seconds, facts)
        finally:
            self._timing_s += time.perf_counter() - begin
        if times is None:
            message = "the benchmark function returned inf"
            return self._no_time(candidate, Outcome.OUT_OF_RESOURCES, seconds, {**facts, "message": message})
        self._timed[candidate] = ms
        for other, why in strange.items():
            del self._timed[other]
            self._struck.append(self._no_time(other, Outcome.INCORRECT, None, {"message": why}))
        self._best_ms = min(self._timed.values(), default=math.inf)
        # Its own time does not count where it is itself the one that is struck.
        return self._struck.pop() if candidate in strange else self._ok(candidate, times, seconds, facts)

    def _compiled(self, compiled: CompileResult) -> object:
        """Triton's compiled kernel; None where it is to be had by a launch alone, which also says what is wrong."""
        if self._pool is None or compiled.doubtful or not self._call.compiles_alone(compiled.candidate):
            return None
        return self._call.compile(compiled.candidate)

    def _repeat_failure(self, candidate: Candidate) -> None:
        """Launch what failed to compile: the user's hooks or benchmark function hear of it, as under Triton."""
        try:
            with self._guard(candidate):
                self._timer.first(candidate, self._timeout_s)
        except Exception as error:
            if is_of_caller(error):
                raise

    def _failed(
        self, candidate: Candidate, error: Exception, seconds: float | None, facts: dict[str, object]
    ) -> Measurement:
        outcome = Outcome.TIMEOUT if isinstance(error, LaunchTimeoutError) else outcome_of(error)
        # A hook that meets a device which the launch before it broke has found nothing that is its own.
        if self._call.is_of_heuristic(error):
            mark_of_caller(error)
        of_caller = is_of_caller(error) and (is_from_signal_handler(error) or self._timer.is_alive())
        if outcome is None or of_caller:
            raise error
        if outcome is Outcome.TIMEOUT:
            self._lost = f"{candidate} did not finish in {self._timeout_s:g} s and still holds the device"
        elif outcome is Outcome.RUNTIME_ERROR and not self._timer.is_alive():
            self._lost = f"{candidate} broke the device context ({str(error)[:200]})"
        message = f"{type(error).__name__}: {str(error)[:500]}"
        return self._no_time(candidate, outcome, seconds, {**facts, "message": message})

    def _no_time(
        self, candidate: Candidate, outcome: Outcome, seconds: float | None, extra: dict[str, object]
    ) -> Measurement:
        return Measurement(
            self._problem,
            candidate,
            outcome,
            compile_s=seconds,
            protocol=self._timer.protocol,
            at=utc_now(),
            extra=extra,
        )

    def _ok(
        self,
        candidate: Candidate,
        times: list[float],
        seconds: float | None,
        extra: dict[str, object],
        protocol_end: str = "",
    ) -> Measurement:
        if self._timer.is_host_bound(candidate):
            extra = {**extra, "host_bound": True}
        protocol = self._timer.protocol_of(candidate) + protocol_end
        about = {"compile_s": seconds, "protocol": protocol, "extra": extra}
        return Measurement.of_times(self._problem, candidate, times, **about)

    def _check(self) -> None:
        if self._lost:
            raise DeviceLostError(
                f"{self._lost}. This is recorded: restart the process and that config will be skipped"
            )


def _record_compilation(done: CompileResult) -> None:
    if done.began_s is not None:
        end = done.began_s + done.seconds
        record(
            "compile", "compile", done.began_s, end, candidate=done.candidate, outcome=done.outcome or "ok"
        )


def _facts(kernel: object) -> dict[str, object]:
    """Return the compiler's figures: shared memory in bytes, registers per thread, spilled bytes."""
    metadata = getattr(kernel, "metadata", None)
    values = {
        "shared": getattr(metadata, "shared", None),
        "registers": getattr(kernel, "n_regs", None),
        "spills": getattr(kernel, "n_spills", None),
    }
    return {name: int(value) for name, value in values.items() if value is not None}
