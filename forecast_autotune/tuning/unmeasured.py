"""Decisions without a clock: from the store alone, or from the forecasts alone."""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence

from forecast_autotune.errors import FrozenMissError, NoWorkingConfigError, is_of_caller
from forecast_autotune.policy import TuningState, stated_risk
from forecast_autotune.records import Candidate, Cost, Decision, Evidence, Measurement, Outcome, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store.misses import Miss
from forecast_autotune.surrogates.protocol import Forecasts, Relative
from forecast_autotune.tuning.forecaster import TaskForecaster
from forecast_autotune.tuning.guarded_store import GuardedStore
from forecast_autotune.tuning.results import TaskResults
from forecast_autotune.tuning.task import MissStore, uninformative_forecasts, utc_now

_MAX_SHOWN_MESSAGES = 3
"""Distinct messages, the most frequent first, shown when nothing launches."""


def decide_from_store(
    forecaster: TaskForecaster, store: GuardedStore, settings: Settings, mark: str
) -> Decision:
    """Skip and frozen mode: the best stored time, else the best forecast.

    Raises `FrozenMissError` in frozen mode with `on_miss="error"` when the store holds no time.
    """
    problem, known = forecaster.problem, forecaster.candidates.row_of
    rows = [m for m in store.measurements(problem) if m.candidate in known]
    timed = any(m.ok for m in latest_labels(rows).values())
    if not timed and store.keeps(MissStore):
        count, grids = len(forecaster.candidates), forecaster.grids
        store.add_miss(Miss.of(problem, settings.mode, count, grids, utc_now()))
    if settings.mode is Mode.FROZEN and not timed and settings.on_miss == "error":
        raise FrozenMissError(
            f"frozen mode: the store holds nothing for kernel {problem.kernel.name} with key "
            f"{problem.key} on {problem.device.name}. Tune once with "
            "FORECAST_AUTOTUNE_MODE=tune, or set FORECAST_AUTOTUNE_ON_MISS=forecast"
        )
    relatives = store.relatives(problem)
    return decide_unmeasured(forecaster, rows, relatives, settings, mark, f"{settings.mode} mode: not timed")


def decide_unmeasured(
    forecaster: TaskForecaster,
    rows: Sequence[Measurement],
    relatives: Sequence[Relative],
    settings: Settings,
    mark: str,
    reason: str,
) -> Decision:
    """The best of `rows` or, without any that ran, the best forecast. Never raises for a bad surrogate."""
    begin = time.perf_counter()
    try:
        forecaster.traces.trace_initial()
        forecasts = forecaster.forecast(rows, relatives, once=True)
    except Exception as error:
        if is_of_caller(error):
            raise
        warnings.warn(f"surrogate {forecaster.name} failed ({error!r}): using the first config", stacklevel=2)
        forecasts = uninformative_forecasts(forecaster.candidates, f"no forecast: {error}")
    spent = time.perf_counter() - begin
    cost = Cost(wall_s=spent, forecast_s=spent).with_llm(forecasts.consultation)
    reason = "; ".join(map(str, filter(None, (reason, forecasts.consultation))))
    return decide_from_forecasts(
        forecaster.problem, forecasts, settings, mark, reason, cost, latest_labels(rows)
    )


def decide_without_times(
    results: TaskResults, forecasts: Forecasts, settings: Settings, cost: Cost
) -> Decision:
    """What is launched after a decision in which nothing ran because the harness is broken: the best forecast.

    Raises `NoWorkingConfigError` where it was the candidates that failed.
    """
    faults = [m for m in results.tried.values() if m.outcome is Outcome.INFRASTRUCTURE]
    if not faults:
        raise no_working_config(results.problem, results.labels, len(forecasts))
    why = f"not timed: {faults[0].extra.get('message', 'no message')}"
    warnings.warn(f"nothing could be timed ({why}): using the best forecast", stacklevel=2)
    return decide_from_forecasts(results.problem, forecasts, settings, "", why, cost, results.labels)


def decide_from_forecasts(
    problem: Problem,
    forecasts: Forecasts,
    settings: Settings,
    mark: str,
    reason: str,
    cost: Cost,
    measured: Mapping[Candidate, Measurement],
) -> Decision:
    """A decision on what is measured already, else on the forecasts; `mark` is its settings digest."""
    candidates = forecasts.candidates
    state = TuningState(forecasts, measured, tolerance=settings.tolerance, seed=settings.seed)
    fast = sorted((m for m in measured.values() if m.ok), key=lambda m: m.ms)
    ranked = [candidates[int(i)] for i in forecasts.order()]
    # What is not among the fast has failed: it is launched only if there is nothing else to launch.
    chosen = fast[0].candidate if fast else next((c for c in ranked if c not in measured), ranked[0])
    if fast:
        rows = state.pending()
        risk = stated_risk(state, rows, forecasts.samples(rows, 512, settings.seed))
    else:
        within = forecasts.p_within(settings.tolerance, seed=settings.seed)
        risk = 1.0 - float(within[list(candidates).index(chosen)])
    return Decision(
        problem=problem.id,
        chosen=chosen,
        evidence=Evidence.STORED if fast else Evidence.FORECAST,
        reason=reason,
        stated_risk=risk if math.isfinite(risk) else 1.0,
        tolerance=settings.tolerance,
        candidates=len(candidates),
        measured=0,
        known=len(measured),
        trusted=len(candidates) - len(measured),
        median_ms=fast[0].ms if fast else None,
        cost=cost,
        settings=mark,
        at=utc_now(),
        llm=forecasts.consultation,
        advice=forecasts.advice,
    )


def no_working_config(
    problem: Problem, labels: Mapping[Candidate, Measurement], candidates: int
) -> NoWorkingConfigError:
    """What happened to all of them, with the compilers' and launchers' own words."""
    counted = Counter(str(m.outcome) for m in labels.values())
    shown = ", ".join(f"{n} {name}" for name, n in sorted(counted.items()))
    messages = Counter(str(m.extra.get("message", "")) for m in labels.values())
    del messages[""]
    # Whole, as the reason often stands at the end of what a compiler says.
    seen = "\n".join(text for text, _ in messages.most_common(_MAX_SHOWN_MESSAGES))
    if set(counted) == {str(Outcome.COMPILE_ERROR)}:
        remedy = "Mend what the compiler says"
    else:
        remedy = f"Give at least one config that fits {problem.device.name}"
    return NoWorkingConfigError(
        f"kernel {problem.kernel.name}: none of {candidates} candidates ran "
        f"({shown}). {remedy}; `forecast-autotune clear` forgets these outcomes. "
        f"Seen: {seen or 'no message'}"
    )
