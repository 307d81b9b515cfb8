"""A kernel of another language: its protocol, its measurer, and its tuning."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from forecast_autotune.errors import ForecastAutotuneError, SettingsError
from forecast_autotune.policy import Policy
from forecast_autotune.printable import utc_now
from forecast_autotune.records import (
    Candidate,
    Config,
    Decision,
    Measurement,
    MeasuringCost,
    Outcome,
    Problem,
)
from forecast_autotune.records.candidate import IN_TURNS
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.loop import TuningTask, tune

__all__ = [
    "HOST_CLOCK",
    "LanguageKernel",
    "LanguageMeasurer",
    "RefusedConfigError",
    "TunedKernel",
    "timed_launches",
    "tune_language",
]


class LanguageKernel(Protocol):
    """One kernel with the arguments of one call, in any language.

    `forecast_autotune.testing.LanguageContract` tests all that is said here.
    """

    @property
    def problem(self) -> Problem:
        """The problem that is tuned. The kernel's hash must cover its source and all that it calls."""
        ...

    @property
    def protocol(self) -> str:
        """The name of how `time` takes times, kept with each. Another way of timing needs another name."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether times are true while others compile: so on a GPU, not where kernels run on the compiler's cores."""
        ...

    def compile(self, config: Config) -> Any:
        """Compile to a value for `check` and `time`. Called from several threads at once; must end by itself.

        Raises `RefusedConfigError` with an outcome; any other exception is a compile error.
        """
        ...

    def check(self, compiled: Any) -> str:
        """Launch once, wait for the end and compare with what is right: empty, or what is wrong.

        Raises `RefusedConfigError` with an outcome; any other exception is a runtime error.
        """
        ...

    def time(self, compiled: Any) -> Sequence[float]:
        """Milliseconds of three or more launches, one after another. Raises as `check` does."""
        ...


