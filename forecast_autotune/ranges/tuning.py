"""One decision for a range: `tune_range` does what `tune` does, for a candidate's mean time over several sizes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.traced_texts import collect_facts, merge_facts
from forecast_autotune.policy import Policy, WallTime
from forecast_autotune.records import (
    Candidate,
    Decision,
    Measurement,
    MeasuringCost,
    Outcome,
    Problem,
)
from forecast_autotune.records.table import latest_labels
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.protocol import (
    Array,
    FileBackedSurrogate,
    Forecasts,
    Query,
    Relative,
    Surrogate,
)
from forecast_autotune.telemetry.spans import DecisionSpan
from forecast_autotune.tuning.loop import FACT_COLLECTION_S, GuardedStore, TuningTask, tune
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.results import TuningStore


@dataclass(frozen=True)
class RangePoint:
    """One size of a range: an ordinary problem, whose measurements are filed under its own name."""

    problem: Problem
    label: str
    """`M=16`."""
    grids: Mapping[Candidate, tuple[int, ...]] = field(default_factory=dict)
    """Launch grids, where they depend on the candidate."""


@dataclass
class RangeRows:
    """The measurements of every point, and how points that are measured count for the range.

    `shares[i]` is the weight of the measured point i, the sum is 1: a candidate's time for the range is the weighted
    geometric mean of its times at these points.
    """

    problem: str
    """Id of the range's own problem, under which its decision is filed."""
    points: Sequence[RangePoint]
    measured: Sequence[int]
    """Which of the points are measured."""
    shares: Sequence[float]
    rows: list[list[Measurement]]
    """By point: all measurements, in order."""

    def add(self, point: int, measurement: Measurement) -> None:
        """Take note of what happened at a point."""
        self.rows[point].append(measurement)

    def labels(self, point: int) -> dict[Candidate, Measurement]:
        """The latest label per candidate at a point."""
        return latest_labels(self.rows[point])

    def combined(self) -> list[Measurement]:
        """One measurement per candidate that was measured at all measured points, or failed at one."""
        known = [self.labels(i) for i in self.measured]
        results = []
        for candidate in dict.fromkeys(c for labels in known for c in labels):
            parts = [labels[candidate] for labels in known if candidate in labels]
            if len(parts) == len(known) or not all(m.ok for m in parts):
                results.append(self.combine(parts))
        return results

    def combine(self, parts: Sequence[Measurement]) -> Measurement:
        """One measurement for the range from those at the measured points, in order; one failure fails it."""
        failed = next((m for m in parts if not m.ok), None)
        first = parts[0]
        seconds = [m.compile_s for m in parts if m.compile_s is not None]
        compile_s = sum(seconds) if seconds else None
        if failed is not None:
            return Measurement(
                self.problem,
                failed.candidate,
                failed.outcome,
                compile_s=compile_s,
                protocol=failed.protocol,
                at=failed.at,
                extra=failed.extra,
            )

        def mean(times: Sequence[float]) -> float:
            return 2.0 ** sum(w * math.log2(t) for w, t in zip(self.shares, times, strict=True))

        return Measurement(
            self.problem,
            first.candidate,
            Outcome.OK,
            mean([m.ms for m in parts]),
            mean([m.p20_ms or m.ms for m in parts]),
            mean([m.p80_ms or m.ms for m in parts]),
            repeats=min(m.repeats for m in parts),
            compile_s=compile_s,
            protocol=f"{first.protocol}, mean of {len(parts)} sizes",
            at=max(m.at for m in parts),
            extra=first.extra,
        )

    def relatives(self, point: int) -> list[Relative]:
        """The measurements at the other points, nearest first."""
        others = sorted(
            (i for i in range(len(self.points)) if self.rows[i] and i != point), key=lambda i: abs(i - point)
        )
        return [Relative(self.points[i].problem, tuple(self.rows[i])) for i in others]


