"""What every store must obey."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import (
    Decision,
    Evidence,
    Kernel,
    Problem,
)
from forecast_autotune.testing.tables import example_table


class StoreContract:
    """What every store must obey. Subclass it and implement `make`."""

    def make(self) -> Any:
        """A fresh, empty store."""
        raise AssertionError("a contract test class must implement make()")

    def test_keeps_what_was_added(self) -> None:
        store, table = self.make(), example_table()
        noted = replace(table.measurements[0], extra={"message": "über", "spills": 3})
        store.add(table.problem, table.measurements[1])
        store.add_all(table.problem, [*table.measurements[2:], noted])
        found = store.measurements(table.problem)
        assert found == [*table.measurements[1:], noted]
        assert found[-1].extra == noted.extra

    def test_keeps_problems_apart(self) -> None:
        store, table = self.make(), example_table()
        other = Problem.of(table.problem.kernel, table.problem.arguments[:1], table.problem.device)
        store.add(table.problem, table.measurements[0])
        assert store.measurements(other) == []
        refused = False
        try:
            store.add(other, table.measurements[0])
        except RecordError:
            refused = True
        assert refused, "a measurement of another problem was taken"

    def test_relatives_are_other_problems_of_the_kernel(self) -> None:
        store, table = self.make(), example_table()
        other = Problem.of(table.problem.kernel, table.problem.arguments[:1], table.problem.device)
        failed = Problem.of(table.problem.kernel, (), table.problem.device)
        stranger = Problem.of(Kernel("stranger"), (), table.problem.device)
        for problem in (table.problem, other, stranger):
            store.add(problem, replace(table.measurements[0], problem=problem.id))
        store.add(failed, replace(table.measurements[-1], problem=failed.id))
        assert [r.problem.id for r in store.relatives(table.problem)] == [other.id]
        assert store.relatives(table.problem, 0) == []

    def test_a_decision_comes_back(self) -> None:
        store, table = self.make(), example_table()
        assert store.decision(table.problem) is None
        decision = Decision(
            table.problem.id, table.measurements[0].candidate, Evidence.MEASURED, "because", 0.1, 0.02, 15, 3
        )
        for latest in (decision, replace(decision, reason="better")):
            store.put_decision(table.problem, latest)
            assert store.decision(table.problem) == latest
        assert [(p.id, d.reason) for p, d in store.decisions()] == [(table.problem.id, "better")]

    def test_one_thread_at_a_time_may_tune_a_problem(self) -> None:
        store, table = self.make(), example_table()
        other = Problem.of(Kernel("other"), (), table.problem.device)
        with store.tuning_lock(table.problem, 0.0) as held, store.tuning_lock(other, 0.0) as apart:
            assert held
            assert apart
            with store.tuning_lock(table.problem, 0.0) as second:
                assert not second
        with store.tuning_lock(table.problem, 0.0) as again:
            assert again

    def test_a_launch_that_raises_is_not_a_crash(self) -> None:
        store, table = self.make(), example_table()
        with (
            contextlib.suppress(KeyboardInterrupt),
            store.watch(table.problem, table.measurements[0].candidate),
        ):
            raise KeyboardInterrupt
        assert store.recover(table.problem) == []
        assert store.measurements(table.problem) == []

    def test_clear_forgets(self) -> None:
        store, table = self.make(), example_table()
        for m in table.measurements:
            store.add(table.problem, m)
        assert store.clear(kernel="no such") == 0
        assert store.clear() == len(table.measurements)
        assert store.measurements(table.problem) == []
        assert list(store.tables()) == []
