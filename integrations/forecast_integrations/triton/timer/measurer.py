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
"""Texts of asynchronous device errors, which a later wait raises."""


class UserBenchmarkTimer:
    """Times through the tuner's own `_bench`: a user's `do_bench=`, or a subclass with its own."""

    protocol = "user-do-bench"

    def __init__(self, call: KernelCall) -> None:
        self._call = call
        self.raw: dict[Candidate, Times] = {}

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """Call the benchmark function; `time_adaptively` returns its result.

        Errors of the function or of a hook are marked as the caller's.
        """
        try:
            self._benchmark(candidate)
        except Exception as error:
            if not self._is_of_launch(candidate, error):
                mark_of_caller(error)
            raise

    def _is_of_launch(self, candidate: Candidate, error: Exception) -> bool:
        """Whether the candidate failed, and not the benchmark function: Triton forgives a config that does not fit."""
        if outcome_of(error) in (Outcome.COMPILE_ERROR, Outcome.OUT_OF_RESOURCES):
            return True
        if any(text in str(error) for text in _DEVICE_ERRORS):
            return True
        codes = codes_in_traceback(error)
        in_launch = any(code.co_name in _LAUNCHING for code in codes)
        return in_launch and codes.isdisjoint(map(code_of, self._call.hooks(candidate)))

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
        """Do nothing: the benchmark function decides whether the device is warm."""

    def protocol_of(self, candidate: Candidate) -> str:
        """Return the same protocol for all candidates."""
        return self.protocol

    def is_host_bound(self, candidate: Candidate) -> bool:
        """Return False: a benchmark function does not report it."""
        return False

    def is_alive(self) -> bool:
        """Return True: the benchmark function judges the device itself."""
        return True

    def close(self) -> None:
        """Do nothing: the timer owns nothing."""