class RangeMeasurer:
    """Asks one measurer per measured point, and answers with one measurement for the range.

    Candidates are compiled for the first point; the others find binaries there, or compile their own. `keep` is told
    of each point's own measurement as soon as it exists: (point, measurement). Known candidates of a point are not
    measured again.
    """

    def __init__(
        self, measurers: Sequence[Measurer], rows: RangeRows, keep: Callable[[int, Measurement], None]
    ) -> None:
        self._first, *self._others = measurers
        self._all = list(measurers)
        self._rows, self._keep = rows, keep

    @property
    def workers(self) -> int:
        """As the first point's."""
        return self._first.workers

    @property
    def quiet(self) -> bool:
        """As the first point's."""
        return self._first.quiet

    def ready(self) -> Collection[Candidate]:
        """As the first point's."""
        return self._first.ready()

    def compiling(self) -> Mapping[Candidate, float]:
        """As the first point's."""
        return self._first.compiling()

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """As the first point's."""
        self._first.prefetch(candidates)

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """Yield one measurement per candidate for all measured points together, as the first point's finishes."""
        known = self._rows.labels(self._rows.measured[0])
        for candidate in candidates:
            if candidate in known:
                yield self._complete(known[candidate])
        fresh = [c for c in candidates if c not in known]
        if fresh:
            for m in self._first.measure(fresh, prefetch=prefetch, within_s=within_s):
                self._keep(self._rows.measured[0], m)
                yield self._complete(m)

    def _complete(self, first: Measurement) -> Measurement:
        parts = [first]
        for point, measurer in zip(self._rows.measured[1:], self._others, strict=True):
            if not parts[-1].ok:
                break
            known = self._rows.labels(point).get(first.candidate)
            if known is not None:
                parts.append(known)
                continue
            # Kept before the next is asked for: what has lost the device says so then.
            for result in measurer.measure([first.candidate]):
                self._keep(point, result)
                parts += [result] if result.candidate == first.candidate else []
        return self._rows.combine(parts)

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time the candidates in turns at each point; empty where one of the points has no such times."""
        points = []
        for point, measurer in zip(self._rows.measured, self._all, strict=True):
            timed = measurer.compare(candidates)
            if len(timed) != len(candidates):
                return []
            for m in timed:
                self._keep(point, m)
            points.append(timed)
        return [self._rows.combine(parts) for parts in zip(*points, strict=True)]

    def spent(self) -> MeasuringCost:
        """The cost of all points together; the wall clock is the first one's."""
        costs = [m.spent() for m in self._all]
        return MeasuringCost(
            sum(c.compile_s for c in costs),
            sum(c.timing_s for c in costs),
            sum(c.compiled for c in costs),
            max(c.wall_s for c in costs),
        )

    def close(self) -> None:
        """Close all."""
        for measurer in self._all:
            measurer.close()


class RangeSurrogate:
    """Asks a surrogate about each measured point, and weighs its answers as the measurements are weighed.

    Errors at different sizes are taken for one error: the same joint draws are used for all of them.
    """

    def __init__(self, inner: Surrogate, rows: RangeRows) -> None:
        self._inner, self._rows = inner, rows
        self.name, self.version = inner.name, inner.version
        self.texts: Mapping[str, str] = {}
        """TTIR by assignment, as the last query had it."""

    def load(self) -> None:
        """Read the inner surrogate's files."""
        if isinstance(self._inner, FileBackedSurrogate):
            self._inner.load()

    def forecast(self, query: Query) -> Forecasts:
        """Forecasts of the weighted geometric mean over the measured points. Raises what the inner one raises."""
        self.texts = query.ttir
        rows = self._rows
        results = [self.at_point(query, i) for i in rows.measured]
        first = results[0]

        def weighed(values: Sequence[Array]) -> Array:
            return np.asarray(sum(w * v for w, v in zip(rows.shares, values, strict=True)))

        def draw(chosen: npt.NDArray[np.intp], count: int, generator: np.random.Generator) -> Array:
            seed = int(generator.integers(2**31))
            return weighed([f.samples(chosen, count, seed) for f in results])

        return replace(
            first,
            mean=weighed([f.mean for f in results]),
            sd=weighed([f.sd for f in results]),
            p_fail=np.max([f.p_fail for f in results], axis=0),
            lower_bound=weighed([f.optimistic() for f in results]),
            sampler=draw,
            without_llm=None,
            # Nothing recorded says what one config for all sizes risks untimed.
            calibrate_untimed=lambda _: 1.0,
        )

    def at_point(self, query: Query, point: int) -> Forecasts:
        """The inner surrogate's forecasts at one point, from all that is measured at it and at the others."""
        rows, at = self._rows, self._rows.points[point]
        known = set(query.candidates)
        others = [
            replace(r, problem=replace(r.problem, ttir=r.problem.ttir or query.ttir))
            for r in rows.relatives(point)
        ]
        own = {p.problem.id for p in rows.points}
        others += [r for r in query.relatives if r.problem.id not in own]
        return self._inner.forecast(
            replace(
                query,
                problem=at.problem,
                grids=at.grids or query.grids,
                measured=[m for m in rows.rows[point] if m.candidate in known],
                relatives=others,
                provisional=True,  # a model would be asked of every point, each time anew
            )
        )


