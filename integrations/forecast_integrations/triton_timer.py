"""Timing on the device: compile in parallel, time each candidate as it is ready, race, compare.

The protocol is `do_bench`'s (L2 flushed before each launch, device events around it, median and
20/80 percentiles) with three differences: hooks run outside the timed region, a candidate that
cannot win stops after a few launches, and the finalists are timed again in turns.
"""

from __future__ import annotations

import math
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forecast_autotune.errors import DeviceLost
from forecast_autotune.measuring import Spent
from forecast_autotune.records import Candidate, Outcome
from forecast_autotune.results import Measurement
from forecast_autotune.tuner import now
from forecast_integrations.call import Call, outcome_of
from forecast_integrations.triton_compile import Compiled, CompilePool

_LOOK_MS = 6.0
"""Device milliseconds of a first look at a candidate."""
_FULL_MS = 30.0
"""... and in all, for one that may still win."""
_COMPARE_MS = 60.0
"""Per finalist, when they are timed in turns."""
_CONTENDER = 1.25
"""A candidate slower than this multiple of the fastest so far is not timed further."""
_HOPELESS = 2.0
"""... and beyond this multiple the three launches of the estimate are enough."""
_SWITCH_S = 0.0005
"""GIL switch interval while compile threads run: a launch must not wait 5 ms for the interpreter."""