class TritonMeasurer:
    """A `Measurer` for one call of a Triton kernel on the current device.

    `guard(candidate)` is entered around each candidate's first launch, where a bad kernel may hang
    or kill the process; the store remembers which candidate it was.
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
        self._loss: str | None = None
        self._pool: CompilePool | None = None
        if compiler != "none":
            self._pool = make_pool(call.compile, workers, timeout_s, compiler, call)
        if self._pool is not None:
            self._pool.while_waiting = self._timer.stay_awake
        self._earlier = frozenset(compiled)
        self._ready = {c: CompileResult(c) for c in compiled}
        """Compiled ahead, not asked for yet."""
        self._median_ms: dict[Candidate, float] = {}
        """Median milliseconds of candidates whose outputs were right."""
        own = timer is None and not bench
        self._outputs = OutputComparison(call) if own else None
        self._incorrect: list[Measurement] = []
        self._attempts: set[Candidate] = set()

    @property
    def raw(self) -> dict[Candidate, Times]:
        """Return the results of a user's own benchmark function per candidate; empty with ours."""
        return self._timer.raw if isinstance(self._timer, UserBenchmarkTimer) else {}

    @property
    def built(self) -> set[Candidate]:
        """Candidates that this measurer has timed, or that are compiled. Read after `close`."""
        ahead = {c for c, result in self._ready.items() if result.outcome is None and not result.doubtful}
        return ahead | self._median_ms.keys()

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
                yield from self._measurements(CompileResult(candidate))
                self._check()
            return
        # Timing what an earlier decision has compiled takes no longer than forking a child or two does.
        ahead = prefetch if self._pool.quiet and not self._earlier.issuperset(candidates) else ()
        self._pool.schedule([c for c in (*candidates, *ahead) if c not in self._ready])
        queue = dict.fromkeys(candidates)
        while queue:
            if self._pool.quiet:
                self._collect()
            ready = [c for c in queue if c in self._ready]
            # Where compiling disturbs timing, everything is compiled before anything is timed.
            if not ready or (not self._pool.quiet and len(ready) < len(queue)):
                if (result := self._pool.next(None if self.is_undecided else within_s)) is None:
                    return
                _record_compilation(result)
                self._ready[result.candidate] = result
                continue
            del queue[ready[0]]
            yield from self._measurements(self._ready.pop(ready[0]))
            self._check()
            if not queue and self.is_undecided:
                untimed = (c for c in (*self._ready, *self._call.configs) if c not in self._attempts)
                queue = dict.fromkeys(itertools.islice(untimed, 1))
                self._pool.schedule([c for c in queue if c not in self._ready])

    def _collect(self) -> None:
        """Collect the compilations that have ended."""
        if self._pool is not None:
            for result in self._pool.done():
                _record_compilation(result)
                self._ready[result.candidate] = result

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time candidates in turns; a user's own benchmark function is not called again."""
        if isinstance(self._timer, UserBenchmarkTimer) or self._loss:
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
        """Return a sentence for a decision under l2='both': whether another config is faster in a warm L2."""
        fast = sorted(self._median_ms, key=self._median_ms.__getitem__)[:_MOST_WARM]
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
        """Abandon compilations still running, and free the flush buffer and the outputs."""
        self._collect()
        if self._pool is not None:
            self._pool.close()
        self._timer.close()
        self._outputs = None

    @property
    def is_undecided(self) -> bool:
        """Whether two configs compute different things, and a third one will be measured to tell which is right."""
        may_try_more = not self._attempts.issuperset(self._call.configs)
        return may_try_more and self._outputs is not None and self._outputs.is_undecided

    def _measurements(self, compilation: CompileResult) -> list[Measurement]:
        """Measure a candidate; the measurements of others that it proves incorrect precede its own."""
        self._attempts.add(compilation.candidate)
        with span("measure", candidate=compilation.candidate) as span_record:
            m = self._time(compilation)
            span_record.set(outcome=m.outcome, median_ms=m.median_ms, repeats=m.repeats)
        incorrect, self._incorrect = self._incorrect, []
        return [*incorrect, m]

    def _time(self, compilation: CompileResult) -> Measurement:
        candidate = compilation.candidate
        seconds = compilation.seconds if self._pool is not None else None
        if compilation.outcome is not None:
            if compilation.raised and (
                self._call.hears_failures() or isinstance(self._timer, UserBenchmarkTimer)
            ):
                self._repeat_failure(candidate)
            return self._no_time(candidate, compilation.outcome, seconds, {"message": compilation.message})
        self._say(candidate)
        facts: dict[str, object] = {}
        begin = time.perf_counter()
        try:
            kernel = self._compiled_kernel(compilation)
            if self._outputs is not None:
                self._outputs.prepare(kernel)
            with self._guard(candidate):
                self._timer.first(candidate, self._timeout_s)
            facts = _facts(kernel)
            times = self._timer.time_adaptively(candidate, self._best_ms)
            ms = math.inf if times is None else statistics.median(times)
            outliers = {} if self._outputs is None else self._outputs.compare(candidate, ms)
        except Exception as error:
            return self._failure(candidate, error, seconds, facts)
        finally:
            self._timing_s += time.perf_counter() - begin
        if times is None:
            message = "the benchmark function returned inf"
            return self._no_time(candidate, Outcome.OUT_OF_RESOURCES, seconds, {**facts, "message": message})
        self._median_ms[candidate] = ms
        for outlier, why in outliers.items():
            del self._median_ms[outlier]
            self._incorrect.append(self._no_time(outlier, Outcome.INCORRECT, None, {"message": why}))
        self._best_ms = min(self._median_ms.values(), default=math.inf)
        # An incorrect candidate's own time does not count.
        return self._incorrect.pop() if candidate in outliers else self._ok(candidate, times, seconds, facts)

    def _compiled_kernel(self, compilation: CompileResult) -> object:
        """Return Triton's compiled kernel; None where only a launch can compile it, which also raises its errors."""
        if self._pool is None or compilation.doubtful or not self._call.compiles_alone(compilation.candidate):
            return None
        return self._call.compile(compilation.candidate)

    def _repeat_failure(self, candidate: Candidate) -> None:
        """Launch a candidate that failed to compile, for the user's hooks or benchmark function to see it fail."""
        try:
            with self._guard(candidate):
                self._timer.first(candidate, self._timeout_s)
        except Exception as error:
            if is_of_caller(error):
                raise

    def _failure(
        self, candidate: Candidate, error: Exception, seconds: float | None, facts: dict[str, object]
    ) -> Measurement:
        outcome = Outcome.TIMEOUT if isinstance(error, LaunchTimeoutError) else outcome_of(error)
        # A hook's error on a device that the launch before broke is not the hook's own.
        if self._call.is_of_heuristic(error):
            mark_of_caller(error)
        of_caller = is_of_caller(error) and (is_from_signal_handler(error) or self._timer.is_alive())
        if outcome is None or of_caller:
            raise error
        if outcome is Outcome.TIMEOUT:
            self._loss = f"{candidate} did not finish in {self._timeout_s:g} s and still holds the device"
        elif outcome is Outcome.RUNTIME_ERROR and not self._timer.is_alive():
            self._loss = f"{candidate} broke the device context ({str(error)[:200]})"
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
        fields = {"compile_s": seconds, "protocol": protocol, "extra": extra}
        return Measurement.of_times(self._problem, candidate, times, **fields)

    def _check(self) -> None:
        if self._loss:
            raise DeviceLostError(
                f"{self._loss}. This is recorded: restart the process and that config will be skipped"
            )


def _record_compilation(result: CompileResult) -> None:
    if result.began_s is not None:
        begin, end, outcome = result.began_s, result.began_s + result.seconds, result.outcome or "ok"
        record("compile", "compile", begin, end, candidate=result.candidate, outcome=outcome)


def _facts(kernel: object) -> dict[str, object]:
    """Return the compiler's figures: shared memory in bytes, registers per thread, spilled bytes."""
    metadata = getattr(kernel, "metadata", None)
    values = {
        "shared": getattr(metadata, "shared", None),
        "registers": getattr(kernel, "n_regs", None),
        "spills": getattr(kernel, "n_spills", None),
    }
    return {name: int(value) for name, value in values.items() if value is not None}
