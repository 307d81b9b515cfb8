"""The decision of one key as the background thread makes it: what it needs, without any tensor of the program's."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from forecast_autotune.policy import Policy
from forecast_autotune.records import Candidate, Decision, Measurement, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.telemetry.spans import DecisionSpan
from forecast_autotune.tuning.loop import GuardedStore, TuningTask, tune
from forecast_integrations.triton.background.launch_series import LaunchSeries
from forecast_integrations.triton.background.sliced_timer import BackgroundMeasurer, SlicedTimer
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.lazy_candidates import LazyGrids
from forecast_integrations.triton.protocols import Key, LaunchConfig, Times, Tuner
from forecast_integrations.triton.publication import offer_advice, print_timed_candidate, publish_decision
from forecast_integrations.triton.variants.launch_config import launch_config


def current_device_index() -> int:
    """The number of this thread's device."""
    from triton.runtime.driver import driver

    return int(driver.active.get_current_device())


_LOCK_TIMEOUT_S = 10.0
"""Seconds that one key waits for another process which tunes the same: other keys wait behind it."""


@dataclass(frozen=True)
class MadeDecision:
    """What was decided of a key, and what it took."""

    decision: Decision
    raw: Mapping[Candidate, Times] | None
    """As `publish_decision` takes it: None where nothing was timed."""
    built: Collection[Candidate]
    """Candidates that this process has compiled."""
    seconds: float


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
    hear: Callable[[MadeDecision], None]
    """Told of the decision before anybody else."""
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
        made = MadeDecision(
            decision,
            measurers[0].raw if measurers else None,
            measurers[0].built if measurers else (),
            time.perf_counter() - self.begun_at,
        )
        return self._conclude(made)

    def _conclude(self, made: MadeDecision) -> LaunchConfig:
        """Tell of the decision; returns what to launch."""
        self.hear(made)
        problem, rows = self.problem, self.guarded.measurements(self.problem)
        config = launch_config(self.call, self._to_serve(made.decision, rows), lambda: rows)
        try:
            publish_decision(
                self.call,
                self.key,
                config,
                self.guarded,
                problem,
                made.decision,
                made.raw,
                made.seconds,
                say=self.settings.summary,
                resets=False,
            )
        except (
            Exception
        ) as error:  # of a listener: there is no caller here to raise it for, and a choice was made
            with contextlib.suppress(Warning):
                warnings.warn(
                    f"kernel {problem.kernel.name}: a listener failed: {error!r:.300}", stacklevel=2
                )
        if made.raw is not None:
            offer_advice(self.settings, self.store, problem.kernel, self.tuner.fn)
        return config

    def _to_serve(self, decision: Decision, rows: Sequence[Measurement]) -> Candidate:
        """What was chosen if it was measured faster than what is being served, which else stays."""
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
        )
        made = BackgroundMeasurer(
            self.call,
            self.problem.id,
            workers=settings.worker_count(),
            timeout_s=settings.timeout_s,
            guard=lambda _: contextlib.nullcontext(),
            say=lambda candidate: print_timed_candidate(self.call, candidate),
            compiler=settings.compiler,
            compiled=[c for c in dict.fromkeys((self.served, *self.compiled)) if c in self.call.configs],
            patient=False,
            timer=timer,
        )
        if self.served not in latest_labels(self.guarded.measurements(self.problem)):
            made.served = self.served
        return made
