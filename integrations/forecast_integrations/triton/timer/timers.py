"""What holds the clock for one call: device events, or the user's own benchmark function.

The protocol of `EventTimer` is `do_bench`'s (L2 flushed before each launch, device events around it) with
these differences: hooks run outside the timed region, launches that the host queued too late do not
count, a candidate that cannot win stops after a few launches, and finalists are timed in turns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forecast_autotune.records import Candidate
from forecast_integrations.triton.call import KernelCall
from forecast_integrations.triton.protocols import Times
from forecast_integrations.triton.timer.warmup import IDLE_S, keep_busy

_MOST_FLUSHES = 8
"""Flushes between launches at most, for hosts that cannot keep ahead of the device."""


@dataclass(frozen=True)
class TimingLengths:
    """How long candidates are timed, in device milliseconds; `benchmarks/tuning/timing_lengths.py` compares some."""

    look_ms: float = 5.0
    """Milliseconds of a first look at a candidate."""
    full_ms: float = 10.0
    """Milliseconds in all for a candidate that may still win."""
    compare_ms: float = 24.0
    """Per finalist, when they are timed in turns."""
    contender: float = 1.1
    """A candidate slower than this multiple of the fastest so far is not timed further."""
    hopeless: float = 2.0
    """Beyond this multiple of the fastest the launches of the estimate are enough."""


class UserBenchmarkTimer:
    """Times through the tuner's own `_bench`: a user's `do_bench=`, or a subclass with its own."""

    protocol = "user-do-bench"

    def __init__(self, call: KernelCall) -> None:
        self._call = call
        self.raw: dict[Candidate, Times] = {}

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """One call of the benchmark function is all there is; see `time_adaptively`."""
        call = self._call
        if candidate.variant in call.functions:
            # `_bench` knows the tuner's own kernel alone.
            once = partial(call.launch_once, candidate)
            self.raw[candidate] = call.tuner.do_bench(once, quantiles=(0.5, 0.2, 0.8))
            return
        config = call.configs[candidate]
        self.raw[candidate] = call.tuner._bench(*call.args, config=config, **call.kwargs)

    def time_adaptively(self, candidate: Candidate, best_ms: float) -> list[float] | None:
        """What `first` returned, as [20 %, 50 %, 80 %]; None for a failure."""
        result = self.raw[candidate]
        values = [float(v) for v in result] if isinstance(result, list | tuple) else [float(result)]
        if not math.isfinite(values[0]):
            return None
        if len(values) >= 3:
            middle, low, high = values[:3]
            return [low, low, middle, high, high] if low <= middle <= high else [middle]
        return values[:1]

    def is_alive(self) -> bool:
        """The benchmark function has its own view of the device."""
        return True

    def close(self) -> None:
        """Nothing is held."""


class EventTimer:
    """Times with device events."""

    def __init__(self, call: KernelCall, lengths: TimingLengths = TimingLengths()) -> None:
        from triton.runtime.driver import driver

        self._call, self._lengths = call, lengths
        self._interface = driver.active.get_device_interface()
        self._flush, self.protocol = self._flusher(driver)
        self._estimates: dict[Candidate, float] = {}
        self._flushes = 1
        self._busy = -math.inf
        """When it was last seen at work, by `time.perf_counter`."""

    def _flusher(self, driver: Any) -> tuple[Callable[[], None], str]:
        import torch

        try:
            cache = driver.active.get_empty_cache_for_benchmark()
            return lambda: driver.active.clear_cache(cache), "events-l2flush-2"
        except torch.cuda.OutOfMemoryError:
            # The application took the memory first (a KV cache, say): a warm cache is better than none.
            return lambda: None, "events-noflush"

    def _event(self) -> Any:
        return self._interface.Event(enable_timing=True)

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """Launch once and wait, at most `timeout_s`. Raises TimeoutError when it does not come back."""
        self._call.launch_once(candidate)
        done = self._event()
        done.record()
        limit = time.perf_counter() + timeout_s
        pause = 0.0
        while not done.query():
            if time.perf_counter() > limit:
                raise TimeoutError(f"no answer from the device after {timeout_s:g} s")
            time.sleep(pause)
            pause = min(0.01, pause + 1e-5)

    def time_adaptively(self, candidate: Candidate, best_ms: float) -> list[float] | None:
        """Milliseconds per launch: few for a candidate that cannot win, many for a contender."""
        if time.perf_counter() - self._busy > IDLE_S:
            keep_busy(self._flush, self._interface.synchronize)
        lengths = self._lengths
        self._launches([candidate], 1)
        times = self._launches([candidate], 5)[0]
        # The fastest of five decides whether it is hopeless: a disturbance only ever adds time.
        estimate = self._estimates[candidate] = max(min(times), 1e-3)
        if estimate > lengths.hopeless * best_ms:
            return times
        times = self._launches([candidate], _repeat_count(lengths.look_ms, estimate, 7))[0]
        if statistics.median(times) > lengths.contender * best_ms:
            return times
        more = _repeat_count(lengths.full_ms - lengths.look_ms, estimate, 7)
        return times + self._launches([candidate], more)[0]

    def in_turns(self, candidates: Sequence[Candidate]) -> list[list[float]]:
        """Interleaved launches, so that drifting clocks meet all candidates alike."""
        slowest = max(self._estimates.get(c, 1.0) for c in candidates)
        return self._launches(candidates, _repeat_count(self._lengths.compare_ms, slowest, 10))

    def _launches(self, candidates: Sequence[Candidate], rounds: int) -> list[list[float]]:
        """Milliseconds of `rounds` launches of each candidate, in turns."""
        while True:
            slots = self._queue(candidates, rounds)
            self._interface.synchronize()
            self._busy = time.perf_counter()
            clean = [[(start, end) for start, end, late in slot if not late] for slot in slots]
            if all(2 * len(valid) >= rounds for valid in clean) or self._flushes >= _MOST_FLUSHES:
                break
            self._flushes *= 2  # the device outran the host: give it more to do between launches
        return [
            [start.elapsed_time(end) for start, end in (valid or [(s, e) for s, e, _ in slot])]
            for valid, slot in zip(clean, slots, strict=True)
        ]

    def _queue(self, candidates: Sequence[Candidate], rounds: int) -> list[list[tuple[Any, Any, bool]]]:
        """Queue launches between events; the third entry tells whether a launch came late.

        If the device has passed the first event before the launch is queued, it waited for the host,
        and the wait would count as kernel time.
        """
        call, flush = self._call, self._flush
        launchers = [call.launcher(c) for c in candidates]
        hooked = [call.has_hooks(c) for c in candidates]
        events = [[(self._event(), self._event()) for _ in range(rounds)] for _ in candidates]
        slots: list[list[tuple[Any, Any, bool]]] = [[] for _ in candidates]
        for _ in range(4):
            flush()
        for i in range(rounds):
            for j, candidate in enumerate(candidates):
                full = call.run_before_hooks(candidate) if hooked[j] else None
                for _ in range(self._flushes):
                    flush()
                start, end = events[j][i]
                start.record()
                launchers[j]()
                late = start.query()
                end.record()
                slots[j].append((start, end, late))
                if full is not None:
                    call.run_after_hook(full)
        return slots

    def is_alive(self) -> bool:
        """False when an earlier launch has broken the context for good."""
        try:
            self._interface.synchronize()
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Free the flush buffer."""
        self._flush = lambda: None


def _repeat_count(budget_ms: float, estimate_ms: float, least: int) -> int:
    # 0.08 ms: what flushing 256 MB costs on a fast card.
    return max(least, min(200, int(budget_ms / (estimate_ms + 0.08))))
