"""The decision of one key in the background: on stand-ins for its tensors, timed by launches that the program lends."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from forecast_autotune.policy import Policy
from forecast_autotune.records import Candidate, Decision, Measurement, Outcome, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.telemetry.spans import DecisionSpan
from forecast_autotune.timing import DeviceEvent
from forecast_autotune.tuning.loop import GuardedStore, TuningTask, tune
from forecast_integrations.triton.compile.pool import CompileResult
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.describe import LazyGrids
from forecast_integrations.triton.protocols import Key, LaunchConfig, Times, Tuner
from forecast_integrations.triton.publication import note_choice, print_timed_candidate, publish_decision
from forecast_integrations.triton.timer.measurer import TritonMeasurer
from forecast_integrations.triton.timer.timers import EventTimer, TimedLaunch
from forecast_integrations.triton.variants.loading import launch_config

_FLUSH_MS = 0.08
"""Time to flush the L2 of a fast card."""

EventPair = tuple[DeviceEvent, DeviceEvent]


class LaunchSeries:
    """So many rounds of launches of some candidates in turns, each between two events.

    Nothing here waits for the device. `watch` is entered before a candidate's first launch ever, and left by
    whoever wants the series when it is over.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        rounds: int,
        *,
        flushes: int,
        costs_ms: Sequence[float | None],
        watch: Callable[[Candidate], AbstractContextManager[object]] | None = None,
        load: Callable[[], object] | None = None,
        warm: bool = False,
    ) -> None:
        """`costs_ms` are what launches of the candidates probably take; None where nobody knows.

        `load` comes before the first of them, and needs a device that is idle.
        """
        self.candidates, self.flushes, self.load, self._warm = tuple(candidates), flushes, load, warm
        self.slots: list[list[tuple[DeviceEvent, DeviceEvent, bool]]] = [[] for _ in candidates]
        """Per candidate, events around each launch and whether it came too late for the device."""
        self.error: Exception | None = None
        self.spans: list[tuple[EventPair, float]] = []
        """Events around what was launched in one go, and the milliseconds that were charged for it."""
        self._costs_ms, self._watch = tuple(costs_ms), watch
        self._total = rounds * len(self.candidates)
        self._made = 0
        self._watching = contextlib.ExitStack()

    @property
    def is_launched(self) -> bool:
        """Whether nothing is left to be launched."""
        return self._made >= self._total or self.error is not None

    @property
    def _turn(self) -> int:
        """The next one's place, back and forth: every other launch of a device takes longer."""
        turns, place = divmod(self._made, len(self.candidates))
        return len(self.candidates) - 1 - place if turns % 2 else place

    def next_cost_ms(self) -> float | None:
        """Return the probable milliseconds of the next launch, with its flushes; None where nobody knows."""
        cost = self._costs_ms[self._turn]
        return None if cost is None else cost + (cost if self._warm else _FLUSH_MS) * self.flushes

    def advance(
        self, call: KernelCall, flush: Callable[[], object], event: Callable[[], Any], most_ms: float
    ) -> float:
        """Launch as many as take `most_ms` milliseconds, at least one; returns what they probably take.

        After a launch whose cost nobody knows comes no other. An error of the candidate's, or of hooks, ends the
        series; anything else that interrupts it is raised, and the launch counts as not made.
        """
        expected = 0.0
        launches = [call.launcher(c) for c in self.candidates]
        try:
            while not self.is_launched:
                cost = self.next_cost_ms()
                if expected and (cost is None or expected + cost > most_ms):
                    break
                self._launch(call, launches, flush, event)
                expected += cost or 0.0
                if cost is None:
                    break
        except Exception as error:
            self.error = error
        return expected

    def _launch(
        self,
        call: KernelCall,
        launches: Sequence[Callable[[], object]],
        flush: Callable[[], object],
        event: Callable[[], Any],
    ) -> None:
        turn = self._turn
        candidate = self.candidates[turn]
        if self._watch is not None:
            self._watching.enter_context(self._watch(candidate))
        start, end = event(), event()
        full = call.run_before_hooks(candidate) if call.has_hooks(candidate) else None
        for _ in range(self.flushes):
            launches[turn]() if self._warm else flush()
        start.record()
        try:
            launches[turn]()
        except Exception as error:
            if full is not None:
                call.run_after_hook(full, error)
            raise
        late = start.query()
        end.record()
        if full is not None:
            call.run_after_hook(full)
        self.slots[turn].append((start, end, late))
        self._made += 1

    def has_begun(self) -> bool:
        """Whether the device has come to the latest of the launches that were made in one go."""
        return bool(self.spans) and self.spans[-1][0][0].query()

    def is_over(self) -> bool:
        """Whether the device is done with all that was launched."""
        return all(end.query() for (_, end), _ in self.spans)

    def close(self) -> None:
        """Watch no longer."""
        self._watching.close()


