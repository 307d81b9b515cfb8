"""What compiles before anything is forecast, how long it takes, what is one program, and what is given up."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.policy import Exhaustive, Fixed, Policy, RiskBounded, WallTime
from forecast_autotune.records import Candidate, Decision, Measurement, Outcome, Plan
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.testing import example_table
from forecast_autotune.tuning.loop import TuningTask, tune
from forecast_autotune.tuning.replays.replay import ReplayStore, load, shipped_tables, task_of
from tests.core.tuning.loop import Bench, Told

WIDE = example_table([2**k for k in range(2, 14)])
NAMES = list(WIDE.by_candidate())
ORDER = [m.candidate for m in sorted(WIDE.measurements, key=lambda m: m.ms if m.ok else math.inf)]
BEST = ORDER[0]


class Logged(Bench):
    """A bench that writes what happens into a log shared with the tracer."""

    def __init__(
        self,
        log: list[tuple[str, int]] | None = None,
        workers: int = 4,
        table: Table = WIDE,
        quiet: bool = True,
    ) -> None:
        super().__init__(table)
        self.log = [] if log is None else log
        self.workers, self.quiet = workers, quiet
        self.ahead: list[Candidate] = []
        self.within: list[float | None] = []
        self.listed: list[list[Candidate]] = []

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        self.log.append(("prefetch", len(candidates)))
        self.ahead += candidates
        super().prefetch(candidates)

    def measure(self, candidates: Sequence[Candidate], **options: Any) -> Iterator[Measurement]:
        self.log.append(("measure", len(candidates)))
        self.within.append(options.get("within_s"))
        self.listed.append(list(candidates))
        return super().measure(candidates, **options)


def run(bench: Bench, log: list[tuple[str, int]] | None = None, **options: Any) -> Decision:
    def trace(wanted: Sequence[Candidate]) -> Mapping[str, str]:
        if log is not None:
            log.append(("trace", len({assignment_of(c) for c in wanted})))
        return {assignment_of(c): "module {}" for c in wanted}

    names = options.pop("names", NAMES)
    given = {"store": Store(None), "surrogate": AnalyticSurrogate(), **options}
    settings = Settings().with_(**given.pop("settings", {}))
    return tune(TuningTask(WIDE.problem, names, trace=trace), bench, settings=settings, **given)


def truth(table: Table = WIDE) -> Callable[[Query], Forecasts]:
    """Forecasts around what the table says, surer of what is measured."""
    times = {m.candidate: math.log2(m.ms) if m.ok else 3.0 for m in table.measurements}

    def say(query: Query) -> Forecasts:
        n, known = len(query.candidates), {m.candidate for m in query.measured}
        spread = np.array([1e-3 if c in known else 0.05 for c in query.candidates])
        return Forecasts(
            query.candidates, np.array([times[c] for c in query.candidates]), spread, np.zeros(n)
        )

    return say


def compiling_for(seconds: Mapping[Candidate, float]) -> Table:
    """The wide table, whose compilations take so long."""
    rows = [replace(m, compile_s=seconds.get(m.candidate, 0.3)) for m in WIDE.measurements]
    return Table(WIDE.problem, rows)


# --- before anything is forecast ---


@pytest.mark.parametrize("workers", [18, 36])
def test_a_list_that_fits_the_workers_twice_compiles_before_anything_is_traced(workers: int) -> None:
    log: list[tuple[str, int]] = []
    bench = Logged(log, workers)
    run(bench, log)
    assert [name for name, _ in log[:2]] == ["prefetch", "trace"]
    assert sorted(bench.ahead, key=str) == sorted(NAMES, key=str)
    assert bench.made == bench.closed == 1


def test_all_workers_compile_the_best_guesses_of_a_longer_list_while_it_is_traced() -> None:
    log: list[tuple[str, int]] = []
    workers, told = len(NAMES) // 2 - 1, Told(truth())
    bench = Logged(log, workers)
    decision = run(bench, log, surrogate=told)
    assert log[:2] == [("prefetch", workers), ("trace", 12)]
    assert bench.ahead == ORDER[:workers]
    assert [query.provisional for query in told.queries[:2]] == [True, False]
    assert decision.chosen == BEST


class SlowTracer:
    """A tracer in the background, whose texts come once it has been asked so often."""

    def __init__(self, polls: int) -> None:
        self._left, self._wanted, self.polls = polls, dict[str, str](), 0

    def __call__(self, wanted: Sequence[Candidate]) -> Mapping[str, str]:
        self.start(wanted)
        return self.poll(math.inf)

    def start(self, wanted: Sequence[Candidate]) -> None:
        self._wanted |= {assignment_of(c): "module {}" for c in wanted}

    def poll(self, timeout_s: float) -> Mapping[str, str]:
        self.polls += 1
        if self.polls < self._left and timeout_s < 0.1:  # whoever waits longer gets what he waits for
            return {}
        came, self._wanted = self._wanted, {}
        return came

    @property
    def outstanding(self) -> int:
        return len(self._wanted)

    def close(self) -> None:
        self._wanted = {}


class Ticking(Logged):
    """A bench on which another of what compiles ends whenever something is asked of it, up to so many."""

    def __init__(self, most: int = len(NAMES)) -> None:
        super().__init__(workers=len(NAMES))
        self.most, self.asked_for = most, 0
        self.timed: set[Candidate] = set()

    def ready(self) -> Sequence[Candidate]:
        return [c for c in self.ahead[: min(self.asked_for, self.most)] if c not in self.timed]

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        super().prefetch(candidates)
        self.asked_for += 1

    def measure(self, candidates: Sequence[Candidate], **options: Any) -> Iterator[Measurement]:
        self.asked_for += 1
        self.timed.update(candidates)
        return super().measure(candidates, **options)


def decide_early(bench: Bench, tracer: SlowTracer, store: Store, told: Told) -> Decision:
    task = TuningTask(WIDE.problem, NAMES, trace=tracer)
    return tune(task, bench, settings=Settings(), store=store, surrogate=told)


def test_a_list_that_is_timed_whole_before_its_traces_come_needs_no_forecast() -> None:
    told = Told(truth())
    decision = decide_early(Ticking(), SlowTracer(10**6), Store(None), told)
    assert told.queries == []
    assert decision.measured == decision.candidates == len(NAMES)
    assert decision.chosen == BEST
    assert decision.stated_risk == 0.0


@pytest.mark.parametrize("workers", [4, len(NAMES)])
def test_the_best_of_an_earlier_decisions_binaries_are_timed_meanwhile_and_nothing_compiles(
    workers: int,
) -> None:
    """Whatever the list's length: they may be all that it takes."""

    class Kept(Logged):
        def ready(self) -> Sequence[Candidate]:
            timed = {c for some in self.listed for c in some}
            return [c for c in NAMES if c in ORDER[:9] and c not in timed]

    store, bench = Store(None), Kept(workers=workers)
    decision = decide_early(bench, SlowTracer(3), store, Told(truth()))
    early = [m.candidate for m in store.measurements(WIDE.problem) if "forecast" not in m.extra]
    assert early == ORDER[:9][: len(early)]
    assert len(early) >= 2
    assert bench.ahead == []
    assert decision.chosen == BEST


