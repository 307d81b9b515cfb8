"""A measurer that answers from a recorded table and simulates what compiling and timing would have cost."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Measurement, MeasuringCost, Outcome
from forecast_autotune.records.table import Table

DEFAULT_COMPILE_S = 0.6
"""Seconds for a candidate whose table does not say how long it compiled (mean of our H200 tables)."""
HUNG_COMPILE_S = 6.0
"""Seconds after which the live measurer gives up on an endless compilation; a table holds its full time-out."""
LEAST_COMPILE_S = 0.03
"""Recorded seconds below this mean a binary from a cache. The quickest real compilations take twice as long."""
_ENOUGH_COMPILATIONS = 3
"""Recorded compilations of a table from which on their median stands for its others."""
TIMING_S = 0.012
"""Seconds to time one candidate by our protocol, finals included (11 ms over 173 decisions on an H200)."""
EXHAUSTIVE_TIMING_S = 0.13
"""Seconds for one candidate under `do_bench` with its defaults (25 ms of warm-up, 100 ms)."""
SOLO_COMPILE_RATIO = 0.48
"""Compile seconds of a config alone, per second of one among 16 that compile on 16 cores without a pause:
`triton.autotune` compiled 72 matmul configs in 31.4 s, a harvest's children in 65.8 s of their own."""


class TableMeasurer:
    """Answers from a recorded table, and simulates what compiling and timing would have cost.

    The simulated wall clock compiles on `workers` cores, in the order asked for, and times one candidate at a
    time, as the real measurer does.
    """

    quiet = True

    def __init__(self, table: Table, *, workers: int = 16, timing_s: float = TIMING_S) -> None:
        self.workers = workers
        self._rows = table.by_candidate()
        self._seconds = recorded_compile_seconds(table)
        self._problem = table.problem.id
        self._timing_s = timing_s
        self._now = 0.0
        self._cost = MeasuringCost()
        self._waiting: list[Candidate] = []
        self._ends: dict[Candidate, tuple[float, float]] = {}
        """Start and end of each running compilation."""
        self._ready: dict[Candidate, None] = {}
        """Candidates compiled and not timed, in the order of compilation."""
        self._compiled: set[Candidate] = set()
        """Candidates compiled, timed or not."""

    def ready(self) -> Collection[Candidate]:
        """Return the candidates that are compiled and not timed."""
        return self._ready.keys()

    def compiling(self) -> Mapping[Candidate, float]:
        """Return the candidates that compile, with their seconds so far."""
        return {c: self._now - start for c, (start, _) in self._ends.items()}

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """Start compiling; candidates without a worker wait for one."""
        self._schedule(candidates)

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """Yield the table's rows in the simulated order of completion."""
        self._schedule([*candidates, *prefetch])
        queue = dict.fromkeys(candidates)
        while queue:
            candidate = next((c for c in queue if c in self._ready), None)
            if candidate is None:
                if not self._wait(within_s):
                    return
                continue
            del queue[candidate], self._ready[candidate]
            m = self._row(candidate)
            self._pass(self._timing_s if m.ok else 0.0)
            self._charge(timing_s=self._timing_s if m.ok else 0.0)
            # The replay's clock, not the recording's: measurements are sorted by it.
            at = datetime.fromtimestamp(self._now, UTC).isoformat(timespec="microseconds")
            yield replace(m, problem=self._problem, at=at)

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """A table has one time per candidate: it is its own comparison."""
        self._charge(timing_s=self._timing_s * len(candidates))
        self._pass(self._timing_s * len(candidates))
        return []

    def spent(self) -> MeasuringCost:
        """Simulated seconds so far."""
        return replace(self._cost, wall_s=self._now)

    def close(self) -> None:
        """There is nothing to free."""

    def _schedule(self, candidates: Sequence[Candidate]) -> None:
        fresh = [c for c in candidates if c not in self._compiled and c not in self._ends]
        free = self.workers - len(self._ends)
        obsolete = [c for c in self._ends if c not in candidates]
        for c in obsolete[: max(0, len(fresh) - free)]:
            del self._ends[c]
        self._waiting = fresh
        self._start()

    def _start(self) -> None:
        while self._waiting and len(self._ends) < self.workers:
            candidate = self._waiting.pop(0)
            self._ends[candidate] = (self._now, self._now + self._compile_seconds(candidate))

    def _compile_seconds(self, candidate: Candidate) -> float:
        row = self._row(candidate)
        seconds = self._seconds.get(candidate, DEFAULT_COMPILE_S)
        return min(seconds, HUNG_COMPILE_S) if row.outcome is Outcome.TIMEOUT else seconds

    def _wait(self, within_s: float | None) -> bool:
        """Let time pass until a compilation ends, at most `within_s`; whether one has ended."""
        if not self._ends:
            return False
        first = min(end for _, end in self._ends.values())
        if within_s is not None and first > self._now + within_s:
            self._pass(within_s)
            return False
        self._pass(first - self._now)
        return True

    def _pass(self, seconds: float) -> None:
        """Let time pass; free workers take the next candidates."""
        until = self._now + seconds
        while self._ends:
            candidate, (start, end) = min(self._ends.items(), key=lambda item: item[1][1])
            if end > until + 1e-12:
                break
            self._now = max(self._now, end)
            del self._ends[candidate]
            self._ready[candidate] = None
            self._compiled.add(candidate)
            self._charge(compile_s=end - start, compiled=1)
            self._start()
        self._now = max(self._now, until)

    def _row(self, candidate: Candidate) -> Measurement:
        if candidate not in self._rows:
            raise RecordError(f"the table of problem {self._problem} has no row for {candidate}")
        return self._rows[candidate]

    def _charge(self, compile_s: float = 0.0, timing_s: float = 0.0, compiled: int = 0) -> None:
        s = self._cost
        self._cost = MeasuringCost(s.compile_s + compile_s, s.timing_s + timing_s, s.compiled + compiled)


def recorded_compile_seconds(table: Table) -> dict[Candidate, float]:
    """Seconds that each candidate compiled for.

    Rows that were timed again, or whose binary was in a cache, hold no such seconds: they get the table's median, or
    `DEFAULT_COMPILE_S` where hardly any was compiled. Else the fastest, which are timed again, would seem to compile
    in a thousandth of their neighbours' time.
    """
    rows = table.by_candidate()
    seconds = {
        c: m.compile_s for c, m in rows.items() if m.compile_s is not None and m.compile_s >= LEAST_COMPILE_S
    }
    durations = [s for c, s in seconds.items() if rows[c].outcome is not Outcome.TIMEOUT]
    usual = statistics.median(durations) if len(durations) >= _ENOUGH_COMPILATIONS else DEFAULT_COMPILE_S
    return {c: seconds.get(c, usual) for c in rows}


def exhaustive_seconds(table: Table) -> float:
    """Wall seconds of compiling and timing every candidate one by one, as `triton.autotune` does.

    A table whose compilations were timed side by side says so (`compiled_at_once` of its problem).
    """
    crowd = table.problem.extra.get("compiled_at_once", 1)
    alone = SOLO_COMPILE_RATIO if isinstance(crowd, int) and crowd >= 8 else 1.0
    total = 0.0
    compile_s = recorded_compile_seconds(table)
    for c, m in table.by_candidate().items():
        seconds = compile_s[c]
        total += seconds if m.outcome is Outcome.TIMEOUT else alone * seconds
        total += EXHAUSTIVE_TIMING_S if m.ok else 0.0
    return total
