"""Decisions without a clock: from the store alone, or from the forecasts alone."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence

from forecast_autotune.errors import FrozenMissError
from forecast_autotune.policy import TuningState, stated_risk
from forecast_autotune.records import Candidate, Cost, Decision, Evidence, Measurement
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative, Surrogate
from forecast_autotune.tuning.task import (
    TuningStore,
    TuningTask,
    uninformative_forecasts,
    utc_now,
    validate_forecasts,
)
from forecast_autotune.tuning.tracing import LazyTraces


def decide_from_store(
    task: TuningTask, store: TuningStore, surrogate: Surrogate, settings: Settings, mark: str
) -> Decision:
    """Skip and frozen mode: the best stored time, else the best forecast.

    Raises `FrozenMissError` in frozen mode with `on_miss="error"` when the store holds no time.
    """
    wanted = set(task.candidates)
    rows = [m for m in store.measurements(task.problem) if m.candidate in wanted]
    timed = any(m.ok for m in latest_labels(rows).values())
    if settings.mode is Mode.FROZEN and not timed and settings.on_miss == "error":
        raise FrozenMissError(
            f"frozen mode: the store holds nothing for kernel {task.problem.kernel.name} with key "
            f"{task.problem.key} on {task.problem.device.name}. Tune once with "
            "FORECAST_AUTOTUNE_MODE=tune, or set FORECAST_AUTOTUNE_ON_MISS=forecast"
        )
    relatives = store.relatives(task.problem)
    return decide_unmeasured(
        task, rows, relatives, surrogate, settings, mark, f"{settings.mode} mode: not timed"
    )


def decide_unmeasured(
    task: TuningTask,
    rows: Sequence[Measurement],
    relatives: Sequence[Relative],
    surrogate: Surrogate,
    settings: Settings,
    mark: str,
    reason: str,
) -> Decision:
    """The best of `rows` or, without any that ran, the best forecast. Never raises for a bad surrogate."""
    begin = time.perf_counter()
    traces = LazyTraces(task.candidates, task.trace, task.read_facts)
    try:
        traces.trace_initial()
        query = Query(
            task.problem,
            task.candidates,
            task.grids,
            rows,
            relatives,
            traces.texts,
            task.sources,
            once=True,
        )
        forecasts = validate_forecasts(surrogate.forecast(query), task.candidates)
    except Exception as error:
        warnings.warn(f"surrogate {surrogate.name} failed ({error!r}): using the first config", stacklevel=2)
        forecasts = uninformative_forecasts(task.candidates, f"no forecast: {error}")
    spent = time.perf_counter() - begin
    cost = Cost(wall_s=spent, forecast_s=spent).with_llm(forecasts.consultation)
    reason = "; ".join(map(str, filter(None, (reason, forecasts.consultation))))
    return decide_from_forecasts(task, forecasts, settings, mark, reason, cost, latest_labels(rows))


def decide_from_forecasts(
    task: TuningTask,
    forecasts: Forecasts,
    settings: Settings,
    mark: str,
    reason: str,
    cost: Cost,
    measured: Mapping[Candidate, Measurement] | None = None,
) -> Decision:
    """A decision on what is measured already, else on the forecasts; `mark` is its settings digest."""
    measured = measured or {}
    state = TuningState(forecasts, measured, tolerance=settings.tolerance, seed=settings.seed)
    fast = sorted((m for m in measured.values() if m.ok), key=lambda m: m.ms)
    ranked = [task.candidates[int(i)] for i in forecasts.order()]
    # What is not among the fast has failed: it is launched only if there is nothing else to launch.
    chosen = fast[0].candidate if fast else next((c for c in ranked if c not in measured), ranked[0])
    if fast:
        rows = state.pending()
        risk = stated_risk(state, rows, forecasts.samples(rows, 512, settings.seed))
    else:
        within = forecasts.p_within(settings.tolerance, seed=settings.seed)
        risk = 1.0 - float(within[list(task.candidates).index(chosen)])
    return Decision(
        problem=task.problem.id,
        chosen=chosen,
        evidence=Evidence.STORED if fast else Evidence.FORECAST,
        reason=reason,
        stated_risk=risk if math.isfinite(risk) else 1.0,
        tolerance=settings.tolerance,
        candidates=len(task.candidates),
        measured=0,
        known=len(measured),
        trusted=len(task.candidates) - len(measured),
        median_ms=fast[0].ms if fast else None,
        cost=cost,
        settings=mark,
        at=utc_now(),
    )