class RefusedConfigError(ForecastAutotuneError):
    """A config that cannot be used, with the outcome that is recorded."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


HOST_CLOCK = "host-clock-1"
"""The protocol of these times."""
_LEAST, _MOST = 3, 100


def timed_launches(launch: Callable[[], object], seconds: float = 0.05) -> list[float]:
    """Milliseconds of launches, for so many seconds: 3 at least, 100 at most.

    Only for launches that wait for their end. Those of a device need its own events.
    """
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _LEAST or (len(times) < _MOST and time.perf_counter() < end):
        begin = time.perf_counter_ns()
        launch()
        times.append(max(time.perf_counter_ns() - begin, 1) / 1e6)
    return times


@dataclass(frozen=True)
class Compiled:
    """The result of one compilation."""

    candidate: Candidate
    result: Any = None
    error: Exception | None = None
    seconds: float = 0.0


class CompilingThreads:
    """Compiles every candidate at most once. A compilation that has begun is never given up: threads cannot be."""

    def __init__(self, build: Callable[[Candidate], Any], workers: int) -> None:
        self._build, self._workers = build, max(1, workers)
        self._condition = threading.Condition()
        self._queue: list[Candidate] = []
        self._running: dict[Candidate, float] = {}
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self.done: dict[Candidate, Compiled] = {}

    def schedule(self, candidates: Sequence[Candidate]) -> None:
        """Compile these next, in this order, in place of all that have not begun."""
        with self._condition:
            self._queue = [
                c for c in dict.fromkeys(candidates) if c not in self.done and c not in self._running
            ]
            self._begin()

    def _begin(self) -> None:
        for _ in range(min(len(self._queue) - self._idle, self._workers - len(self._threads))):
            self._threads.append(threading.Thread(target=self._work, name="compile", daemon=True))
            self._threads[-1].start()
        self._condition.notify_all()

    def leave_behind(self, candidate: Candidate, error: Exception) -> None:
        """Count a compilation that hangs as failed by this; another thread takes the place of its own."""
        with self._condition:
            if (begin := self._running.pop(candidate, None)) is not None:
                self.done[candidate] = Compiled(candidate, None, error, time.perf_counter() - begin)
                self._workers += 1
                self._begin()

    def running(self) -> Mapping[Candidate, float]:
        """The candidates that compile now, with their seconds so far."""
        with self._condition:
            now = time.perf_counter()
            return {c: now - begin for c, begin in self._running.items()}

    def wait(self, enough: Callable[[Collection[Candidate]], bool], within_s: float | None = None) -> bool:
        """Wait until `enough(what is not done yet)`, at most so many seconds; whether it is."""
        with self._condition:
            return self._condition.wait_for(lambda: enough({*self._queue, *self._running}), within_s)

    def close(self, within_s: float | None = None) -> None:
        """Drop compilations that have not begun, and wait for the others, at most `within_s`."""
        with self._condition:
            self._queue, self._closed = [], True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._running, within_s)

    def _work(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                self._condition.wait_for(lambda: self._queue or self._closed)
                self._idle -= 1
                if not self._queue:
                    return
                candidate = self._queue.pop(0)
                begin = self._running[candidate] = time.perf_counter()
            result, error = None, None
            try:
                result = self._build(candidate)
            except Exception as exception:
                error = exception
            with self._condition:
                if self._running.pop(candidate, None) is not None:
                    self.done[candidate] = Compiled(candidate, result, error, time.perf_counter() - begin)
                    self._condition.notify_all()


_TURNS = 3


class LanguageMeasurer:
    """A `Measurer` for one `LanguageKernel`.

    `guard(candidate)` is entered around each candidate's first launch, which may take the process down.
    """

    def __init__(
        self,
        kernel: LanguageKernel,
        *,
        workers: int,
        guard: Callable[[Candidate], AbstractContextManager[object]] = lambda _: contextlib.nullcontext(),
    ) -> None:
        self.workers = workers
        self._kernel, self._guard = kernel, guard
        self._problem = kernel.problem.id
        self._begin = time.perf_counter()
        self._timing_s = 0.0
        self._pool = CompilingThreads(lambda candidate: kernel.compile(candidate.config), workers)
        self._timed: set[Candidate] = set()

    @property
    def quiet(self) -> bool:
        """Whether candidates can be timed while others compile."""
        return self._kernel.quiet

    def compiled(self, candidate: Candidate) -> Any:
        """The compiled form of a candidate; None where it was not compiled, or failed."""
        result = self._pool.done.get(candidate)
        return None if result is None else result.result

    def ready(self) -> Collection[Candidate]:
        """The candidates that are compiled and not timed."""
        return [c for c in list(self._pool.done) if c not in self._timed]

    def compiling(self) -> Mapping[Candidate, float]:
        """The candidates that compile now, with their seconds so far."""
        return self._pool.running()

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Start compiling; nothing where that would disturb the next timing."""
        if self.quiet:
            self._pool.schedule(candidates)

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """Yield measurements as compilations end; where these disturb times, after all of them have ended."""
        ahead = prefetch if self.quiet else ()
        queue = dict.fromkeys(candidates)
        while queue:
            self._pool.schedule(
                [*queue, *ahead]
            )  # again each time: the caller may have prefetched others since
            if not self._pool.wait(lambda pending: self._may_time(queue, pending), within_s):
                return
            candidate = next(c for c in queue if c in self._pool.done)
            del queue[candidate]
            yield self._measure_one(self._pool.done[candidate])

    def _may_time(self, queue: Collection[Candidate], pending: Collection[Candidate]) -> bool:
        return any(c in self._pool.done for c in queue) if self.quiet else not pending

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time in turns. Where one fails now, the single timings stand."""
        begin = time.perf_counter()
        times: dict[Candidate, list[float]] = {c: [] for c in candidates}
        try:
            self._pool.schedule(candidates)
            self._pool.wait(lambda pending: not pending)
            for _ in range(_TURNS):
                for candidate, result in times.items():
                    result.extend(self._kernel.time(self._pool.done[candidate].result))
        except Exception:
            return []
        finally:
            self._timing_s += time.perf_counter() - begin
        return [self._ok(c, result, None, IN_TURNS) for c, result in times.items()]

    def spent(self) -> MeasuringCost:
        """Seconds so far; `timing_s` is wall time of checks and launches."""
        results = list(self._pool.done.values())
        wall = time.perf_counter() - self._begin
        return MeasuringCost(sum(c.seconds for c in results), self._timing_s, len(results), wall)

    def close(self) -> None:
        """Drop compilations that have not begun, and wait for those that have."""
        self._pool.close()

    def _measure_one(self, binary: Compiled) -> Measurement:
        candidate = binary.candidate
        self._timed.add(candidate)
        if binary.error is not None:
            return self._failed(binary, binary.error, Outcome.COMPILE_ERROR)
        begin = time.perf_counter()
        try:
            with self._guard(candidate):
                wrong = self._kernel.check(binary.result)
            if wrong:
                return self._failed(binary, RefusedConfigError(Outcome.INCORRECT, wrong), Outcome.INCORRECT)
            times = list(self._kernel.time(binary.result))
        except Exception as error:
            return self._failed(binary, error, Outcome.RUNTIME_ERROR)
        finally:
            self._timing_s += time.perf_counter() - begin
        return self._ok(candidate, times, binary.seconds)

    def _failed(self, binary: Compiled, error: Exception, otherwise: Outcome) -> Measurement:
        is_refusal = isinstance(error, RefusedConfigError)
        return Measurement(
            self._problem,
            binary.candidate,
            error.outcome if isinstance(error, RefusedConfigError) else otherwise,
            compile_s=binary.seconds,
            protocol=self._kernel.protocol,
            at=utc_now(),
            extra={"message": f"{error}"[:500] if is_refusal else f"{type(error).__name__}: {error}"[:500]},
        )

    def _ok(
        self, candidate: Candidate, times: list[float], seconds: float | None, end: str = ""
    ) -> Measurement:
        protocol = self._kernel.protocol + end
        return Measurement.of_times(self._problem, candidate, times, compile_s=seconds, protocol=protocol)


@dataclass(frozen=True)
class TunedKernel:
    """The decision, and the chosen config as the kernel's `compile` has made it."""

    decision: Decision
    compiled: Any


