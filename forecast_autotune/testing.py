"""Table-backed measurers, and the contract tests that every plug-in inherits.

`TableMeasurer` replays a recorded table through the real tuner. The contract classes hold pytest
tests; a plug-in's test subclasses one and says how to build the thing under test:

    class TestMine(SurrogateContract):
        def make(self):
            return MySurrogate()
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from forecast_autotune.errors import NoWorkingConfigError, RecordError
from forecast_autotune.languages import LanguageKernel, LanguageMeasurer, tune_language
from forecast_autotune.policy import Policy, TuningState
from forecast_autotune.records import (
    Argument,
    Candidate,
    Config,
    Decision,
    Device,
    Evidence,
    Kernel,
    Measurement,
    MeasuringCost,
    Outcome,
    Problem,
)
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Budget, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.protocol import Forecasts, Query, Surrogate
from forecast_autotune.tuning.loop import validate_forecasts
from forecast_autotune.tuning.measurer import Measurer
from forecast_autotune.tuning.replays.table_measurer import TableMeasurer

__all__ = [
    "LanguageContract",
    "MeasurerContract",
    "PolicyContract",
    "StoreContract",
    "SurrogateContract",
    "TableMeasurer",
    "example_table",
    "query_of",
]


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
    return Query(
        table.problem,
        list(table.by_candidate()),
        table.grids(),
        table.measurements[:known],
        (),
        table.problem.ttir,
    )


class LanguageContract:
    """The rules for every `LanguageKernel`. Subclass it and implement `make`, and `failing` where configs can fail."""

    def make(self) -> tuple[LanguageKernel, list[Config]]:
        """A fresh kernel, and four or more configs that run and are right; their programs must differ."""
        raise AssertionError("a contract test class must implement make()")

    def failing(self) -> dict[Config, Outcome]:
        """Configs that fail, with their outcomes; may be empty where the language refuses nothing."""
        return {}

    def measurer(self, kernel: LanguageKernel) -> LanguageMeasurer:
        """A measurer of the kernel with two workers."""
        return LanguageMeasurer(kernel, workers=2)

    def test_says_what_it_tunes(self) -> None:
        problem = self.make()[0].problem
        again = self.make()[0].problem
        assert problem.kernel.name
        assert problem.kernel.language not in ("", "triton"), "the language is part of what forecasts go by"
        assert problem.kernel.source_sha256, "without it an edited kernel would take decisions of the old one"
        assert problem.arguments
        assert problem.toolchain, "another version of the compiler makes another program"
        assert problem.id == again.id, "a second process would not find what the first has decided"

    def test_what_compiles_is_right_and_has_times(self) -> None:
        kernel, configs = self.make()
        for config in configs[:2]:
            compiled = kernel.compile(config)
            assert kernel.check(compiled) == ""
            times = list(kernel.time(compiled))
            assert len(times) >= 3, "a median needs some"
            assert all(0.0 < t < float("inf") for t in times)

    def test_compiles_in_several_threads_at_once(self) -> None:
        kernel, configs = self.make()
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(kernel.compile, configs[:4]))
        assert [kernel.check(result) for result in results] == [""] * len(results)

    def test_a_config_that_fails_is_an_outcome(self) -> None:
        kernel, _ = self.make()
        measurer = self.measurer(kernel)
        outcomes = {Candidate(config): outcome for config, outcome in self.failing().items()}
        try:
            results = {m.candidate: m for m in measurer.measure(list(outcomes))}
        finally:
            measurer.close()
        assert {c: m.outcome for c, m in results.items()} == outcomes
        assert all(m.extra["message"] for m in results.values()), "a failure without a reason"

    def test_is_decided_by_measuring_and_then_from_the_store(self) -> None:
        kernel, configs = self.make()
        store, settings = Store(None), Settings()
        tuned = tune_language(kernel, configs, store=store, settings=settings)
        assert tuned.decision.evidence is Evidence.MEASURED
        assert tuned.decision.chosen.config in configs
        assert kernel.check(tuned.compiled) == ""
        again = tune_language(self.make()[0], configs, store=store, settings=settings)
        assert (again.decision.evidence, again.decision.measured) == (Evidence.STORED, 0)
        assert again.decision.chosen == tuned.decision.chosen

    def test_respects_a_budget_of_measurements(self) -> None:
        kernel, configs = self.make()
        settings = Settings(max_measurements=2)
        assert tune_language(kernel, configs, store=Store(None), settings=settings).decision.measured <= 2

    def test_nothing_that_works_is_an_error(self) -> None:
        kernel, _ = self.make()
        failing: Any = list(self.failing())
        if not failing:
            return
        has_raised = False
        try:
            tune_language(kernel, failing, store=Store(None), settings=Settings())
        except NoWorkingConfigError:
            has_raised = True
        assert has_raised, "a config was chosen although none works"


class MeasurerContract:
    """The rules that every measurer must obey. Subclass it and implement `make`."""

    def make(self) -> tuple[Measurer, Sequence[Candidate]]:
        """A fresh measurer with at least two workers, and four or more candidates that run."""
        raise AssertionError("a contract test class must implement make()")

    def test_measures_what_is_asked_for_once(self) -> None:
        measurer, names = self.make()
        try:
            results = list(measurer.measure(names[:2], prefetch=names[2:3]))
            results += measurer.measure(names[2:4])
            cost = measurer.spent()
        finally:
            measurer.close()
        assert {m.candidate for m in results[:2]} == set(names[:2])
        assert {m.candidate for m in results[2:]} == set(names[2:4])
        assert all(m.ok for m in results)
        assert cost.timing_s > 0

    def test_what_is_prefetched_is_not_timed_unless_asked_for(self) -> None:
        measurer, names = self.make()
        try:
            measurer.prefetch([])
            measurer.prefetch(names[:1])
            measurer.prefetch(names[:2])
            assert measurer.spent().timing_s == 0
            results = list(measurer.measure(names[2:4]))
            later = list(measurer.measure(names[:1]))
            cost = measurer.spent()
        finally:
            measurer.close()
        assert {m.candidate for m in results} == set(names[2:4])
        assert [m.candidate for m in later] == list(names[:1])
        assert cost.compiled <= 4, "something was compiled twice"

    def test_what_does_not_come_in_time_comes_when_asked_for_again(self) -> None:
        measurer, names = self.make()
        try:
            results = list(measurer.measure(names[:3], within_s=0.0))
            assert set(measurer.compiling()) <= set(names[:3])
            assert all(seconds >= 0.0 for seconds in measurer.compiling().values())
            results += measurer.measure([c for c in names[:3] if c not in {m.candidate for m in results}])
            assert not measurer.compiling()
            cost = measurer.spent()
        finally:
            measurer.close()
        assert sorted(m.candidate.id for m in results) == sorted(c.id for c in names[:3])
        assert cost.compiled <= 3, "something was compiled twice"

    def test_what_is_timed_is_not_ready_and_what_was_not_listened_to_is(self) -> None:
        measurer, names = self.make()
        try:
            first = next(iter(measurer.measure(names[:2])))
            rest = [c for c in names[:2] if c != first.candidate]
            assert first.candidate not in measurer.ready()
            (second,) = measurer.measure(rest)
            assert not set(measurer.ready()) & set(names[:2])
        finally:
            measurer.close()
        assert [second.candidate] == rest


class PolicyContract:
    """The rules that every policy must obey. Subclass it and implement `make`."""

    def make(self) -> Policy:
        """A fresh policy."""
        raise AssertionError("a contract test class must implement make()")

    def state(self, table: Table, known: int, **changes: Any) -> TuningState:
        """A state of a table's problem with independent forecasts around the truth."""
        rows = table.by_candidate()
        mean = np.array([math.log2(m.ms) if m.ok else 0.0 for m in rows.values()])
        fails = np.array([0.02 if m.ok else 0.5 for m in rows.values()])
        forecasts = Forecasts(list(rows), mean, np.full(len(rows), 0.2), fails)
        rows_known = dict(list(rows.items())[:known])
        fields: dict[str, Any] = {"new": known, "round": int(known > 0), "workers": 4, **changes}
        return TuningState(forecasts, rows_known, **fields)

    def run(self, state: TuningState, rows: Mapping[Candidate, Measurement]) -> dict[Candidate, Measurement]:
        """Measure what the policy wants, plan after plan, until it stops; fails if it does not stop."""
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
            candidates = [*plan.measure, *plan.prefetch]
            assert not set(candidates) & set(state.measured)
            assert len(set(candidates)) == len(candidates)
            assert set(plan.audit) <= set(plan.measure) <= set(state.forecasts.candidates)

    def test_is_a_pure_function_of_the_state(self) -> None:
        make, table = self.make, example_table()
        for known in (0, 2):
            assert make().plan(self.state(table, known)) == make().plan(self.state(table, known))

    def test_ends(self) -> None:
        table = example_table()
        result = self.run(self.state(table, 0), table.by_candidate())
        assert any(m.ok for m in result.values())

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
        """A launch needs a config that works, for any budget and forecasts."""
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


