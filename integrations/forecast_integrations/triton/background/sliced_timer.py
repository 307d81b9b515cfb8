"""A timer whose launches are made by the threads that launch the kernel anyway, and a measurer that uses it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

from forecast_autotune.records import Candidate, Measurement, Outcome
from forecast_autotune.timing.recorded_launches import DeviceEvent
from forecast_integrations.triton.background.launch_series import LaunchSeries
from forecast_integrations.triton.compile.protocol import CompileResult
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.timer.measurer import TritonMeasurer
from forecast_integrations.triton.timer.short_launches import TimedLaunch
from forecast_integrations.triton.timer.timers import EventTimer


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
    ) -> None:
        """`watch` is entered around a candidate's first launch; `check` raises where nothing is wanted any more."""
        super().__init__(call)
        self._run_series, self._watch, self._check, self._timeout_s = run_series, watch, check, timeout_s

    def _flusher(self, driver: Any) -> tuple[Callable[[], None], str]:
        # Whoever launches flushes: memory taken on one stream is not to be written to on another.
        return lambda: None, "l2flush"

    def first(self, candidate: Candidate, timeout_s: float) -> None:
        """Have it launched once. Raises `LaunchTimeoutError` when it does not come back, and what the launch raises."""
        with suppress(Exception):  # it fails again where it is launched, and is recorded there
            self._load(candidate)
        series = LaunchSeries([candidate], 1, flushes=0, costs_ms=[None], watch=self._watch)
        self._run_series(series, timeout_s)
        ((start, end, _),) = series.slots[0]
        self._first_ms[candidate] = start.elapsed_time(end)

    def _load(self, candidate: Candidate) -> None:
        """Load the binary here: no launch of the program's has to wait for it."""
        kernel: Any = self._call.compile(candidate)
        if getattr(kernel, "module", kernel) is None:
            kernel._init_handles()

    def stay_awake(self) -> None:
        """Nothing but the check: the program's own launches keep the device awake."""
        self._check()

    def _wake(self) -> None:
        pass

    def _wait(self) -> None:
        pass

    def _record(self, candidate: Candidate, *, finely: bool = False) -> list[TimedLaunch]:
        return []

    def _queue(
        self, candidates: Sequence[Candidate], ways: Sequence[Sequence[TimedLaunch]], rounds: int
    ) -> list[list[tuple[DeviceEvent, DeviceEvent, bool]]]:
        """Have launches made and wait for them. `ways` are the plain ones."""
        costs = [self._estimates.get(c, self._first_ms.get(c)) for c in candidates]
        series = LaunchSeries(candidates, rounds, flushes=self._flushes, costs_ms=costs)
        self._run_series(series, self._timeout_s)
        return series.slots


class BackgroundMeasurer(TritonMeasurer):
    """Times what is being served before anything else: only what was measured faster may take its place."""

    served: Candidate | None = None
    """What is to be timed first, if anything is."""

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
        return super()._time(compiled)

    def _repeat_failure(self, candidate: Candidate) -> None:
        """Nothing: whoever launches would wait for the compiler."""
