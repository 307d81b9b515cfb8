"""A store as the decision of a range sees it: rows of its sizes in, one row per candidate out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from forecast_autotune.ranges.points import RangeRows
from forecast_autotune.records import Decision, Measurement, Problem, RiskVerdict
from forecast_autotune.surrogates.protocol import Relative
from forecast_autotune.tuning.loop import GuardedStore

if TYPE_CHECKING:
    from forecast_autotune.llm.advice.record import Advice
    from forecast_autotune.store.misses import Miss


class RangeStore:
    """A `TuningStore` for one decision on a range. Measurements are filed under the problems of the sizes."""

    def __init__(self, store: GuardedStore, rows: RangeRows) -> None:
        self._store, self.rows = store, rows
        self.conclude: Callable[[Decision], Decision] = lambda decision: decision
        """Adds to a decision, before it is filed, what follows from the range; while others wait for its lock."""
        self.made: Decision | None = None
        """The decision as it was filed."""

    def keep(self, point: int, measurement: Measurement) -> None:
        """Commit what happened at one of the points."""
        self._store.add(self.rows.points[point].problem, measurement)
        self.rows.add(point, measurement)

    def refresh(self) -> None:
        """Read what is stored of all points."""
        self.rows.rows = [self._store.measurements(p.problem) for p in self.rows.points]

    def measurements(self, problem: Problem) -> list[Measurement]:
        """One per candidate that is known at all measured points."""
        self.refresh()
        return self.rows.combined()

    def relatives(self, problem: Problem, limit: int = 8) -> list[Relative]:
        """Other problems of the kernel than those of the range, most similar to a middle size first."""
        middle = self.rows.measured[len(self.rows.measured) // 2]
        own = {p.problem.id for p in self.rows.points}
        found = self._store.relatives(self.rows.points[middle].problem, limit + len(own))
        return [r for r in found if r.problem.id not in own][:limit]

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """Nothing: its parts are committed already."""

    def add_all(self, problem: Problem, measurements: Sequence[Measurement]) -> None:
        """Nothing: their parts are committed already."""

    def decision(self, problem: Problem) -> Decision | None:
        """The stored decision on the range."""
        return self._store.decision(problem)

    def put_decision(self, problem: Problem, decision: Decision) -> None:
        """File what the range makes of a decision."""
        self.made = self.conclude(decision)
        self._store.put_decision(problem, self.made)

    def verdicts(self, problem: Problem) -> list[RiskVerdict]:
        """What became of the risks stated on this device class."""
        return self._store.verdicts(problem)

    def tuning_lock(self, problem: Problem, timeout_s: float) -> AbstractContextManager[bool]:
        """The right to tune the range."""
        return self._store.tuning_lock(problem, timeout_s)

    def recover(self, problem: Problem) -> list[Measurement]:
        """Record candidates whose launch, at any measured point, took a process down."""
        found = [m for i in self.rows.measured for m in self._store.recover(self.rows.points[i].problem)]
        if found:
            self.refresh()
        return found

    def sync(self) -> None:
        """Make what was added survive a power cut."""
        self._store.sync()

    def add_miss(self, miss: Miss) -> None:
        """Record the range as a miss."""
        self._store.add_miss(miss)

    def advice(self, source_sha256: str) -> Advice | None:
        """The advice on the kernel's source."""
        return self._store.advice(source_sha256)
