"""The search for one operation's choice where it has to serve a range of sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from forecast_autotune.ranges.tuning import (
    RangePlan,
    RangePoint,
    RangeRows,
    RangeSlowdowns,
    RangeSurrogate,
    range_slowdowns,
    slowdown_text,
)
from forecast_autotune.records import Candidate, Measurement, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.inductor.dynamic.size_range import SizeRange
from forecast_integrations.inductor.operation_search import OperationSearch
from forecast_integrations.inductor.session import TuningSession, default_policy

MAX_SHARE = 0.3
"""Of the candidates, measured at most: the best for all sizes is harder to forecast than the best for one."""


@dataclass(frozen=True)
class SizedProblems:
    """An operation at the sizes of a range."""

    sizes: SizeRange
    problem: Problem
    """The operation for the whole range, under which its decision is filed."""
    measured: Mapping[int, Problem]
    """The operation at each measured size: ordinary problems."""


class RangeSearch(OperationSearch):
    """Forecasts, plans and decides by the mean time over a range of sizes.

    Inductor times the size that was met; `time_others` adds the other measured sizes, with the same binaries. Where
    that fails, `give_up` makes an ordinary search of it.
    """

    def __init__(
        self,
        sized: SizedProblems,
        candidates: Sequence[Candidate],
        externs: Collection[Candidate],
        session: TuningSession,
    ) -> None:
        self.sizes = sized.sizes
        self._plan_of_range = plan = _range_plan(sized)
        shares = [float(x) for x in plan.weights @ plan.shares]
        self._range = RangeRows(
            sized.problem.id, plan.points, plan.measured, shares, [[] for _ in plan.points]
        )
        self._by_size: dict[int, list[Measurement]] = {size: [] for size in self.sizes.measured}
        self._given_up = False
        super().__init__(sized.problem, candidates, externs, session)
        self.timed_problem = sized.measured[self.sizes.hint]
        if session.policy == default_policy():  # which measures more for a range
            self.policy = replace(default_policy(), share=MAX_SHARE)

    @property
    def given_up(self) -> bool:
        """Whether it has become a search for the met size alone."""
        return self._given_up

    @property
    def other_sizes(self) -> list[tuple[int, Problem]]:
        """The measured sizes that Inductor does not time, with their problems, nearest to the met one first."""
        found = [
            (size, self._range.points[i].problem)
            for i, size in zip(self._range.measured, self.sizes.measured, strict=True)
            if size != self.sizes.hint
        ]
        return sorted(found, key=lambda pair: abs(math.log2(pair[0] / self.sizes.hint)))

    def give_up(self, why: str) -> None:
        """Go on as a search for the size that was met, and say why."""
        if not self._given_up:
            self._given_up = True
            self.policy = self.session.policy
            self.problem = self.timed_problem
            self.note = f"for {self.sizes.symbol} = {self.sizes.hint} alone: {why}"
            self.refresh()

    def refresh(self) -> None:
        """Read again what is known of all measured sizes."""
        if self._given_up:
            super().refresh()
            return
        self.of_other_clock.clear()
        for i, size in zip(self._range.measured, self.sizes.measured, strict=True):
            problem = self._range.points[i].problem
            stored = self.stored_rows(problem)
            own = self._own if size == self.sizes.hint else self._by_size[size]
            self._range.rows[i] = [*stored, *(m for m in own if m not in stored)]
        self.rows = self._range.combined()
        self.measured = latest_labels(self.rows)

    def known_at(self, size: int) -> set[Candidate]:
        """Candidates that need not be timed at a measured size."""
        return set(self._range.labels(self._range.measured[self.sizes.measured.index(size)]))

    def add_at(self, size: int, measurements: Sequence[Measurement]) -> None:
        """Take in what was timed at one of the other sizes."""
        self._by_size[size].extend(measurements)
        self.refresh()

    def running(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those of the candidates that have failed at no size so far."""
        failed = {m.candidate for m in self.measured.values() if not m.ok}
        failed |= {m.candidate for m in self.tried.values() if not m.ok}
        return [c for c in candidates if c not in failed]

    def _forecast(self, query: Query) -> Forecasts | None:
        if self._given_up:
            return super()._forecast(query)
        try:
            return RangeSurrogate(_Asked(self.session), self._range).forecast(query)
        except _NoForecastError:
            return None

    def _reason(self, chosen: Candidate) -> str:
        if self._given_up or (found := self.slowdowns(chosen)) is None:
            return super()._reason(chosen)
        return f"{slowdown_text(found, self._plan_of_range)}; {super()._reason(chosen)}"

    def slowdowns(self, chosen: Candidate) -> RangeSlowdowns | None:
        """How much slower the chosen one is than the best measured at each size; None where it is not measured."""
        known = self.known_everywhere()
        timed = [c for c, m in self.measured.items() if m.ok and c in known]
        if chosen not in timed:
            return None
        found = range_slowdowns(timed, self._plan_of_range, self._range)
        return next(s for s in found if s.candidate == chosen)

    def known_everywhere(self) -> set[Candidate]:
        """Candidates that are known at all measured sizes."""
        return set.intersection(*(self.known_at(size) for size in self.sizes.measured))

    def told_timings(self, timings: Mapping[Candidate, float]) -> dict[Candidate, float]:
        """Times in proportion to those of the range, on the scale of the met size; infinite for most others.

        Inductor fuses what follows into several of the fastest templates and takes the fastest of them at the size that
        was met. So it is told of one template alone, and of the library's kernels, which it needs to fall back on.
        """
        times = {c: m.ms if m.ok else math.inf for c in timings if (m := self.measured.get(c)) is not None}
        times = {**timings, **times}
        if self._given_up:
            return times
        chosen = self.predecided or self._incumbent()
        if chosen is None or not math.isfinite(times.get(chosen, math.inf)):
            return dict(timings)
        met = self._range.labels(self._range.measured[self.sizes.measured.index(self.sizes.hint)]).get(chosen)
        scale = met.ms / times[chosen] if met is not None and met.ok else 1.0
        templates = [c for c in times if c not in self.library.candidates]
        told = {chosen, *self.library.candidates}
        if chosen in self.library.candidates and templates:
            told.add(min(templates, key=lambda c: times[c]))
        return {c: ms * scale if c in told else math.inf for c, ms in times.items()}

    def label(self) -> str:
        """The operation as a log line shows it, with its range."""
        if self._given_up:
            return super().label()
        return f"{super().label()} for {self.sizes.symbol} in {self.sizes.label}"


class _NoForecastError(Exception):
    """The surrogate had no answer about one of the sizes."""


class _Asked:
    """The session's surrogate, which answers None instead of raising, as one that raises."""

    version = ""
    name = "session"

    def __init__(self, session: TuningSession) -> None:
        self._session = session

    def forecast(self, query: Query) -> Forecasts:
        """Forecasts. Raises `_NoForecastError`."""
        found = self._session.ask(query)
        if found is None:
            raise _NoForecastError
        return found


def _range_plan(sized: SizedProblems) -> RangePlan:
    robust = sized.sizes.robust()
    sizes = robust.points()
    # Between measured sizes only the label is ever read.
    points = [
        RangePoint(sized.measured.get(size, sized.problem), f"{sized.sizes.symbol}={size}") for size in sizes
    ]
    measured = [i for i, size in enumerate(sizes) if size in sized.measured]
    return RangePlan(points, measured, robust.weights(), robust.shares())
