"""The store as it was at one moment, so that all ranks of a job rank by the same knowledge."""

from __future__ import annotations

import threading
from dataclasses import replace

from forecast_autotune.records import Decision, Measurement, Problem
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Relative

_MAX_RELATIVES = 8
_CACHE_SIZE = 64
"""Related problems read before those that are too new are left out."""


class StoreSnapshot:
    """What a store knew at `until` (UTC, ISO 8601 to the second), plus what this process has added.

    Processes that are given the same store and the same `until` see the same, whatever the others measure
    in the meantime. Of related problems only what was known at `until` counts, even of this process: with
    `distributed_max_autotune_gemm`, every rank measures other problems.
    """

    def __init__(self, store: Store, until: str) -> None:
        self.store = store
        self.until = until
        self._mutex = threading.RLock()
        self._rows: dict[str, list[Measurement]] = {}
        self._decisions: dict[str, Decision | None] = {}
        self._relatives: dict[str, list[Relative]] = {}

    def rows(self, problem: Problem) -> list[Measurement]:
        """Measurements of this problem, oldest first."""
        with self._mutex:
            if problem.id not in self._rows:
                found = self.store.measurements(problem)
                self._rows[problem.id] = [m for m in found if m.at <= self.until]
            return list(self._rows[problem.id])

    def relatives(self, problem: Problem) -> list[Relative]:
        """Measured problems of the same operation, most similar first."""
        with self._mutex:
            if problem.id not in self._relatives:
                found = []
                for relative in self.store.relatives(problem, limit=_CACHE_SIZE):
                    rows = tuple(m for m in relative.measurements if m.at <= self.until)
                    if any(m.ok for m in rows):
                        found.append(replace(relative, measurements=rows))
                self._relatives[problem.id] = found[:_MAX_RELATIVES]
            return list(self._relatives[problem.id])

    def decision(self, problem: Problem) -> Decision | None:
        """The decision on this problem."""
        with self._mutex:
            if problem.id not in self._decisions:
                found = self.store.decision(problem)
                known = found is not None and found.at <= self.until
                self._decisions[problem.id] = found if known else None
            return self._decisions[problem.id]

    def add(self, problem: Problem, measurement: Measurement) -> None:
        """Commit a measurement of this process."""
        with self._mutex:
            self.rows(problem)
            self._rows[problem.id].append(measurement)
        self.store.add(problem, measurement)

    def decide(self, problem: Problem, decision: Decision) -> None:
        """Commit a decision of this process."""
        with self._mutex:
            self._decisions[problem.id] = decision
        self.store.put_decision(problem, decision)
        self.store.sync()