class TritonMeasurer:
    """A `Measurer` for one call of a Triton kernel on the current device.

    `guard(candidate)` is entered around each candidate's first launch, where a bad kernel may hang
    or kill the process; the store remembers whom it was watching.
    """

    def __init__(
        self,
        call: Call,
        problem: str,
        *,
        workers: int,
        timeout_s: float,
        guard: Callable[[Candidate], Any],
        say: Callable[[Candidate], None],
        precompile: bool = True,
        bench: bool = False,
    ) -> None:
        self.workers = workers
        self._call, self._problem, self._timeout_s = call, problem, timeout_s
        self._guard, self._say, self._precompile = guard, say, precompile
        self._timer: _Bench | _Events = _Bench(call) if bench else _Events(call)
        self._begin = time.perf_counter()
        self._timing_s = 0.0
        self._best_ms = math.inf
        self._lost: str | None = None
        self._interval = sys.getswitchinterval()
        self._pool = CompilePool(call.compile, workers, _device_selector())
        self._ready: dict[Candidate, Compiled] = {}
        """Compiled ahead, not asked for yet."""

    @property
    def raw(self) -> dict[Candidate, Any]:
        """What a user's own benchmark function returned per candidate; empty with ours."""
        return self._timer.raw if isinstance(self._timer, _Bench) else {}

    def measure(
        self, candidates: Sequence[Candidate], *, prefetch: Sequence[Candidate] = ()
    ) -> Iterator[Measurement]:
        """Yield measurements in the order in which compilations finish."""
        if not self._precompile:
            for candidate in candidates:
                yield self._time(Compiled(candidate))
                self._check()
            return
        wanted = dict.fromkeys(candidates)
        sys.setswitchinterval(min(_SWITCH_S, self._interval))
        # What an earlier round prefetched may be ready already.
        self._pool.submit([*candidates, *prefetch])
        for candidate in list(wanted):
            if candidate in self._ready:
                del wanted[candidate]
                yield self._time(self._ready.pop(candidate))
                self._check()
        while wanted:
            result = self._next()
            if result.candidate not in wanted:
                self._ready[result.candidate] = result
                continue
            del wanted[result.candidate]
            yield self._time(result)
            self._check()

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time in turns. A user's own benchmark function has had its say: it is not called again."""
        if isinstance(self._timer, _Bench) or self._lost:
            return []
        begin = time.perf_counter()
        try:
            times = self._timer.in_turns(candidates)
        except Exception as error:
            if outcome_of(error) is None:
                raise
            return []  # each of them ran before; the single timings stand
        finally:
            self._timing_s += time.perf_counter() - begin
        return [
            self._ok(c, t, self._timer.protocol + "-turns", {})
            for c, t in zip(candidates, times, strict=True)
        ]

    def spent(self) -> Spent:
        """Seconds so far; `timing_s` is wall time spent on the device."""
        return Spent(
            self._pool.compile_s, self._timing_s, self._pool.finished, time.perf_counter() - self._begin
        )

    def close(self) -> None:
        """Let running compilations end unattended and give the GIL its interval back."""
        self._pool.close()
        sys.setswitchinterval(self._interval)
        self._timer.close()

    def _next(self) -> Compiled:
        while True:
            try:
                return self._pool.done.get(timeout=0.5)
            except queue.Empty:
                for candidate in self._pool.hung(self._timeout_s):
                    self._pool.abandon(candidate)
                    error = TimeoutError(f"not compiled after {self._timeout_s:g} s")
                    return Compiled(candidate, error=error, seconds=self._timeout_s)

    def _time(self, compiled: Compiled) -> Measurement:
        candidate = compiled.candidate
        facts: dict[str, Any] = _facts(compiled.kernel)
        seconds = compiled.seconds if self._precompile else None
        if compiled.error is not None:
            return self._failed(candidate, compiled.error, seconds, facts, compiling=True)
        self._say(candidate)
        begin = time.perf_counter()
        try:
            with self._guard(candidate):
                self._timer.first(candidate, self._timeout_s)
            times = self._timer.race(candidate, self._best_ms)
        except Exception as error:
            return self._failed(candidate, error, seconds, facts, compiling=False)
        finally:
            self._timing_s += time.perf_counter() - begin
        if times is None:
            message = "the benchmark function returned inf"
            return self._no_time(candidate, Outcome.OUT_OF_RESOURCES, seconds, {**facts, "message": message})
        self._best_ms = min(self._best_ms, statistics.median(times))
        return self._ok(candidate, times, self._timer.protocol, {**facts, "compile_s": seconds})

    def _failed(
        self,
        candidate: Candidate,
        error: BaseException,
        seconds: float | None,
        facts: dict[str, Any],
        *,
        compiling: bool,
    ) -> Measurement:
        if isinstance(error, TimeoutError):
            outcome: Outcome | None = Outcome.TIMEOUT
            if not compiling:
                self._lost = (
                    f"{candidate} did not finish within {self._timeout_s:g} s and still holds the device"
                )
        else:
            outcome = outcome_of(error)
            if compiling and outcome is Outcome.RUNTIME_ERROR:
                outcome = Outcome.COMPILE_ERROR
        if outcome is None:
            raise error
        if outcome is Outcome.RUNTIME_ERROR and not self._timer.alive():
            self._lost = f"{candidate} broke the device context ({str(error)[:200]})"
        message = f"{type(error).__name__}: {str(error)[:500]}"
        return self._no_time(candidate, outcome, seconds, {**facts, "message": message})

    def _no_time(
        self, candidate: Candidate, outcome: Outcome, seconds: float | None, extra: dict[str, Any]
    ) -> Measurement:
        return Measurement(
            self._problem,
            candidate,
            outcome,
            compile_s=seconds,
            protocol=self._timer.protocol,
            at=now(),
            extra=extra,
        )

    def _ok(
        self, candidate: Candidate, times: list[float], protocol: str, extra: dict[str, Any]
    ) -> Measurement:
        seconds = extra.pop("compile_s", None)
        low, middle, high = quantiles(times)
        return Measurement(
            self._problem,
            candidate,
            Outcome.OK,
            middle,
            low,
            high,
            repeats=len(times),
            compile_s=seconds,
            protocol=protocol,
            at=now(),
            extra=extra,
        )

    def _check(self) -> None:
        if self._lost:
            raise DeviceLost(
                f"{self._lost}. This is recorded: restart the process and that config will be skipped"
            )


def quantiles(times: list[float]) -> tuple[float, float, float]:
    """(20 %, 50 %, 80 %) with linear interpolation, as `triton.testing.do_bench` has them."""
    ordered = sorted(times)

    def at(q: float) -> float:
        point = q * (len(ordered) - 1)
        low, high = math.floor(point), math.ceil(point)
        return (1 - (point - low)) * ordered[low] + (point - low) * ordered[high]

    # A user's benchmark function may return 0 for its own reasons; a time must stay positive.
    return max(at(0.2), 1e-9), max(at(0.5), 1e-9), max(at(0.8), 1e-9)


def _facts(kernel: Any) -> dict[str, Any]:
    metadata = getattr(kernel, "metadata", None)
    shared = getattr(metadata, "shared", None)
    return {} if shared is None else {"shared": int(shared)}


def _device_selector() -> Callable[[], None]:
    """A function for compile threads: a new thread starts on device 0, whatever its parent uses."""
    import torch

    if not torch.cuda.is_available():
        return lambda: None
    index = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(index)