class FailingTracer(SlowTracer):
    """A tracer that cannot be asked."""

    def poll(self, timeout_s: float) -> Mapping[str, str]:
        raise OSError("no more pipes")


def test_a_tracer_that_fails_while_it_is_looked_at_is_no_failure_of_the_measurer() -> None:
    with pytest.warns(UserWarning, match="no more pipes"):
        decision = decide_early(Ticking(0), FailingTracer(1), Store(None), Told(truth()))
    assert decision.chosen == BEST


@pytest.mark.parametrize(
    ("workers", "settings", "most", "made"),
    [
        pytest.param(1, {}, len(NAMES), 1, id="one worker waits for the forecasts of its list"),
        pytest.param(36, {"max_measurements": 3}, 3, 1, id="a limited number of measurements"),
        pytest.param(36, {"mode": "skip"}, 0, 0, id="skip"),
        pytest.param(36, {"mode": "deterministic"}, 0, 0, id="deterministic"),
    ],
)
def test_nothing_compiles_ahead(workers: int, settings: dict[str, Any], most: int, made: int) -> None:
    bench = Logged(workers=workers)
    decision = run(bench, settings=settings)
    assert (bench.made, bench.ahead) == (made, [])
    assert decision.measured <= most


def test_a_guess_that_fails_costs_nothing() -> None:
    say = truth()

    def fail(query: Query) -> Forecasts:
        if query.provisional:
            raise ValueError("no idea")
        return say(query)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decision = run(Logged(workers=4), surrogate=Told(fail))
    assert decision.chosen == BEST
    assert decision.measured < len(NAMES)


def test_what_compiled_ahead_and_was_not_timed_is_not_measured() -> None:
    store, bench = Store(None), Logged(workers=36)
    decision = run(bench, store=store, surrogate=Told(truth()))
    assert sorted(bench.ahead, key=str) == sorted(NAMES, key=str)
    assert decision.measured == len(bench.asked) == len(set(bench.asked))
    assert {m.candidate for m in store.measurements(WIDE.problem)} == set(bench.asked)
    assert decision.measured < decision.cost.compiled <= len(NAMES)


def test_nothing_compiles_when_the_store_answers() -> None:
    store, again = Store(None), Logged(workers=36)
    run(Logged(workers=36), store=store)
    run(again, store=store, settings={"tolerance": 0.001})
    assert again.ahead == [], "part of it is measured: the plan may be empty"


def test_an_exhaustive_sweep_traces_everything_while_it_compiles() -> None:
    log: list[tuple[str, int]] = []
    bench = Logged(log)
    decision = run(bench, log, settings={"mode": "exhaustive"})
    assert [entry for entry in log if entry[0] == "trace"] == [("trace", 12)]
    assert log[0] == ("prefetch", len(NAMES)), "all of it will be wanted"
    assert decision.measured == len(NAMES) == decision.cost.compiled


# --- while compilations go on ---


