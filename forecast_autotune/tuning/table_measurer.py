"""A measurer that answers from a recorded table and simulates what compiling and timing would have cost."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Measurement, MeasuringCost, Outcome
from forecast_autotune.records.table import Table

DEFAULT_COMPILE_S = 0.6
"""Seconds for a candidate whose table does not say how long it compiled (mean of our H200 tables)."""
SOLO_COMPILE_RATIO = 0.48
"""Compile seconds of a config alone, per second when 16 compile at once on 16 cores: `triton.autotune`
compiled 72 matmul configs in 31.4 s, children of ours in 65.8 s of their own (tune_matmul72, harvest)."""
HUNG_COMPILE_S = 6.0
"""When the live measurer gives up on a compilation that would not end; a table holds its full time-out."""
TIMING_S = 0.05
"""Seconds to time one candidate by our protocol."""
EXHAUSTIVE_TIMING_S = 0.13
"""Seconds to time one candidate by `do_bench` with its defaults, for the exhaustive baseline."""


class TableMeasurer:
    """Answers from a recorded table, and simulates what compiling and timing would have cost.

    The simulated wall clock schedules compilations on `workers` cores in order and times each
    candidate when it is ready, one at a time, as the real measurer does.
    """

    def __init__(self, table: Table, *, workers: int = 16) -> None:
        self.workers = workers
        self._rows = table.by_candidate()
        self._problem = table.problem.id
        self._cores = [0.0] * workers
        self._now = 0.0
        self._spent = MeasuringCost()
        self._ready: dict[Candidate, float] = {}

    def ready(self) -> Collection[Candidate]:
        """None: a table knows of no earlier decision."""
        return ()

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Start compiling on simulated workers that have nothing else to do."""
        for candidate in candidates:
            if candidate not in self._ready and min(self._cores) <= self._now:
                self._compile(candidate)

    def measure(
        self, candidates: Sequence[Candidate], *, prefetch: Sequence[Candidate] = ()
    ) -> Iterator[Measurement]:
        """Yield the table's rows in the simulated order of completion."""
        for candidate in [*candidates, *prefetch]:
            if candidate not in self._ready:
                self._compile(candidate)
        for candidate in sorted(candidates, key=lambda c: self._ready[c]):
            m = self._row(candidate)
            self._now = max(self._now, self._ready[candidate]) + (TIMING_S if m.ok else 0.0)
            self._charge(timing_s=TIMING_S if m.ok else 0.0)
            # Of the replay, not of the recording: what is known is put in order by it.
            at = datetime.fromtimestamp(self._now, UTC).isoformat(timespec="microseconds")
            yield replace(m, problem=self._problem, at=at)

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """A table has one time per candidate: it is its own comparison."""
        self._charge(timing_s=TIMING_S * len(candidates))
        self._now += TIMING_S * len(candidates)
        return []

    def spent(self) -> MeasuringCost:
        """Simulated seconds so far."""
        return replace(self._spent, wall_s=self._now)

    def close(self) -> None:
        """Nothing is held."""

    def _row(self, candidate: Candidate) -> Measurement:
        if candidate not in self._rows:
            raise RecordError(f"the table of problem {self._problem} has no row for {candidate}")
        return self._rows[candidate]

    def _compile(self, candidate: Candidate) -> None:
        row = self._row(candidate)
        seconds = DEFAULT_COMPILE_S if row.compile_s is None else row.compile_s
        if row.outcome is Outcome.TIMEOUT:
            seconds = min(seconds, HUNG_COMPILE_S)
        free = heapq.heappop(self._cores)
        self._ready[candidate] = max(free, self._now) + seconds
        heapq.heappush(self._cores, self._ready[candidate])
        self._charge(compile_s=seconds, compiled=1)

    def _charge(self, compile_s: float = 0.0, timing_s: float = 0.0, compiled: int = 0) -> None:
        s = self._spent
        self._spent = MeasuringCost(s.compile_s + compile_s, s.timing_s + timing_s, s.compiled + compiled)


def exhaustive_seconds(table: Table) -> float:
    """Wall seconds of compiling and timing every candidate one by one, as `triton.autotune` does.

    A table whose compilations were timed side by side says so (`compiled_at_once` of its problem).
    """
    crowd = table.problem.extra.get("compiled_at_once", 1)
    alone = SOLO_COMPILE_RATIO if isinstance(crowd, int) and crowd >= 8 else 1.0
    total = 0.0
    for m in table.by_candidate().values():
        seconds = DEFAULT_COMPILE_S if m.compile_s is None else m.compile_s
        total += seconds if m.outcome is Outcome.TIMEOUT else alone * seconds
        total += EXHAUSTIVE_TIMING_S if m.ok else 0.0
    return total