class SlicedTimer(EventTimer):
    """Times by device events as `EventTimer` does; no launch is recorded as a graph.

    `run_series(series, timeout_s)` returns once all launches of a series were made and the device is done with them.
    """

    def __init__(
        self,
        call: KernelCall,
        run_series: Callable[[LaunchSeries, float], None],
        watch: Callable[[Candidate], AbstractContextManager[object]],
        check: Callable[[], None],
        timeout_s: float,
        warm: bool,
    ) -> None:
        """`watch` is entered around a candidate's first launch; `check` raises where nothing is wanted any more."""
        super().__init__(call, warm=warm)
        self._hot_until = 0.0  # nothing here waits for the device to rest
        self._run_series, self._watch, self._check, self._timeout_s = run_series, watch, check, timeout_s

    def _flusher(self, driver: Any) -> tuple[tuple[Callable[[], object], Callable[[], object]], str]:
        # Whoever launches flushes: memory taken on one stream is not to be written to on another.
        return (lambda: None, lambda: None), "l2read"

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """Have it launched once. Raises `LaunchTimeoutError` when it does not come back, and what the launch raises."""
        load = None
        with suppress(Exception):  # it fails again where it is launched, and is recorded there
            kernel: Any = self._call.compile(candidate)
            load = kernel._init_handles if getattr(kernel, "module", kernel) is None else None
        if not self._first_ms:  # the flush has code to load, too
            load = load or (lambda: None)
        series = LaunchSeries([candidate], 1, flushes=1, costs_ms=[None], watch=self._watch, load=load)
        self._run_series(series, timeout_s)
        ((start, end, _),) = series.slots[0]
        self._first_ms[candidate] = start.elapsed_time(end)

    def stay_awake(self) -> None:
        """Nothing but the check: the program's own launches keep the device awake."""
        self._check()

    def _wake(self) -> None:
        pass

    def _wait(self) -> None:
        pass

    def _record(self, candidate: Candidate) -> list[TimedLaunch]:
        return []

    def _queue(
        self, candidates: Sequence[Candidate], ways: Sequence[Sequence[TimedLaunch]], rounds: int
    ) -> list[list[tuple[DeviceEvent, DeviceEvent, bool]]]:
        """Have launches made and wait for them. `ways` are the plain ones."""
        costs = [self._estimates.get(c, self._first_ms.get(c)) for c in candidates]
        series = LaunchSeries(
            candidates, rounds, flushes=self._flushes[False], costs_ms=costs, warm=self._warm
        )
        self._run_series(series, self._timeout_s)
        return series.slots


class BackgroundMeasurer(TritonMeasurer):
    """Times what is being served before anything else: only what was measured faster may take its place."""

    served: Candidate | None = None
    """The candidate to be timed first, if there is one."""

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """As `Measurer`, with one measurement more at the first time."""
        served, self.served = self.served, None
        first = () if served is None else (served,)
        wanted = dict.fromkeys((*first, *candidates))
        yield from super().measure(tuple(wanted), prefetch=prefetch, within_s=within_s)

    def _time(self, compiled: CompileResult) -> Measurement:
        if compiled.outcome is Outcome.TIMEOUT:
            # The program has the cores: that a compilation took long says nothing of the candidate.
            compiled = replace(compiled, outcome=Outcome.INFRASTRUCTURE)
        if compiled.doubtful:
            # The program's threads are not to wait for a compiler: it is tried on this one, and may be on theirs later.
            try:
                self._call.compile(compiled.candidate)
            except Exception:
                compiled = replace(compiled, outcome=Outcome.INFRASTRUCTURE, raised=False)
        return super()._time(compiled)

    def _repeat_failure(self, candidate: Candidate) -> None:
        """Nothing: a launch would wait for the compiler."""