class RangeStore(GuardedStore):
    """A `TuningStore` for one decision on a range. Measurements are filed under the problems of the sizes."""

    def __init__(self, store: GuardedStore, rows: RangeRows) -> None:
        super().__init__(store)
        self.rows = rows
        self.conclude: Callable[[Decision], Decision] = lambda decision: decision
        """Adds to a decision, before it is filed, what follows from the range; while others wait for its lock."""
        self.filed: Decision | None = None
        """The decision as it was filed."""

    def keeps(self, method: str) -> bool:
        """As `GuardedStore`; facts are kept of the sizes, not of the range."""
        return method != "put_facts" and super().keeps(method)

    def keep(self, point: int, measurement: Measurement) -> None:
        """Commit what happened at one of the points."""
        super().add(self.rows.points[point].problem, measurement)
        self.rows.add(point, measurement)

    def refresh(self) -> None:
        """Read what is stored of all points."""
        self.rows.rows = [super(RangeStore, self).measurements(p.problem) for p in self.rows.points]

    def measurements(self, problem: Problem) -> list[Measurement]:
        """One per candidate that is known at all measured points."""
        self.refresh()
        return self.rows.combined()

    def relatives(self, problem: Problem, limit: int = 8) -> list[Relative]:
        """Other problems of the kernel than those of the range, most similar to a middle size first."""
        middle = self.rows.measured[len(self.rows.measured) // 2]
        own = {p.problem.id for p in self.rows.points}
        others = super().relatives(self.rows.points[middle].problem, limit + len(own))
        return [r for r in others if r.problem.id not in own][:limit]

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """Nothing: its parts are committed already."""

    def add_all(self, problem: Problem, measurements: Sequence[Measurement]) -> None:
        """Nothing: their parts are committed already."""

    def put_decision(self, problem: Problem, decision: Decision) -> None:
        """File what the range makes of a decision."""
        self.filed = self.conclude(decision)
        super().put_decision(problem, self.filed)

    def recover(self, problem: Problem) -> list[Measurement]:
        """Record candidates whose launch, at any measured point, took a process down."""
        parts = [super(RangeStore, self).recover(self.rows.points[i].problem) for i in self.rows.measured]
        if any(parts):
            self.refresh()
        return [m for part in parts for m in part]


_SHARE = 0.5
"""The largest share of candidates measured: the best config for all sizes is harder to forecast than one for each."""


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
    forecaster = RangeSurrogate(surrogate, rows)
    view.conclude = lambda decision: _with_best_of_range(decision, plan, rows)
    decision = tune(
        task,
        lambda: RangeMeasurer(measurers(), rows, view.keep),
        store=view,
        surrogate=forecaster,
        settings=settings,
        policy=policy,
    )
    if view.filed is None:
        return decision
    with contextlib.suppress(Exception):
        _keep_facts(guarded, rows, forecaster)
    return view.filed


def range_store(store: GuardedStore, problem: str, plan: RangePlan) -> RangeStore:
    """A store's measurements of a plan's sizes, as one row per candidate of the range's own problem (its id)."""
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
    result = range_slowdowns(rivals, plan, rows)
    best = min(result, key=lambda s: (s.worst, s.mean) if plan.worst else (s.mean, s.worst))
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


def slowdown_text(slowdowns: RangeSlowdowns, plan: RangePlan) -> str:
    """The slow-downs as one sentence; `~` marks sizes between those that were measured."""
    shown = [
        f"{'' if i in plan.measured else '~'}{point.label} {slow:+.1%}"
        for i, (point, slow) in enumerate(zip(plan.points, slowdowns.by_point, strict=True))
    ]
    return (
        f"one config for {len(plan.points)} sizes: {slowdowns.mean:.1%} slower than the best of each (geometric mean), "
        f"{slowdowns.worst:.1%} at worst: {', '.join(shown)}"
    )


def _keep_facts(store: GuardedStore, rows: RangeRows, surrogate: RangeSurrogate) -> None:
    """Keep what later forecasts read of the measured points, as after an ordinary decision."""
    for i in rows.measured:
        at = rows.points[i]
        labels = rows.labels(i)
        grids = {c: at.grids[c] for c in labels if c in at.grids}
        result = collect_facts(at.problem, list(labels), grids, surrogate.texts, within_s=FACT_COLLECTION_S)
        if result["units"]:
            store.put_facts(at.problem, merge_facts(store.facts(at.problem), result))
