"""Decisions without a clock: from the store alone, or from forecasts alone; and what a decision is asked."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np

from forecast_autotune.errors import FrozenMiss, RecordError
from forecast_autotune.policy import Policy, State, stated_risk
from forecast_autotune.records import Candidate, Evidence, Problem, digest
from forecast_autotune.results import Cost, Decision, Measurement
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.base import Forecasts, Query, Relative, Surrogate
from forecast_autotune.table import latest
from forecast_autotune.tracing import Traces


@dataclass
class Task:
    """One decision to make."""

    problem: Problem
    candidates: Sequence[Candidate]
    grids: Mapping[Candidate, tuple[int, ...]] = field(default_factory=dict)
    trace: Callable[[Sequence[Candidate]], Mapping[str, str]] | None = None
    """Gives TTIR by assignment key for the candidates asked for; None when there is no IR."""
    fingerprint: str = ""
    """Digest of the candidates; computed when empty."""

    def settings_digest(self, settings: Settings, policy: Policy) -> str:
        """Names everything a stored decision depends on besides the problem."""
        mark = self.fingerprint or fingerprint(self.candidates)
        return digest(mark, policy.name, settings.tolerance, settings.risk, repr(settings.budget))


def fingerprint(candidates: Sequence[Candidate]) -> str:
    """One digest for a list of candidates, whatever their order."""
    return digest(*sorted(c.id for c in candidates))


def flat(candidates: Sequence[Candidate], reason: str) -> Forecasts:
    """Forecasts that say nothing: every candidate alike, eightfold either way."""
    n = len(candidates)
    return Forecasts(candidates, np.zeros(n), np.full(n, 3.0), np.full(n, 0.05), None, reason)


def checked(forecasts: Forecasts, candidates: Sequence[Candidate]) -> Forecasts:
    """The forecasts, if a decision can be built on them. Raises `RecordError` naming what is wrong.

    A plug-in that answers NaN, for other candidates or in other shapes must be found out here: every
    comparison further on would go wrong in silence.
    """
    n = len(candidates)
    if list(forecasts.candidates) != list(candidates):
        raise RecordError(f"it must answer the {n} candidates of the query, in their order")
    arrays = {name: np.asarray(getattr(forecasts, name), float) for name in ("mean", "sd", "p_fail")}
    for name, values in arrays.items():
        if values.shape != (n,):
            raise RecordError(f"{name} must have shape ({n},), not {values.shape}")
        if not np.isfinite(values).all():
            raise RecordError(f"{name} must be finite, but {int((~np.isfinite(values)).sum())} values are not")
    if (arrays["sd"] < 0).any() or (arrays["p_fail"] < 0).any() or (arrays["p_fail"] > 1).any():
        raise RecordError("sd must be at least 0 and p_fail a probability")
    known = replace(forecasts, **arrays)
    drawn = np.asarray(known.samples(np.arange(min(n, 2)), 3))
    if drawn.shape != (3, min(n, 2)) or not np.isfinite(drawn).all():
        raise RecordError(f"3 joint samples of {min(n, 2)} candidates must be finite, with that shape")
    return known


def _from_store_alone(
    task: Task, store: Memory, surrogate: Surrogate, settings: Settings, mark: str
) -> Decision:
    wanted = set(task.candidates)
    rows = [m for m in store.measurements(task.problem) if m.candidate in wanted]
    fast = sorted((m for m in latest(rows).values() if m.ok), key=lambda m: m.ms)
    if settings.mode is Mode.FROZEN and not fast and settings.on_miss == "error":
        raise FrozenMiss(
            f"frozen mode: the store holds nothing for kernel {task.problem.kernel.name} with key "
            f"{task.problem.key} on {task.problem.device.name}. Tune once with "
            "FORECAST_AUTOTUNE_MODE=tune, or set FORECAST_AUTOTUNE_ON_MISS=forecast"
        )
    relatives = store.relatives(task.problem)
    return _untimed(task, rows, relatives, surrogate, settings, mark, f"{settings.mode} mode: not timed")


def _untimed(
    task: Task,
    rows: Sequence[Measurement],
    relatives: Sequence[Relative],
    surrogate: Surrogate,
    settings: Settings,
    mark: str,
    reason: str,
) -> Decision:
    begin = time.perf_counter()
    traces = Traces(task.candidates, task.trace)
    try:
        traces.begin()
        forecasts = surrogate.forecast(
            Query(task.problem, task.candidates, task.grids, rows, relatives, traces.texts)
        )
    except Exception as error:
        warnings.warn(f"surrogate {surrogate.name} failed ({error!r}): using the first config", stacklevel=2)
        forecasts = flat(task.candidates, f"no forecast: {error}")
    cost = Cost(wall_s=time.perf_counter() - begin, forecast_s=time.perf_counter() - begin)
    return _from_forecasts(task, forecasts, settings, mark, reason, cost, latest(rows))


def _from_forecasts(
    task: Task,
    forecasts: Forecasts,
    settings: Settings,
    mark: str,
    reason: str,
    cost: Cost,
    measured: Mapping[Candidate, Measurement] | None = None,
) -> Decision:
    measured = measured or {}
    state = State(forecasts, measured, tolerance=settings.tolerance, seed=settings.seed)
    fast = sorted((m for m in measured.values() if m.ok), key=lambda m: m.ms)
    chosen = fast[0].candidate if fast else task.candidates[int(forecasts.order()[0])]
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
        at=now(),
    )


def now() -> str:
    """UTC time to the second, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