def test_what_cannot_win_is_not_waited_for() -> None:
    slow = [
        m.candidate for m in WIDE.measurements if m.candidate.config.num_warps == 2 and m.candidate != BEST
    ]
    bench = Logged(workers=36, table=compiling_for(dict.fromkeys(slow, 60.0)))
    decision = run(bench, surrogate=Told(truth()))
    assert decision.chosen == BEST
    assert not set(bench.asked) & set(slow)
    assert decision.cost.wall_s < 10


class Waiting:
    """A policy that asks for one candidate again and again, as long as it is not measured."""

    name = "waiting"

    def plan(self, state: Any) -> Plan:
        if NAMES[0] in state.measured:
            return Plan((), "done", 0.0)
        return Plan((NAMES[0],), "wait", 1.0, within_s=0.25)


def test_waiting_takes_time_and_ends() -> None:
    bench = Logged(workers=4, table=compiling_for({NAMES[0]: 2.0}))
    decision = run(bench, policy=Waiting())
    assert decision.measured == 1
    assert decision.rounds == ("wait", "done")
    assert 8 <= len(bench.listed) <= 9


def test_faults_of_the_harness_end_a_wait() -> None:
    rows = [Measurement(m.problem, m.candidate, Outcome.INFRASTRUCTURE) for m in WIDE.measurements]
    bench = Logged(workers=4, table=Table(WIDE.problem, rows))
    decision = run(bench)
    assert decision.evidence == "forecast"
    assert len(bench.asked) == len(set(bench.asked))


# --- measurers that cannot time while they compile ---


@pytest.mark.parametrize("policy", [None, Exhaustive(), Fixed(5)])
def test_without_a_quiet_measurer_plans_are_rounds(policy: Any) -> None:
    bench = Logged(workers=4, quiet=False)
    decision = run(bench, policy=policy)
    assert set(bench.within) == {None}
    assert decision.measured == sum(map(len, bench.listed)), "every round is measured whole"
    assert len(decision.rounds) == len(bench.listed) + 1


TEXTS = list(dict.fromkeys(map(assignment_of, NAMES)))


def of_texts(texts: int, each: int = 1) -> list[Any]:
    """Candidates of so many texts, `each` of every one."""
    found: list[Any] = []
    for text in TEXTS[:texts]:
        found += [name for name in NAMES if assignment_of(name) == text][:each]
    return found


@pytest.mark.parametrize(
    ("workers", "texts", "each", "options"),
    [
        pytest.param(2, 6, 1, {}, id="children trace"),
        pytest.param(1, 8, 1, {}, id="a long list"),
        pytest.param(1, 2, 2, {}, id="a trace stands for two"),
        pytest.param(1, 6, 1, {"settings": {"max_measurements": 3}}, id="few may be measured"),
        pytest.param(1, 6, 1, {"policy": RiskBounded()}, id="a policy that does not look at the clock"),
    ],
)
def test_other_lists_are_traced(workers: int, texts: int, each: int, options: dict[str, Any]) -> None:
    log: list[tuple[str, int]] = []
    decision = run(Logged(log, workers), log, names=of_texts(texts, each), **options)
    assert "trace" in dict(log)
    assert decision.measured > 0


STAGES = (2, 3, 4)


def repeated(kernel: str) -> Table:
    """A shipped table whose candidates come at each of `STAGES`, with the same times."""
    table = next(t for t in load(shipped_tables()) if t.problem.kernel.name == kernel)
    rows = {}
    for m in table.measurements:
        for stages in STAGES:
            config = replace(m.candidate.config, num_stages=stages)
            rows.setdefault(config, replace(m, candidate=Candidate(config)))
    return replace(table, measurements=list(rows.values()))


def decided(table: Table, policy: Policy, **changes: Any) -> tuple[Decision, list[Candidate]]:
    bench, settings, surrogate = Bench(table), Settings(**changes), AnalyticSurrogate()
    store = ReplayStore(())
    decision = tune(task_of(table), bench, store=store, surrogate=surrogate, settings=settings, policy=policy)
    return decision, bench.asked


@pytest.mark.parametrize("policy", [WallTime(), RiskBounded()], ids=lambda p: p.name)
def test_stages_that_change_nothing_are_not_measured_apart(policy: Policy) -> None:
    table = repeated("online_softmax")
    decision, asked = decided(table, policy)
    distinct = [replace(c.config, num_stages=0) for c in asked]
    assert len(set(distinct)) == len(distinct)
    assert f"{2 * len(asked)} others compile to the same programs" in decision.reason
    best = min(m.ms for m in table.measurements if m.ok)
    assert decision.median_ms is not None
    assert decision.median_ms < 1.1 * best


def test_stages_of_a_pipelined_loop_are_measured_apart() -> None:
    decision, _ = decided(repeated("matmul_kernel"), WallTime())
    assert "same programs" not in decision.reason


def test_exhaustive_mode_measures_every_candidate() -> None:
    table = repeated("online_softmax")
    decision, asked = decided(table, WallTime(), mode=Mode.EXHAUSTIVE)
    assert len(asked) == len({m.candidate for m in table.measurements}) == decision.measured
