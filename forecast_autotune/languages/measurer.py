"""The measurer of kernels of other languages: compiles in threads, checks and times on the caller's."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from forecast_autotune.languages.compiling import Compiled, CompilingThreads
from forecast_autotune.languages.protocol import LanguageKernel, RefusedConfigError
from forecast_autotune.printable import utc_now
from forecast_autotune.records import Candidate, Measurement, MeasuringCost, Outcome
from forecast_autotune.records.measurement import IN_TURNS

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
        """What a candidate was compiled to; None where it was not, or failed."""
        found = self._pool.done.get(candidate)
        return None if found is None else found.result

    def ready(self) -> Collection[Candidate]:
        """What is compiled and not timed."""
        return [c for c in list(self._pool.done) if c not in self._timed]

    def compiling(self) -> Mapping[Candidate, float]:
        """What compiles now, with its seconds so far."""
        return self._pool.running()

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Start compiling; nothing where that would disturb what is timed next."""
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
        wanted = dict.fromkeys(candidates)
        while wanted:
            self._pool.schedule(
                [*wanted, *ahead]
            )  # again each time: the caller may have prefetched others since
            if not self._pool.wait(lambda left: self._may_time(wanted, left), within_s):
                return
            candidate = next(c for c in wanted if c in self._pool.done)
            del wanted[candidate]
            yield self._measured(self._pool.done[candidate])

    def _may_time(self, wanted: Collection[Candidate], unfinished: Collection[Candidate]) -> bool:
        return any(c in self._pool.done for c in wanted) if self.quiet else not unfinished

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time in turns. Where one fails now, the single timings stand."""
        begin = time.perf_counter()
        times: dict[Candidate, list[float]] = {c: [] for c in candidates}
        try:
            self._pool.schedule(candidates)
            self._pool.wait(lambda left: not left)
            for _ in range(_TURNS):
                for candidate, found in times.items():
                    found.extend(self._kernel.time(self._pool.done[candidate].result))
        except Exception:
            return []
        finally:
            self._timing_s += time.perf_counter() - begin
        return [self._ok(c, found, None, IN_TURNS) for c, found in times.items()]

    def spent(self) -> MeasuringCost:
        """Seconds so far; `timing_s` is wall time of checks and launches."""
        done = list(self._pool.done.values())
        wall = time.perf_counter() - self._begin
        return MeasuringCost(sum(c.seconds for c in done), self._timing_s, len(done), wall)

    def close(self) -> None:
        """Drop compilations that have not begun, and wait for those that have."""
        self._pool.close()

    def _measured(self, compiled: Compiled) -> Measurement:
        candidate = compiled.candidate
        self._timed.add(candidate)
        if compiled.error is not None:
            return self._failed(compiled, compiled.error, Outcome.COMPILE_ERROR)
        begin = time.perf_counter()
        try:
            with self._guard(candidate):
                wrong = self._kernel.check(compiled.result)
            if wrong:
                return self._failed(compiled, RefusedConfigError(Outcome.INCORRECT, wrong), Outcome.INCORRECT)
            times = list(self._kernel.time(compiled.result))
        except Exception as error:
            return self._failed(compiled, error, Outcome.RUNTIME_ERROR)
        finally:
            self._timing_s += time.perf_counter() - begin
        return self._ok(candidate, times, compiled.seconds)

    def _failed(self, compiled: Compiled, error: Exception, otherwise: Outcome) -> Measurement:
        known = isinstance(error, RefusedConfigError)
        return Measurement(
            self._problem,
            compiled.candidate,
            error.outcome if isinstance(error, RefusedConfigError) else otherwise,
            compile_s=compiled.seconds,
            protocol=self._kernel.protocol,
            at=utc_now(),
            extra={"message": f"{error}"[:500] if known else f"{type(error).__name__}: {error}"[:500]},
        )

    def _ok(
        self, candidate: Candidate, times: list[float], seconds: float | None, end: str = ""
    ) -> Measurement:
        tenths = statistics.quantiles(times, n=10, method="inclusive")
        return Measurement(
            self._problem,
            candidate,
            Outcome.OK,
            statistics.median(times),
            tenths[1],
            tenths[7],
            repeats=len(times),
            compile_s=seconds,
            protocol=self._kernel.protocol + end,
            at=utc_now(),
        )
