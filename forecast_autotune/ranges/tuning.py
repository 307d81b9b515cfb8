"""One decision for a range: `tune_range` does what `tune` does, for a candidate's mean time over several sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forecast_autotune.features.stored_facts import collect_facts, merge_facts
from forecast_autotune.policy import Policy, WallTime
from forecast_autotune.ranges.measurer import RangeMeasurer
from forecast_autotune.ranges.points import RangePoint, RangeRows
from forecast_autotune.ranges.store import RangeStore
from forecast_autotune.ranges.surrogate import RangeSurrogate
from forecast_autotune.records import Candidate, Decision
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import Array, Surrogate
from forecast_autotune.telemetry.spans import DecisionSpan
from forecast_autotune.tuning.loop import FACT_COLLECTION_S, GuardedStore, TuningTask, tune
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.results import TuningStore

_SHARE = 0.5
"""Of the candidates, measured at most: the best config for all sizes is harder to forecast than one for each."""


@dataclass(frozen=True)
class RangePlan:
    """The sizes of a range, and how they count.

    `weights` [points] sum to 1; `shares` [points, measured] say how much each measured point tells of each point.
    """

    points: Sequence[RangePoint]
    measured: Sequence[int]
    """Which of the points are measured."""
    weights: Array
    shares: Array
    worst: bool = False
    """Minimise the largest slow-down, not the mean."""


@dataclass(frozen=True)
class RangeSlowdowns:
    """How much slower one config is than the best one known of each point, as shares (0.02 is 2 %)."""

    candidate: Candidate
    by_point: Sequence[float]
    mean: float
    """Weighted geometric mean."""
    worst: float


def tune_range(
    task: TuningTask,
    plan: RangePlan,
    measurers: Callable[[], Sequence[Measurer]],
    *,
    store: TuningStore,
    surrogate: Surrogate,
    settings: Settings,
    policy: Policy | None = None,
) -> Decision:
    """Decide one config for all sizes of a plan; its decision is filed under the task's problem.

    A budget's measurements count candidates, each measured at all measured points. `measurers` gives one measurer per
    measured point, in order, and is called only if something has to be timed. Raises what `tune` raises.
    """
    with DecisionSpan(task.problem, settings) as span:
        return span.conclude(_decide(task, plan, measurers, store, surrogate, settings, policy))


def _decide(
    task: TuningTask,
    plan: RangePlan,
    measurers: Callable[[], Sequence[Measurer]],
    store: TuningStore,
    surrogate: Surrogate,
    settings: Settings,
    policy: Policy | None,
) -> Decision:
    # It stands in for as many decisions as sizes are measured, and is worth their seconds.
    policy = policy or WallTime(share=_SHARE, percent_s=WallTime.percent_s * len(plan.measured))
    guarded = GuardedStore(store)
    view = range_store(guarded, task.problem.id, plan)
    rows = view.rows
    asked = RangeSurrogate(surrogate, rows)
    view.conclude = lambda decision: _with_best_of_range(decision, plan, rows)
    decision = tune(
        task,
        lambda: RangeMeasurer(measurers(), rows, view.keep),
        store=view,
        surrogate=asked,
        settings=settings,
        policy=policy,
    )
    if view.made is None:
        return decision
    with contextlib.suppress(Exception):
        _keep_facts(guarded, rows, asked)
    return view.made


def range_store(store: GuardedStore, problem: str, plan: RangePlan) -> RangeStore:
    """What a store holds of a plan's sizes, as one row per candidate of the range's own problem (its id)."""
    shares = [float(x) for x in plan.weights @ plan.shares]
    return RangeStore(
        store, RangeRows(problem, plan.points, plan.measured, shares, [[] for _ in plan.points])
    )


def _with_best_of_range(decision: Decision, plan: RangePlan, rows: RangeRows) -> Decision:
    """The decision with the config whose slow-down over all points is least, and with what it is at each."""
    timed = {m.candidate: m for m in rows.combined() if m.ok}
    base = decision.chosen.is_base_variant
    rivals = [c for c in timed if c == decision.chosen or (base and c.is_base_variant)]
    if not rivals:  # nothing is known at all sizes of what was decided, which stands
        return decision
    found = range_slowdowns(rivals, plan, rows)
    best = min(found, key=lambda s: (s.worst, s.mean) if plan.worst else (s.mean, s.worst))
    return replace(
        decision,
        chosen=best.candidate,
        median_ms=timed[best.candidate].ms,
        reason=f"{slowdown_text(best, plan)}; {decision.reason}",
    )


def range_slowdowns(
    candidates: Sequence[Candidate], plan: RangePlan, rows: RangeRows
) -> list[RangeSlowdowns]:
    """The slow-downs of candidates that are measured at all measured points, against the best of them at each point.

    Between the measured points, logarithms of times are interpolated, as the plan's shares say. A surrogate asked about
    these points chooses worse: it follows what it believes of a candidate where times of both neighbours say otherwise
    (`benchmarks.ranges.live_ranges`).
    """
    labels = [rows.labels(point) for point in plan.measured]
    measured = np.array([[np.log2(at[c].ms) for c in candidates] for at in labels])
    logs = plan.shares @ measured
    slow = logs - logs.min(axis=1, keepdims=True)
    means, worst = plan.weights @ slow, slow.max(axis=0)
    return [
        RangeSlowdowns(
            c,
            [float(2.0**x - 1.0) for x in slow[:, j]],
            float(2.0 ** means[j] - 1.0),
            float(2.0 ** worst[j] - 1.0),
        )
        for j, c in enumerate(candidates)
    ]


def slowdown_text(found: RangeSlowdowns, plan: RangePlan) -> str:
    """The slow-downs as one sentence; `~` marks sizes between those that were measured."""
    shown = [
        f"{'' if i in plan.measured else '~'}{point.label} {slow:+.1%}"
        for i, (point, slow) in enumerate(zip(plan.points, found.by_point, strict=True))
    ]
    return (
        f"one config for {len(plan.points)} sizes: {found.mean:.1%} slower than the best of each (geometric mean), "
        f"{found.worst:.1%} at worst: {', '.join(shown)}"
    )


def _keep_facts(store: GuardedStore, rows: RangeRows, surrogate: RangeSurrogate) -> None:
    """Keep what later forecasts read of the measured points, as after an ordinary decision."""
    for i in rows.measured:
        at = rows.points[i]
        labels = rows.labels(i)
        grids = {c: at.grids[c] for c in labels if c in at.grids}
        found = collect_facts(at.problem, list(labels), grids, surrogate.texts, within_s=FACT_COLLECTION_S)
        if found["units"]:
            store.put_facts(at.problem, merge_facts(store.facts(at.problem), found))
