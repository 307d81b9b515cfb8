"""What every policy must obey."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from forecast_autotune.policy import Policy, TuningState
from forecast_autotune.records import (
    Candidate,
    Measurement,
    MeasuringCost,
    Outcome,
)
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Budget
from forecast_autotune.surrogates.protocol import Forecasts
from forecast_autotune.testing.tables import example_table


class PolicyContract:
    """What every policy must obey. Subclass it and implement `make`."""

    def make(self) -> Policy:
        """A fresh policy."""
        raise AssertionError("a contract test class must implement make()")

    def state(self, table: Table, known: int, **changes: Any) -> TuningState:
        """A state of a table's problem with independent forecasts around the truth."""
        rows = table.by_candidate()
        mean = np.array([math.log2(m.ms) if m.ok else 0.0 for m in rows.values()])
        fails = np.array([0.02 if m.ok else 0.5 for m in rows.values()])
        forecasts = Forecasts(list(rows), mean, np.full(len(rows), 0.2), fails)
        measured = dict(list(rows.items())[:known])
        given: dict[str, Any] = {"new": known, "round": int(known > 0), "workers": 4, **changes}
        return TuningState(forecasts, measured, **given)

    def run(self, state: TuningState, rows: Mapping[Candidate, Measurement]) -> dict[Candidate, Measurement]:
        """What the policy measures, plan after plan, until it stops; fails if it does not stop."""
        known = dict(state.measured)
        for _ in range(len(rows) + 2):
            plan = self.make().plan(replace(state, measured=dict(known), new=state.new + len(known)))
            assert 0.0 <= plan.risk <= 1.0
            assert plan.reason
            if not plan.measure:
                return known
            assert not set(plan.measure) & set(known), "planned what is measured already"
            known.update({c: rows[c] for c in plan.measure})
        raise AssertionError("the policy never stops")

    def test_never_plans_what_is_measured(self) -> None:
        for known in (0, 3, 8):
            state = self.state(example_table(), known)
            plan = self.make().plan(state)
            wanted = [*plan.measure, *plan.prefetch]
            assert not set(wanted) & set(state.measured)
            assert len(set(wanted)) == len(wanted)
            assert set(plan.audit) <= set(plan.measure) <= set(state.forecasts.candidates)

    def test_is_a_pure_function_of_the_state(self) -> None:
        make, table = self.make, example_table()
        for known in (0, 2):
            assert make().plan(self.state(table, known)) == make().plan(self.state(table, known))

    def test_ends(self) -> None:
        table = example_table()
        found = self.run(self.state(table, 0), table.by_candidate())
        assert any(m.ok for m in found.values())

    def test_respects_a_budget_of_measurements(self) -> None:
        table = example_table()
        state = self.state(table, 0, budget=Budget(measurements=2))
        assert len(self.run(state, table.by_candidate())) <= 2

    def test_stops_when_the_seconds_are_used_up(self) -> None:
        for budget in (Budget(seconds=1.0), Budget(gpu_seconds=1.0)):
            state = self.state(
                example_table(), 2, budget=budget, spent=MeasuringCost(timing_s=1.0, wall_s=1.0)
            )
            assert not self.make().plan(state).measure

    def test_goes_on_until_something_runs(self) -> None:
        """Whatever the budget and the forecasts: a launch needs a config that works."""
        table = example_table()
        rows = {c: Measurement(m.problem, c, Outcome.COMPILE_ERROR) for c, m in table.by_candidate().items()}
        last = list(rows)[-1]  # the one that the forecasts think least of
        rows[last] = Measurement(table.problem.id, last, Outcome.OK, 5.0)
        for budget in (Budget(), Budget(measurements=2)):
            state = self.state(table, 0, budget=budget)
            hopeless = replace(state.forecasts, p_fail=np.full(len(rows), 0.99))
            for forecasts in (state.forecasts, hopeless):
                assert last in self.run(replace(state, forecasts=forecasts), rows)

    def test_a_broken_harness_ends_it(self) -> None:
        table = example_table()
        rows = {c: Measurement(m.problem, c, Outcome.INFRASTRUCTURE) for c, m in table.by_candidate().items()}
        state = self.state(table, 0, budget=Budget(measurements=2))
        assert len(self.run(state, rows)) <= 2

    def test_copes_with_one_candidate_and_with_certainty(self) -> None:
        table = example_table(sizes=(64,), warps=(4,))
        rows = table.by_candidate()
        rows = {c: Measurement(m.problem, c, Outcome.OK, 1.0) for c, m in rows.items()}
        state = self.state(Table(table.problem, list(rows.values())), 0)
        sure = replace(state.forecasts, sd=np.zeros(1), p_fail=np.zeros(1))
        assert self.run(replace(state, forecasts=sure), rows) == rows
