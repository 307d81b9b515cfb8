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
from forecast_integrations.triton.timer.timers import EventTimer, TimedLaunch, queue_pause
from forecast_integrations.triton.variants.loading import launch_config

_FLUSH_MS = 0.08
"""Time to flush the L2 of a fast card."""

EventPair = tuple[DeviceEvent, DeviceEvent]


class LaunchSeries:
    """Rounds of launches of some candidates in turns, each launch between two events.

    Nothing here waits for the device. `watch` is entered before a candidate's first launch ever, and left by
    `close`.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        rounds: int,
        *,
        lead_s: float = 0.0,
        costs_ms: Sequence[float | None],
        watch: Callable[[Candidate], AbstractContextManager[object]] | None = None,
        load: Callable[[], object] | None = None,
        warm: bool = False,
    ) -> None:
        """`costs_ms` are probable milliseconds of the candidates' launches; None for unknown ones.

        The device pauses for `lead_s` seconds before each.

        `load` runs before the first launch, on an idle device.
        """
        self.candidates, self.lead_s, self.load, self._warm = tuple(candidates), lead_s, load, warm
        self.slots: list[list[tuple[DeviceEvent, DeviceEvent, bool]]] = [[] for _ in candidates]
        """Per candidate, events around each launch, and whether the device waited for the launch."""
        self.error: Exception | None = None
        self.spans: list[tuple[EventPair, float]] = []
        """Events around each slice of launches, and the milliseconds that the budget was charged for it."""
        self._costs_ms, self._watch = tuple(costs_ms), watch
        self._total = rounds * len(self.candidates)
        self._launch_count = 0
        self._watching = contextlib.ExitStack()
        self.host_s = 0.0
        """Seconds that the host took for the latest launch."""

    @property
    def is_launched(self) -> bool:
        """Whether all launches were made, or one failed."""
        return self._launch_count >= self._total or self.error is not None

    @property
    def _turn(self) -> int:
        """The place of the next candidate, back and forth: every other launch of a device takes longer."""
        turns, place = divmod(self._launch_count, len(self.candidates))
        return len(self.candidates) - 1 - place if turns % 2 else place

    def next_cost_ms(self) -> float | None:
        """Return the probable milliseconds of the next launch, with the work before it; None if unknown."""
        cost = self._costs_ms[self._turn]
        return None if cost is None else cost + (cost if self._warm else _FLUSH_MS) + 1e3 * self.lead_s

    def advance(self, call: KernelCall, flush: Callable[[], object], interface: Any, most_ms: float) -> float:
        """Make launches for `most_ms` milliseconds, at least one; returns their probable milliseconds.

        A launch of unknown cost is the last one. An error of the candidate's, or of hooks, ends the series; any other
        interruption is raised, and its launch is not counted.
        """
        planned_ms = 0.0
        launches = [call.launcher(c) for c in self.candidates]
        try:
            while not self.is_launched:
                cost = self.next_cost_ms()
                if planned_ms and (cost is None or planned_ms + cost > most_ms):
                    break
                begin = time.perf_counter()
                self._launch(call, launches, flush, interface)
                self.host_s = time.perf_counter() - begin
                planned_ms += cost or 0.0
                if cost is None:
                    break
        except Exception as error:
            self.error = error
        return planned_ms

    def _launch(
        self,
        call: KernelCall,
        launches: Sequence[Callable[[], object]],
        flush: Callable[[], object],
        interface: Any,
    ) -> None:
        turn = self._turn
        candidate = self.candidates[turn]
        if self._watch is not None:
            self._watching.enter_context(self._watch(candidate))
        start, end = (interface.Event(enable_timing=True) for _ in range(2))
        full = call.run_before_hooks(candidate) if call.has_hooks(candidate) else None
        queue_pause(interface, self.lead_s)
        launches[turn]() if self._warm else flush()
        start.record()
        try:
            launches[turn]()
        except Exception as error:
            if full is not None:
                call.run_after_hook(full, error)
            raise
        end.record()
        late = start.query()
        if full is not None:
            call.run_after_hook(full)
        self.slots[turn].append((start, end, late))
        self._launch_count += 1

    def has_begun(self) -> bool:
        """Whether the device has begun the latest slice of launches."""
        return bool(self.spans) and self.spans[-1][0][0].query()

    def is_over(self) -> bool:
        """Whether the device has ended all launches."""
        return all(end.query() for (_, end), _ in self.spans)

    def close(self) -> None:
        """Leave the watches of all candidates."""
        self._watching.close()


class SlicedTimer(EventTimer):
    """Times by device events as `EventTimer` does; no launch is recorded as a graph.

    `run_series(series, timeout_s)` returns once all launches of a series were made and the device is done with them.
    """

    most_lead_s = 6e-4  # the program waits, too

    def __init__(
        self,
        call: KernelCall,
        run_series: Callable[[LaunchSeries, float], None],
        watch: Callable[[Candidate], AbstractContextManager[object]],
        check: Callable[[], None],
        timeout_s: float,
        warm: bool,
    ) -> None:
        """`watch` is entered around a candidate's first launch; `check` raises where the decision is put off."""
        super().__init__(call, warm=warm)
        self._hot_until = 0.0  # nothing here waits for the device to rest
        self._run_series, self._watch, self._check, self._timeout_s = run_series, watch, check, timeout_s

    def _flusher(self, driver: Any) -> tuple[tuple[Callable[[], object], Callable[[], object]], str]:
        # The launching thread flushes: memory allocated on one stream must not be written on another.
        return (lambda: None, lambda: None), "l2read"

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """Have a candidate launched once. Raises `LaunchTimeoutError` if it does not end, and the launch's errors."""
        loads: list[Callable[[], object]] = []
        with suppress(Exception):  # it fails again where it is launched, and is recorded there
            kernel: Any = self._call.compile(candidate)
            loads += [kernel._init_handles] if getattr(kernel, "module", kernel) is None else []
        if not self._first_ms:  # the flush and the pause have code to load, too
            loads.append(lambda: queue_pause(self._interface, 1e-6))
        load = (lambda: [one() for one in loads]) if loads else None
        series = LaunchSeries([candidate], 1, costs_ms=[None], watch=self._watch, load=load)
        self._run_series(series, timeout_s)
        ((start, end, _),) = series.slots[0]
        self._first_ms[candidate] = start.elapsed_time(end)

    def stay_awake(self) -> None:
        """Check alone: the program's own launches keep the device awake."""
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
        series = LaunchSeries(candidates, rounds, lead_s=self._lead_s[False], costs_ms=costs, warm=self._warm)
        self._run_series(series, self._timeout_s)
        self._host_s = series.host_s
        return series.slots