def tune_language(
    kernel: LanguageKernel,
    configs: Iterable[Config],
    *,
    store: Store | None = None,
    settings: Settings | None = None,
    surrogate: Surrogate | None = None,
    policy: Policy | None = None,
) -> TunedKernel:
    """Choose a config of a list or a `Space`, measuring what forecasts are unsure about.

    Without arguments, the user's store and the settings of the environment. A config decided before is compiled and
    not measured. Raises `NoWorkingConfigError` if every config fails, `FrozenMissError` as the decorator does,
    and `SettingsError` for an empty list.
    """
    candidates = [Candidate(config) for config in dict.fromkeys(configs)]
    if not candidates:
        raise SettingsError(
            "a kernel needs one config or more: the list is empty, or no constraint allows any"
        )
    options = settings or Settings.from_environment()
    shared_store = store if store is not None else Store.default()
    measurers: list[LanguageMeasurer] = []

    def make() -> LanguageMeasurer:
        guard = lambda candidate: shared_store.watch(kernel.problem, candidate)  # noqa: E731
        measurers.append(LanguageMeasurer(kernel, workers=options.worker_count(), guard=guard))
        return measurers[-1]

    task = TuningTask(kernel.problem, candidates)
    decision = tune(
        task,
        make,
        store=shared_store,
        surrogate=surrogate or surrogate_for(options),
        settings=options,
        policy=policy,
    )
    results = [result for m in measurers if (result := m.compiled(decision.chosen)) is not None]
    return TunedKernel(decision, results[0] if results else kernel.compile(decision.chosen.config))