class StoreContract:
    """The rules that every store must obey. Subclass it and implement `make`."""

    def make(self) -> Any:
        """A fresh, empty store."""
        raise AssertionError("a contract test class must implement make()")

    def test_keeps_what_was_added(self) -> None:
        store, table = self.make(), example_table()
        row = replace(table.measurements[0], extra={"message": "über", "spills": 3})
        store.add(table.problem, table.measurements[1])
        store.add_all(table.problem, [*table.measurements[2:], row])
        result = store.measurements(table.problem)
        assert result == [*table.measurements[1:], row]
        assert result[-1].extra == row.extra

    def test_keeps_problems_apart(self) -> None:
        store, table = self.make(), example_table()
        other = Problem.of(table.problem.kernel, table.problem.arguments[:1], table.problem.device)
        store.add(table.problem, table.measurements[0])
        assert store.measurements(other) == []
        has_raised = False
        try:
            store.add(other, table.measurements[0])
        except RecordError:
            has_raised = True
        assert has_raised, "a measurement of another problem was taken"

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
        with store.tuning_lock(table.problem, 0.0) as first, store.tuning_lock(other, 0.0) as apart:
            assert first
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


class SurrogateContract:
    """The rules that every surrogate must obey. Subclass it and implement `make`."""

    def make(self) -> Surrogate:
        """A fresh surrogate."""
        raise AssertionError("a contract test class must implement make()")

    def ask(self, query: Query) -> Forecasts:
        """Forecasts of a fresh surrogate, refused unless the tuner would accept them."""
        return validate_forecasts(self.make().forecast(query), query.candidates)

    def test_answers_every_candidate_with_finite_numbers(self) -> None:
        assert self.make().name
        assert self.make().version
        for known in (0, 1, 5, 15):
            forecasts = self.ask(query_of(example_table(), known))
            assert (forecasts.sd > 0).all()

    def test_is_a_pure_function_of_the_query(self) -> None:
        query, again = query_of(example_table(), 5), query_of(example_table(), 5)
        surrogate = self.make()
        a, b, c = self.ask(query), surrogate.forecast(query), surrogate.forecast(query)
        rows = np.arange(len(query.candidates))
        for answer in (b, c):
            np.testing.assert_array_equal(a.mean, answer.mean)
            np.testing.assert_array_equal(a.p_fail, answer.p_fail)
            np.testing.assert_array_equal(a.samples(rows, 8, 3), answer.samples(rows, 8, 3))
        assert query == again, "the query was changed"

    def test_the_order_of_the_candidates_does_not_matter(self) -> None:
        query = query_of(example_table(), 4)
        reversal = replace(query, candidates=list(reversed(query.candidates)))
        a, b = self.ask(query), self.ask(reversal)
        np.testing.assert_allclose(a.mean, b.mean[::-1], atol=1e-6)
        np.testing.assert_allclose(a.sd, b.sd[::-1], atol=1e-6)

    def test_samples_follow_mean_and_sd(self) -> None:
        forecasts = self.ask(query_of(example_table(), 4))
        draws = forecasts.samples(np.arange(len(forecasts)), 4096, 1)
        # Quartiles, as a `Forecast` defines point and spread: the draws need not be symmetric. With 4096
        # of them, a standard error of the median is 2 % of sd; five are far outside of chance.
        low, middle, high = np.quantile(draws, (0.25, 0.5, 0.75), axis=0)
        assert (np.abs(middle - forecasts.mean) < 0.1 * forecasts.sd + 1e-3).all()
        np.testing.assert_allclose((high - low) / 1.349, forecasts.sd, rtol=0.25, atol=1e-3)

    def test_survives_a_problem_it_knows_nothing_of(self) -> None:
        bare = Problem("x", Kernel("?"), (), Device("?"))
        odd: list[dict[str, object]] = [
            {"MODE": "fast", "A": 0},
            {"MODE": "slow", "A": None},
            {"A": -3, "B": True},
            {},
        ]
        candidates = [Candidate(Config.of(kwargs)) for kwargs in odd]
        self.ask(Query(bare, candidates))
        self.ask(Query(bare, candidates[:1]))

    def test_survives_extreme_and_failed_measurements(self) -> None:
        table = example_table()
        names = list(table.by_candidate())
        rows = [
            Measurement(table.problem.id, c, o) for c, o in zip(names, Outcome, strict=False) if o != "ok"
        ]
        rows += [
            Measurement(table.problem.id, c, Outcome.OK, ms)
            for c, ms in zip(names[8:], (1e-6, 1e6), strict=False)
        ]
        self.ask(replace(query_of(table), measured=rows))
        self.ask(replace(query_of(table), measured=rows[:1] * 3))

    def test_a_fault_of_the_harness_teaches_nothing(self) -> None:
        query = query_of(example_table())
        fault = Measurement(query.problem.id, query.candidates[0], Outcome.INFRASTRUCTURE)
        np.testing.assert_array_equal(
            self.ask(query).p_fail, self.ask(replace(query, measured=[fault])).p_fail
        )

    def test_a_measured_candidate_is_known_better_than_before(self) -> None:
        table = example_table()
        before, after = self.ask(query_of(table, 0)), self.ask(query_of(table, 3))
        assert (after.sd[:3] < before.sd[:3]).all()
        truth = np.array([math.log2(m.ms) for m in table.measurements[:3]])
        assert (np.abs(after.mean[:3] - truth) <= np.abs(before.mean[:3] - truth) + 0.05).all()
