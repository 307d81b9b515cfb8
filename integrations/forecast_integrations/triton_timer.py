"""Timing on the device: compile in parallel, time each candidate as it is ready, race, compare.

The protocol is `do_bench`'s (L2 flushed before each launch, device events around it, median and
20/80 percentiles) with four differences: hooks run outside the timed region, launches that the host
queued too late do not count, a candidate that cannot win stops after a few launches, and the finalists
are timed again in turns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from forecast_autotune.errors import DeviceLost
from forecast_autotune.measuring import Spent
from forecast_autotune.records import Candidate, Outcome
from forecast_autotune.results import Measurement
from forecast_autotune.tuner import now
from forecast_integrations.call import Call, outcome_of
from forecast_integrations.triton_compile import Compiled, CompilePool, make_pool

_LOOK_MS = 5.0
"""Device milliseconds of a first look at a candidate."""
_FULL_MS = 20.0
"""... and in all, for one that may still win."""
_COMPARE_MS = 40.0
"""Per finalist, when they are timed in turns."""
_CONTENDER = 1.25
"""A candidate slower than this multiple of the fastest so far is not timed further."""
_HOPELESS = 2.0
"""... and beyond this multiple the three launches of the estimate are enough."""
_WAKE_S = 0.03
"""Seconds of load before the first timing."""
_MOST_FLUSHES = 8
"""Flushes between launches at most, for hosts that cannot keep ahead of the device."""


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
        compiler: str = "auto",
        compiled: Collection[Candidate] = (),
        bench: bool = False,
    ) -> None:
        """`compiler` is `auto`, `fork`, `threads`, or `none` where nothing is compiled (the interpreter).

        `compiled` are candidates that this process has compiled for arguments of the same kind.
        """
        self.workers = workers
        self._call, self._problem, self._timeout_s = call, problem, timeout_s
        self._guard, self._say = guard, say
        self._timer: _Bench | _Events = _Bench(call) if bench else _Events(call)
        self._begin = time.perf_counter()
        self._timing_s = 0.0
        self._best_ms = math.inf
        self._lost: str | None = None
        self._pool: CompilePool | None = None
        if compiler != "none":
            self._pool = make_pool(call.compile, workers, timeout_s, compiler)
        self._earlier = frozenset(compiled)
        self._ready = {c: Compiled(c) for c in compiled}
        """Compiled ahead, not asked for yet."""
        self._timed: set[Candidate] = set()

    @property
    def raw(self) -> dict[Candidate, Any]:
        """What a user's own benchmark function returned per candidate; empty with ours."""
        return self._timer.raw if isinstance(self._timer, _Bench) else {}

    @property
    def built(self) -> set[Candidate]:
        """Candidates this measurer knows to be compiled: timed, or ready to be. Asked after `close`."""
        ahead = {c for c, done in self._ready.items() if done.outcome is None and done.error is None}
        return ahead | self._timed

    def ready(self) -> Collection[Candidate]:
        """What an earlier decision of this process has compiled."""
        return self._earlier

    def measure(
        self, candidates: Sequence[Candidate], *, prefetch: Sequence[Candidate] = ()
    ) -> Iterator[Measurement]:
        """Yield measurements in the order in which compilations finish."""
        if self._pool is None:
            for candidate in candidates:
                yield self._time(Compiled(candidate))
                self._check()
            return
        ahead = prefetch if self._pool.quiet else ()
        self._pool.submit([c for c in (*candidates, *ahead) if c not in self._ready])
        wanted = dict.fromkeys(candidates)
        while wanted:
            ready = [c for c in wanted if c in self._ready]
            # Where compiling disturbs timing, everything is compiled before anything is timed.
            if not ready or (not self._pool.quiet and len(ready) < len(wanted)):
                result = self._pool.next()
                self._ready[result.candidate] = result
                continue
            for candidate in ready:
                del wanted[candidate]
                yield self._time(self._ready.pop(candidate))
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
        compile_s, finished = (0.0, 0) if self._pool is None else (self._pool.compile_s, self._pool.finished)
        return Spent(compile_s, self._timing_s, finished, time.perf_counter() - self._begin)

    def close(self) -> None:
        """Give up compilations nobody waits for, and free the flush buffer."""
        if self._pool is not None:
            self._ready |= {done.candidate: done for done in self._pool.done()}
            self._pool.close()
        self._timer.close()

    def _time(self, compiled: Compiled) -> Measurement:
        candidate = compiled.candidate
        seconds = compiled.seconds if self._pool is not None else None
        if compiled.error is not None:
            raise compiled.error
        if compiled.outcome is not None:
            return self._no_time(candidate, compiled.outcome, seconds, {"message": compiled.message})
        self._say(candidate)
        facts: dict[str, Any] = {}
        begin = time.perf_counter()
        try:
            kernel = None if self._pool is None else self._call.compile(candidate)
            with self._guard(candidate):
                self._timer.first(candidate, self._timeout_s)
            facts = _facts(kernel)
            times = self._timer.race(candidate, self._best_ms)
        except Exception as error:
            return self._failed(candidate, error, seconds, facts)
        finally:
            self._timing_s += time.perf_counter() - begin
        if times is None:
            message = "the benchmark function returned inf"
            return self._no_time(candidate, Outcome.OUT_OF_RESOURCES, seconds, {**facts, "message": message})
        self._best_ms = min(self._best_ms, statistics.median(times))
        self._timed.add(candidate)
        return self._ok(candidate, times, self._timer.protocol, {**facts, "compile_s": seconds})

    def _failed(
        self, candidate: Candidate, error: Exception, seconds: float | None, facts: dict[str, Any]
    ) -> Measurement:
        outcome = Outcome.TIMEOUT if isinstance(error, TimeoutError) else outcome_of(error)
        if outcome is None:
            raise error
        if outcome is Outcome.TIMEOUT:
            self._lost = f"{candidate} did not finish in {self._timeout_s:g} s and still holds the device"
        elif outcome is Outcome.RUNTIME_ERROR and not self._timer.alive():
            self._lost = f"{candidate} broke the device context ({str(error)[:200]})"
        message = f"{type(error).__name__}: {str(error)[:500]}"
        return self._no_time(candidate, outcome, seconds, {**facts, "message": message})

    def _no_time(
        self, candidate: Candidate, outcome: Outcome, seconds: float | None, extra: dict[str, Any]
    ) -> Measurement:
        protocol = self._timer.protocol
        return Measurement(
            self._problem,
            candidate,
            outcome,
            compile_s=seconds,
            protocol=protocol,
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
    """What the compiler made of it: shared memory in bytes, registers per thread, spilled bytes."""
    metadata = getattr(kernel, "metadata", None)
    found = {
        "shared": getattr(metadata, "shared", None),
        "registers": getattr(kernel, "n_regs", None),
        "spills": getattr(kernel, "n_spills", None),
    }
    return {name: int(value) for name, value in found.items() if value is not None}


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
        self._flushes = 1

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
        if not self._estimates:
            self._wake()
        self._launches([candidate], 1)
        times = self._launches([candidate], 5)[0]
        # The fastest of five decides whether it is hopeless: a disturbance only ever adds time.
        estimate = self._estimates[candidate] = max(min(times), 1e-3)
        if estimate > _HOPELESS * best_ms:
            return times
        times = self._launches([candidate], _count(_LOOK_MS, estimate, 7))[0]
        if statistics.median(times) > _CONTENDER * best_ms:
            return times
        return times + self._launches([candidate], _count(_FULL_MS - _LOOK_MS, estimate, 7))[0]

    def _wake(self) -> None:
        """Load an idle device for a moment, so that the first candidate does not meet low clocks."""
        limit = time.perf_counter() + _WAKE_S
        while time.perf_counter() < limit:
            for _ in range(50):
                self._flush()
            self._interface.synchronize()

    def in_turns(self, candidates: Sequence[Candidate]) -> list[list[float]]:
        """Interleaved launches, so that drifting clocks meet all candidates alike."""
        slowest = max(self._estimates.get(c, 1.0) for c in candidates)
        return self._launches(candidates, _count(_COMPARE_MS, slowest, 10))

    def _once(self, candidate: Candidate) -> None:
        full = self._call.before(candidate)
        try:
            self._call.launcher(candidate)()
        except Exception as error:
            self._call.after(full, error)
            raise
        self._call.after(full)

    def _launches(self, candidates: Sequence[Candidate], rounds: int) -> list[list[float]]:
        """Milliseconds of `rounds` launches of each candidate, in turns."""
        while True:
            slots = self._queue(candidates, rounds)
            self._interface.synchronize()
            clean = [[(start, end) for start, end, late in slot if not late] for slot in slots]
            if all(2 * len(kept) >= rounds for kept in clean) or self._flushes >= _MOST_FLUSHES:
                break
            self._flushes *= 2  # the device outran the host: give it more to do between launches
        return [
            [start.elapsed_time(end) for start, end in (kept or [(s, e) for s, e, _ in slot])]
            for kept, slot in zip(clean, slots, strict=True)
        ]

    def _queue(self, candidates: Sequence[Candidate], rounds: int) -> list[list[tuple[Any, Any, bool]]]:
        """Queue launches between events; the third entry tells whether a launch came late.

        If the device has passed the first event before the launch is queued, it waited for the host,
        and the wait would count as kernel time.
        """
        call, flush = self._call, self._flush
        launchers = [call.launcher(c) for c in candidates]
        hooked = [call.hooked(c) for c in candidates]
        events = [[(self._event(), self._event()) for _ in range(rounds)] for _ in candidates]
        slots: list[list[tuple[Any, Any, bool]]] = [[] for _ in candidates]
        for _ in range(4):
            flush()
        for i in range(rounds):
            for j, candidate in enumerate(candidates):
                full = call.before(candidate) if hooked[j] else None
                for _ in range(self._flushes):
                    flush()
                start, end = events[j][i]
                start.record()
                launchers[j]()
                late = start.query()
                end.record()
                slots[j].append((start, end, late))
                if full is not None:
                    call.after(full)
        return slots

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