class BackgroundMeasurer(TritonMeasurer):
    """Times the served candidate first: only a candidate that was measured faster may replace it."""

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
        order = dict.fromkeys((*first, *candidates))
        yield from super().measure(tuple(order), prefetch=prefetch, within_s=within_s)

    def _time(self, compilation: CompileResult) -> Measurement:
        if compilation.outcome is Outcome.TIMEOUT:
            # The program has the cores: a slow compilation is no property of the candidate.
            compilation = replace(compilation, outcome=Outcome.INFRASTRUCTURE)
        if compilation.doubtful:
            # The program's threads must not wait for a compiler: the candidate is compiled on this one first.
            try:
                self._call.compile(compilation.candidate)
            except Exception:
                compilation = replace(compilation, outcome=Outcome.INFRASTRUCTURE, raised=False)
        return super()._time(compilation)

    def _repeat_failure(self, candidate: Candidate) -> None:
        """Do nothing: a launch would wait for the compiler."""


def current_device_index() -> int:
    """The number of this thread's device."""
    from triton.runtime.driver import driver

    return int(driver.active.get_current_device())


_LOCK_TIMEOUT_S = 10.0
"""Seconds that one key waits for another process which tunes the same: other keys wait behind it."""


@dataclass
class KeyDecision:
    """One key of one tuner: the candidate that serves it, and all that its decision needs."""

    tuner: Tuner
    key: Key
    problem: Problem
    call: KernelCall
    """With stand-ins for its tensors."""
    task: TuningTask
    served: Candidate
    store: Store
    guarded_store: GuardedStore
    settings: Settings
    surrogate: Surrogate
    policy: Policy | None
    compiled: Collection[Candidate]
    on_decision: Callable[[Decision, Collection[Candidate]], None]
    """Called first with the decision, and with the candidates that this process has compiled."""
    device: int = field(default_factory=current_device_index)
    """The number of the key's device."""
    begin: float = field(default_factory=time.perf_counter)

    def make(
        self, run_series: Callable[[LaunchSeries, float], None], check: Callable[[], None]
    ) -> LaunchConfig:
        """Decide, and return the final config. Raises what `tune`, `run_series` and `check` raise."""
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
        self.on_decision(decision, measurers[0].built if measurers else ())
        return self._conclude(decision, measurers[0].raw if measurers else None)

    def _conclude(self, decision: Decision, raw: Mapping[Candidate, Times] | None) -> LaunchConfig:
        """Publish the decision; returns the final config. `raw` is as `publish_decision` takes it."""
        problem, rows = self.problem, self.guarded_store.measurements(self.problem)
        config = launch_config(self.call, self._to_serve(decision, rows), lambda: rows)
        try:
            publish_decision(
                self.call,
                self.key,
                config,
                self.guarded_store,
                problem,
                decision,
                raw,
                time.perf_counter() - self.begin,
                say=self.settings.summary,
                resets=False,
            )
        except Exception as error:  # a listener's: no caller here could catch it, and the choice is made
            with contextlib.suppress(Warning):
                warnings.warn(
                    f"kernel {problem.kernel.name}: a listener failed: {error!r:.300}", stacklevel=2
                )
        if raw is not None:
            note_choice(self.store, self.call, decision)
        return config

    def _to_serve(self, decision: Decision, rows: Sequence[Measurement]) -> Candidate:
        """Return the choice if it was measured faster than the served candidate, else the served one."""
        labels = latest_labels(rows)
        before, chosen = labels.get(self.served), labels.get(decision.chosen)
        faster = (
            before is not None and chosen is not None and before.ok and chosen.ok and chosen.ms < before.ms
        )
        return decision.chosen if faster else self.served

    def _measurer(
        self, run_series: Callable[[LaunchSeries, float], None], check: Callable[[], None]
    ) -> BackgroundMeasurer:
        settings = self.settings
        timer = SlicedTimer(
            self.call,
            run_series,
            lambda candidate: self.guarded_store.watch(self.problem, candidate),
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
        if self.served not in latest_labels(self.guarded_store.measurements(self.problem)):
            measurer.served = self.served
        return measurer
