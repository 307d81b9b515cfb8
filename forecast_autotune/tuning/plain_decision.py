"""What is decided where a part of ours has failed: the fastest of all candidates, as `triton.autotune` has it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from forecast_autotune.policy import time_exhausted
from forecast_autotune.records import Candidate, Cost, Decision, Evidence, Measurement, MeasuringCost, Outcome
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.task import TuningStore, TuningTask, utc_now
from forecast_autotune.tuning.unmeasured import no_working_config

_TIMING_MODES = (Mode.TUNE, Mode.EXHAUSTIVE, Mode.LISTEN)


def decide_plainly(
    task: TuningTask, make: Callable[[], Measurer], store: TuningStore, settings: Settings, error: Exception
) -> Decision:
    """Measure every candidate that is not known, and take the fastest; without a clock, the first. Says why.

    Neither forecasts nor a policy have a part in it, and it is not kept as a decision: the next process tries
    again. Raises `NoWorkingConfigError` where all candidates fail, and what the measurer raises.
    """
    timed = settings.mode in _TIMING_MODES
    how = "measuring everything" if timed else "using the first config"
    warnings.warn(f"the tuner failed ({error!r:.300}): {how}", stacklevel=3)
    candidates = list(task.candidates)
    asked = frozenset(candidates)
    known = latest_labels(m for m in store.measurements(task.problem) if m.candidate in asked)
    tried: dict[Candidate, Measurement] = {}
    spent = MeasuringCost()
    if timed and (missing := [c for c in candidates if c not in known]):
        measurer = make()
        try:
            for m in measurer.measure(missing):
                store.add(task.problem, m)
                tried[m.candidate] = m
                if m.ok and time_exhausted(settings.budget, measurer.spent()):
                    break
            spent = measurer.spent()
        finally:
            measurer.close()
    ran = [m for m in (known | tried).values() if m.ok]
    if timed and not ran and all(m.outcome is not Outcome.INFRASTRUCTURE for m in tried.values()):
        raise no_working_config(task.problem, known | tried, len(candidates))
    failed = {c for c, m in known.items() if not m.ok}
    chosen, evidence = next((c for c in candidates if c not in failed), candidates[0]), Evidence.FORECAST
    best = min(ran, key=lambda m: m.ms, default=None)
    if best is not None:
        chosen, evidence = best.candidate, Evidence.MEASURED if best.candidate in tried else Evidence.STORED
    return Decision(
        problem=task.problem.id,
        chosen=chosen,
        evidence=evidence,
        reason=f"{how}: the tuner failed ({error!r:.300})",
        stated_risk=0.0 if len(known | tried) == len(candidates) and ran else 1.0,
        tolerance=settings.tolerance,
        candidates=len(candidates),
        measured=len(tried),
        known=len(known),
        trusted=len(candidates) - len(known | tried),
        median_ms=None if best is None else best.ms,
        cost=Cost(spent.wall_s, 0.0, spent.compile_s, spent.timing_s, spent.compiled),
        at=utc_now(),
    )