def current_device_index() -> int:
    """The number of this thread's device."""
    from triton.runtime.driver import driver

    return int(driver.active.get_current_device())


_LOCK_TIMEOUT_S = 10.0
"""Seconds that one key waits for another process which tunes the same: other keys wait behind it."""


@dataclass
class KeyDecision:
    """One key of one tuner: what it is served by, and how it is decided."""

    tuner: Tuner
    key: Key
    problem: Problem
    call: KernelCall
    """With stand-ins for its tensors."""
    task: TuningTask
    served: Candidate
    store: Store
    guarded: GuardedStore
    settings: Settings
    surrogate: Surrogate
    policy: Policy | None
    compiled: Collection[Candidate]
    hear: Callable[[Decision, Collection[Candidate]], None]
    """Hears of the decision before anybody else, and of the candidates that this process has compiled."""
    device: int = field(default_factory=current_device_index)
    """The number of the device that it is decided for."""
    begun_at: float = field(default_factory=time.perf_counter)

    def make(
        self, run_series: Callable[[LaunchSeries, float], None], check: Callable[[], None]
    ) -> LaunchConfig:
        """Decide, and return what to launch from now on. Raises what `tune`, `run_series` and `check` raise."""
        measurers: list[BackgroundMeasurer] = []

        def measurer() -> BackgroundMeasurer:
            measurers.append(self._measurer(run_series, check))
            return measurers[-1]

        limits = self.settings
        settings = limits.with_(mode=Mode.TUNE, lock_timeout_s=min(_LOCK_TIMEOUT_S, limits.lock_timeout_s))
        with DecisionSpan(self.problem, limits, met_now=False) as span:
            decision = span.conclude(
                tune(
                    self.task,
                    measurer,
                    store=self.store,
                    surrogate=self.surrogate,
                    settings=settings,
                    policy=self.policy,
                )
            )
        if isinstance(self.task.grids, LazyGrids):
            self.task.grids.close()
        self.hear(decision, measurers[0].built if measurers else ())
        return self._conclude(decision, measurers[0].raw if measurers else None)

    def _conclude(self, decision: Decision, raw: Mapping[Candidate, Times] | None) -> LaunchConfig:
        """Tell of the decision; returns what to launch. `raw` is as `publish_decision` takes it."""
        problem, rows = self.problem, self.guarded.measurements(self.problem)
        config = launch_config(self.call, self._to_serve(decision, rows), lambda: rows)
        try:
            publish_decision(
                self.call,
                self.key,
                config,
                self.guarded,
                problem,
                decision,
                raw,
                time.perf_counter() - self.begun_at,
                say=self.settings.summary,
                resets=False,
            )
        except (
            Exception
        ) as error:  # a listener's: there is no caller here to raise it for, and a choice was made
            with contextlib.suppress(Warning):
                warnings.warn(
                    f"kernel {problem.kernel.name}: a listener failed: {error!r:.300}", stacklevel=2
                )
        if raw is not None:
            note_choice(self.store, self.call, decision)
        return config

    def _to_serve(self, decision: Decision, rows: Sequence[Measurement]) -> Candidate:
        """Return the choice if it was measured faster than the candidate that is served, which else stays."""
        known = latest_labels(rows)
        served, chosen = known.get(self.served), known.get(decision.chosen)
        faster = (
            served is not None and chosen is not None and served.ok and chosen.ok and chosen.ms < served.ms
        )
        return decision.chosen if faster else self.served

    def _measurer(
        self, run_series: Callable[[LaunchSeries, float], None], check: Callable[[], None]
    ) -> BackgroundMeasurer:
        settings = self.settings
        timer = SlicedTimer(
            self.call,
            run_series,
            lambda candidate: self.guarded.watch(self.problem, candidate),
            check,
            settings.timeout_s,
            settings.l2 == "warm",
        )
        measurer = BackgroundMeasurer(
            self.call,
            self.problem.id,
            workers=settings.worker_count(),
            timeout_s=settings.timeout_s,
            guard=lambda _: contextlib.nullcontext(),
            say=lambda candidate: print_timed_candidate(self.call, candidate),
            compiler=settings.compiler,
            compiled=[c for c in dict.fromkeys((self.served, *self.compiled)) if c in self.call.configs],
            timer=timer,
        )
        if self.served not in latest_labels(self.guarded.measurements(self.problem)):
            measurer.served = self.served
        return measurer
