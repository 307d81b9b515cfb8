"""What is compiled while most of the IR is still to be traced, and that no decision depends on it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.policy import Fixed
from forecast_autotune.records import Candidate, Decision
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.loop import TuningTask, tune
from forecast_autotune.tuning.table_measurer import TIMING_S, TableMeasurer
from forecast_autotune.tuning.tracing import FIRST_GUESS_TRACES
from tests.core.tuning.loop import Bench, Told, constant

WIDE = example_table([2**k for k in range(2, 14)])
NAMES = list(WIDE.by_candidate())


class Logged(Bench):
    """A bench that writes what happens into a log shared with the tracer."""

    def __init__(self, log: list[tuple[str, int]], workers: int = 4) -> None:
        super().__init__(WIDE)
        self.log, self.workers = log, workers
        self.guessed: list[Candidate] = []

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        self.log.append(("prefetch", len(candidates)))
        self.guessed += candidates
        super().prefetch(candidates)

    def measure(self, candidates: Sequence[Candidate], *, prefetch: Sequence[Candidate] = ()) -> Any:
        self.log.append(("measure", len(candidates)))
        return super().measure(candidates, prefetch=prefetch)


def run(bench: Bench, log: list[tuple[str, int]] | None = None, **options: Any) -> Decision:
    def trace(wanted: Sequence[Candidate]) -> Mapping[str, str]:
        if log is not None:
            log.append(("trace", len({assignment_of(c) for c in wanted})))
        return {assignment_of(c): "module {}" for c in wanted}

    names = options.pop("names", NAMES)
    given = {"store": Store(None), "surrogate": AnalyticSurrogate(), **options}
    settings = Settings().with_(**given.pop("settings", {}))
    return tune(TuningTask(WIDE.problem, names, trace=trace), bench, settings=settings, **given)


def test_a_guess_is_compiled_between_the_first_traces_and_the_rest() -> None:
    log: list[tuple[str, int]] = []
    bench = Logged(log)
    run(bench, log)
    assert [name for name, _ in log[:4]] == ["trace", "prefetch", "trace", "measure"]
    assert [count for name, count in log if name == "trace"] == [FIRST_GUESS_TRACES, 12 - FIRST_GUESS_TRACES]
    assert 0 < len(bench.guessed) <= 2, "half of the workers"
    assert bench.made == bench.closed == 1


@pytest.mark.parametrize("workers", [1, 2, 16])
def test_a_guess_takes_half_of_the_workers_at_most(workers: int) -> None:
    bench = Logged([], workers)
    run(bench)
    assert 0 < len(bench.guessed) <= max(1, workers // 2)


def test_the_guess_is_among_what_was_traced_best_first() -> None:
    asked: list[list[Candidate]] = []
    told = Told(lambda query: asked.append(list(query.candidates)) or constant()(query))  # type: ignore[func-returns-value]
    bench = Logged([], 16)
    run(bench, surrogate=told)
    assert len({assignment_of(c) for c in asked[0]}) == FIRST_GUESS_TRACES
    assert set(bench.guessed) <= set(asked[0])
    assert asked[1] == NAMES


def test_the_same_is_decided_and_measured_without_a_guess() -> None:
    class Deaf(Logged):
        def prefetch(self, candidates: Sequence[Candidate]) -> None:
            pass

    decisions, asked = [], []
    for bench in (Logged([]), Deaf([])):
        decision = run(bench)
        cost = replace(decision.cost, wall_s=0.0, forecast_s=0.0, compile_s=0.0, compiled=0)
        decisions.append(replace(decision, cost=cost, at="", saved_s=0.0))
        asked.append(set(bench.asked))
    assert decisions[0] == decisions[1]
    assert asked[0] == asked[1]


def test_a_guess_that_is_never_timed_is_not_measured() -> None:
    store, bench = Store(None), Logged([], 16)
    decision = run(bench, store=store, policy=Fixed(1))
    assert len(bench.guessed) == 1
    assert decision.measured == len(bench.asked) == len(store.measurements(WIDE.problem)) == 1
    wrong = [c for c in bench.guessed if c not in bench.asked]
    assert decision.cost.compiled == len(wrong) + 1


@pytest.mark.parametrize("mode", ["skip", "deterministic"])
def test_nothing_is_compiled_where_no_clock_is_allowed(mode: str) -> None:
    bench = Logged([])
    run(bench, settings={"mode": mode})
    assert (bench.made, bench.guessed) == (0, [])


def test_nothing_is_guessed_when_the_store_answers() -> None:
    store = Store(None)
    run(Logged([]), store=store)
    again = Logged([])
    run(again, store=store)
    assert (again.made, again.guessed) == (0, [])
    other = Logged([])
    run(other, store=store, settings={"tolerance": 0.001})
    assert other.guessed == [], "part of it is measured: the plan may be empty"


def test_everything_is_traced_before_an_exhaustive_sweep() -> None:
    log: list[tuple[str, int]] = []
    bench = Logged(log)
    run(bench, log, settings={"mode": "exhaustive"})
    assert [entry for entry in log if entry[0] == "trace"] == [("trace", 12)]
    assert bench.guessed == []


def test_a_short_list_is_planned_straight_away() -> None:
    log: list[tuple[str, int]] = []
    bench = Logged(log)
    run(bench, log, names=NAMES[:12])
    assert [entry for entry in log if entry[0] == "trace"] == [("trace", 4)]
    assert bench.guessed == []


def test_a_surrogate_that_fails_on_the_guess_is_heard_of_with_the_plan() -> None:
    def fail(query: Any) -> Any:
        raise ValueError("no idea")

    bench, told = Logged([]), Told(fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decision = run(bench, surrogate=told)
    assert len(caught) == len(told.queries) - 1, "the first failure is of the guess, and is not told"
    assert all("no idea" in str(w.message) for w in caught)
    assert bench.guessed == []
    assert decision.measured == len(NAMES)


def test_simulated_guesses_use_idle_workers_only() -> None:
    measurer = TableMeasurer(WIDE, workers=2)
    measurer.prefetch(NAMES[:5])
    assert measurer.spent().compiled == 2
    (found,) = measurer.measure(NAMES[:1])
    assert measurer.spent().wall_s == pytest.approx(0.5 + TIMING_S)
    assert measurer.spent().compiled == 2, "it was compiled already"
    assert found.candidate == NAMES[0]