class _Bench:
    """Times through the tuner's own `_bench`: a user's `do_bench=`, or a subclass with its own."""

    protocol = "user-do-bench"

    def __init__(self, call: Call) -> None:
        self._call = call
        self.raw: dict[Candidate, Any] = {}

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """One call of the benchmark function is all there is; see `race`."""
        config = self._call.configs[candidate]
        self.raw[candidate] = self._call.tuner._bench(*self._call.args, config=config, **self._call.kwargs)

    def race(self, candidate: Candidate, best_ms: float) -> list[float] | None:
        """What `first` returned, as [20 %, 50 %, 80 %]; None for a failure."""
        result = self.raw[candidate]
        values = [float(v) for v in result] if isinstance(result, list | tuple) else [float(result)]
        if not math.isfinite(values[0]):
            return None
        if len(values) >= 3:
            middle, low, high = values[:3]
            return [low, low, middle, high, high] if low <= middle <= high else [middle]
        return values[:1]

    def alive(self) -> bool:
        """The benchmark function has its own view of the device."""
        return True

    def close(self) -> None:
        """Nothing is held."""


class _Events:
    """Times with device events."""

    def __init__(self, call: Call) -> None:
        from triton.runtime.driver import driver

        self._call = call
        self._interface = driver.active.get_device_interface()
        self._flush, self.protocol = self._flusher(driver)
        self._estimates: dict[Candidate, float] = {}

    def _flusher(self, driver: Any) -> tuple[Callable[[], None], str]:
        import torch

        try:
            cache = driver.active.get_empty_cache_for_benchmark()
            return lambda: driver.active.clear_cache(cache), "events-l2flush"
        except torch.cuda.OutOfMemoryError:
            # The application took the memory first (a KV cache, say): a warm cache is better than none.
            return lambda: None, "events-noflush"

    def _event(self) -> Any:
        return self._interface.Event(enable_timing=True)

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """Launch once and wait, at most `timeout_s`. Raises TimeoutError when it does not come back."""
        self._once(candidate)
        done = self._event()
        done.record()
        limit = time.perf_counter() + timeout_s
        pause = 0.0
        while not done.query():
            if time.perf_counter() > limit:
                raise TimeoutError(f"no answer from the device after {timeout_s:g} s")
            time.sleep(pause)
            pause = min(0.01, pause + 1e-5)

    def race(self, candidate: Candidate, best_ms: float) -> list[float] | None:
        """Milliseconds per launch: few for a candidate that cannot win, many for a contender."""
        times = self._launches([candidate], 3)[0]
        estimate = self._estimates[candidate] = max(statistics.median(times), 1e-3)
        if estimate > _HOPELESS * best_ms:
            return times
        times = self._launches([candidate], _count(_LOOK_MS, estimate, 5))[0]
        if statistics.median(times) > _CONTENDER * best_ms:
            return times
        return times + self._launches([candidate], _count(_FULL_MS - _LOOK_MS, estimate, 5))[0]

    def in_turns(self, candidates: Sequence[Candidate]) -> list[list[float]]:
        """Interleaved launches, so that drifting clocks meet all candidates alike."""
        slowest = max(self._estimates.get(c, 1.0) for c in candidates)
        return self._launches(candidates, _count(_COMPARE_MS, slowest, 10))

    def _once(self, candidate: Candidate) -> None:
        full = self._call.before(candidate)
        try:
            self._call.launch(candidate)
        except Exception as error:
            self._call.after(full, error)
            raise
        self._call.after(full)

    def _launches(self, candidates: Sequence[Candidate], rounds: int) -> list[list[float]]:
        pairs: list[list[tuple[Any, Any]]] = [[] for _ in candidates]
        call = self._call
        # A few flushes first: the device works on them while the host queues the launches, so a
        # host that loses the interpreter lock for a moment does not show up in the times.
        for _ in range(6):
            self._flush()
        for _ in range(rounds):
            for slot, candidate in zip(pairs, candidates, strict=True):
                full = call.before(candidate)
                self._flush()
                start, end = self._event(), self._event()
                start.record()
                call.launch(candidate)
                end.record()
                call.after(full)
                slot.append((start, end))
        self._interface.synchronize()
        return [[start.elapsed_time(end) for start, end in slot] for slot in pairs]

    def alive(self) -> bool:
        """False when an earlier launch has broken the context for good."""
        try:
            self._interface.synchronize()
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Free the flush buffer."""
        self._flush = lambda: None


def _count(budget_ms: float, estimate_ms: float, least: int) -> int:
    # 0.08 ms: what flushing 256 MB costs on a fast card.
    return max(least, min(200, int(budget_ms / (estimate_ms + 0.08))))
