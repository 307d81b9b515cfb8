"""Table-backed measurers, and the contract tests that every plug-in inherits.

`TableMeasurer` replays a recorded table through the real tuner. The contract classes hold pytest
tests; a plug-in's test subclasses one and says how to build the thing under test:

    class TestMine(SurrogateContract):
        def make(self):
            return MySurrogate()
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forecast_autotune.errors import RecordError
from forecast_autotune.measuring import Spent
from forecast_autotune.policy import Policy, State
from forecast_autotune.records import Argument, Candidate, Config, Device, Evidence, Kernel, Outcome, Problem
from forecast_autotune.results import Decision, Measurement
from forecast_autotune.settings import Budget
from forecast_autotune.surrogates.base import Forecasts, Query, Surrogate
from forecast_autotune.table import Table

DEFAULT_COMPILE_S = 0.6
"""Seconds for a candidate whose table does not say how long it compiled (mean of our H200 tables)."""
TIMING_S = 0.05
"""Seconds to time one candidate by our protocol."""
EXHAUSTIVE_TIMING_S = 0.13
"""... and by `do_bench` with its defaults, for the exhaustive baseline."""


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
        self._spent = Spent()
        self._ready: dict[Candidate, float] = {}

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
            yield replace(m, problem=self._problem)

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """A table has one time per candidate: it is its own comparison."""
        self._charge(timing_s=TIMING_S * len(candidates))
        self._now += TIMING_S * len(candidates)
        return []

    def spent(self) -> Spent:
        """Simulated seconds so far."""
        return replace(self._spent, wall_s=self._now)

    def close(self) -> None:
        """Nothing is held."""

    def _row(self, candidate: Candidate) -> Measurement:
        if candidate not in self._rows:
            raise RecordError(f"the table of problem {self._problem} has no row for {candidate}")
        return self._rows[candidate]

    def _compile(self, candidate: Candidate) -> None:
        seconds = self._row(candidate).compile_s
        seconds = DEFAULT_COMPILE_S if seconds is None else seconds
        free = heapq.heappop(self._cores)
        self._ready[candidate] = max(free, self._now) + seconds
        heapq.heappush(self._cores, self._ready[candidate])
        self._charge(compile_s=seconds, compiled=1)

    def _charge(self, compile_s: float = 0.0, timing_s: float = 0.0, compiled: int = 0) -> None:
        s = self._spent
        self._spent = Spent(s.compile_s + compile_s, s.timing_s + timing_s, s.compiled + compiled)


def exhaustive_seconds(table: Table) -> float:
    """Wall seconds of compiling and timing every candidate one by one, as `triton.autotune` does."""
    total = 0.0
    for m in table.by_candidate().values():
        total += DEFAULT_COMPILE_S if m.compile_s is None else m.compile_s
        total += EXHAUSTIVE_TIMING_S if m.ok else 0.0
    return total


def example_table(
    sizes: Sequence[int] = (16, 32, 64, 128, 256), warps: Sequence[int] = (2, 4, 8), *, seed: int = 0
) -> Table:
    """A small made-up problem with a smooth optimum and one corner that runs out of resources."""
    device = Device("example GPU", "cuda", "90", 132, 232448, 65536, 2048)
    arguments = (
        Argument("x", "tensor", "float16", (4096, 4096), (4096, 1), True),
        Argument("n", "scalar", "i32", value=4096),
    )
    problem = Problem.of(
        Kernel("example", source="def example(): ...", source_sha256="0" * 64),
        arguments,
        device,
        key=("4096",),
    )
    generator = np.random.default_rng(seed)
    rows = []
    for size in sizes:
        for w in warps:
            candidate = Candidate(Config.of({"BLOCK": size}, num_warps=w))
            if size == max(sizes) and w == max(warps):
                rows.append(Measurement(problem.id, candidate, Outcome.OUT_OF_RESOURCES, compile_s=0.5))
                continue
            log = (
                0.15 * (math.log2(size) - 6.4) ** 2
                + 0.1 * abs(math.log2(w) - 2)
                + 0.01 * generator.standard_normal()
            )
            ms = 2.0**log
            rows.append(
                Measurement(problem.id, candidate, Outcome.OK, ms, 0.99 * ms, 1.01 * ms, 20, 0.5, "example")
            )
    return Table(problem, rows)


def query_of(table: Table, known: int = 0) -> Query:
    """A query about a table's problem, with its first `known` rows as measurements."""
    names = list(table.by_candidate())
    grids = {c: m.grid for c, m in table.by_candidate().items() if m.grid is not None}
    return Query(table.problem, names, grids, table.measurements[:known], (), table.problem.ttir)


class SurrogateContract:
    """What every surrogate must obey. Subclass it and implement `make`."""

    def make(self) -> Surrogate:
        """A fresh surrogate."""
        raise AssertionError("a contract test class must implement make()")

    def test_answers_every_candidate_in_order(self) -> None:
        query = query_of(example_table(), 4)
        forecasts = self.make().forecast(query)
        assert list(forecasts.candidates) == list(query.candidates)
        assert (
            forecasts.mean.shape == forecasts.sd.shape == forecasts.p_fail.shape == (len(query.candidates),)
        )

    def test_is_finite_and_a_probability(self) -> None:
        for known in (0, 1, 5):
            forecasts = self.make().forecast(query_of(example_table(), known))
            assert np.isfinite(forecasts.mean).all()
            assert (forecasts.sd > 0).all()
            assert np.isfinite(forecasts.sd).all()
            assert ((forecasts.p_fail >= 0) & (forecasts.p_fail <= 1)).all()

    def test_is_a_pure_function_of_the_query(self) -> None:
        query = query_of(example_table(), 5)
        one, two = self.make().forecast(query), self.make().forecast(query)
        np.testing.assert_array_equal(one.mean, two.mean)
        rows = np.arange(len(query.candidates))
        np.testing.assert_array_equal(one.samples(rows, 8, 3), two.samples(rows, 8, 3))

    def test_survives_a_problem_it_knows_nothing_of(self) -> None:
        bare = Problem("x", Kernel("?"), (), Device("?"))
        only = [
            Candidate(Config.of({"MODE": "fast", "A": 0})),
            Candidate(Config.of({"MODE": "slow", "A": None})),
        ]
        forecasts = self.make().forecast(Query(bare, only))
        assert np.isfinite(forecasts.mean).all()

    def test_a_measured_candidate_is_known_better_than_before(self) -> None:
        table = example_table()
        before = self.make().forecast(query_of(table, 0))
        after = self.make().forecast(query_of(table, 3))
        assert (after.sd[:3] < before.sd[:3]).all()


class PolicyContract:
    """What every policy must obey. Subclass it and implement `make`."""

    def make(self) -> Policy:
        """A fresh policy."""
        raise AssertionError("a contract test class must implement make()")

    def state(self, table: Table, known: int, **changes: Any) -> State:
        """A state of a table's problem with independent forecasts around the truth."""
        rows = table.by_candidate()
        mean = np.array([math.log2(m.ms) if m.ok else 0.0 for m in rows.values()])
        fails = np.array([0.02 if m.ok else 0.5 for m in rows.values()])
        forecasts = Forecasts(list(rows), mean, np.full(len(rows), 0.2), fails)
        measured = dict(list(rows.items())[:known])
        return State(forecasts, measured, new=known, round=int(known > 0), workers=4, **changes)

    def test_never_plans_what_is_measured(self) -> None:
        for known in (0, 3, 8):
            state = self.state(example_table(), known)
            plan = self.make().plan(state)
            assert not set(plan.measure) & set(state.measured)
            assert len(set(plan.measure)) == len(plan.measure)
            assert not set(plan.measure) & set(plan.prefetch)

    def test_gives_a_reason(self) -> None:
        assert self.make().plan(self.state(example_table(), 0)).reason

    def test_is_a_pure_function_of_the_state(self) -> None:
        make, table = self.make, example_table()
        assert make().plan(self.state(table, 2)) == make().plan(self.state(table, 2))

    def test_ends(self) -> None:
        table = example_table()
        rows = table.by_candidate()
        known: dict[Candidate, Measurement] = {}
        for _ in range(len(rows) + 1):
            state = replace(self.state(table, 0), measured=dict(known), new=len(known))
            plan = self.make().plan(state)
            if not plan.measure:
                break
            known.update({c: rows[c] for c in plan.measure})
        assert not plan.measure

    def test_respects_a_budget_of_measurements(self) -> None:
        state = self.state(example_table(), 0, budget=Budget(measurements=2))
        assert len(self.make().plan(state).measure) <= 2


class StoreContract:
    """What every store must obey. Subclass it and implement `make`."""

    def make(self) -> Any:
        """A fresh, empty store."""
        raise AssertionError("a contract test class must implement make()")

    def test_keeps_what_was_added(self) -> None:
        store, table = self.make(), example_table()
        for m in table.measurements:
            store.add(table.problem, m)
        assert store.measurements(table.problem) == table.measurements

    def test_keeps_problems_apart(self) -> None:
        store, table = self.make(), example_table()
        other = Problem.of(table.problem.kernel, table.problem.arguments[:1], table.problem.device)
        store.add(table.problem, table.measurements[0])
        assert store.measurements(other) == []

    def test_relatives_are_other_problems_of_the_kernel(self) -> None:
        store, table = self.make(), example_table()
        other = Problem.of(table.problem.kernel, table.problem.arguments[:1], table.problem.device)
        stranger = Problem.of(Kernel("stranger"), (), table.problem.device)
        for problem in (other, stranger):
            store.add(problem, replace(table.measurements[0], problem=problem.id))
        assert [r.problem.id for r in store.relatives(table.problem)] == [other.id]

    def test_a_decision_comes_back(self) -> None:
        store, table = self.make(), example_table()
        assert store.decision(table.problem) is None
        decision = Decision(
            table.problem.id, table.measurements[0].candidate, Evidence.MEASURED, "because", 0.1, 0.02, 15, 3
        )
        store.put_decision(table.problem, decision)
        assert store.decision(table.problem) == decision
