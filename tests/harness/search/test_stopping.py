"""Failures, retries, reasons to end, and the confirmation of what was found."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.lib.search.synthetic_landscape import (
    SEEDS,
    LandscapeAuthor,
    LandscapeForecaster,
    LandscapeJudge,
    make_node,
    parse_point,
    settings,
)
from forecast_autotune.records import Outcome
from forecast_harness.records import (
    ConfirmationJob,
    NodeForecast,
    NodeJob,
    NodeResult,
    ProposalRequest,
    Proposed,
    SearchBudget,
    SearchSettings,
)
from forecast_harness.search.events import Lost
from forecast_harness.search.plan import proposers_problem
from forecast_harness.trials.protocol import LaneFailure
from tests.harness.search.simulated_search import CountingJudge, SimulatedSearch, comparable_outcome

# --- failures ---


class LosingJudge(CountingJudge):
    """Loses some nodes' lanes for the first few times."""

    def __init__(self, times: int, share: float = 0.3) -> None:
        super().__init__()
        self.times, self.share = times, share

    def judge(self, job: NodeJob) -> NodeResult:
        unlucky = random.Random(job.node.id).random() < self.share and (job.batch or self.share > 1.0)
        if unlucky and self.judged[job.node.id] < self.times:
            self.judged[job.node.id] += 1
            raise LaneFailure("the device fell off the bus", "lane 1")
        return super().judge(job)


def test_lost_jobs_are_tried_twice_more() -> None:
    _, calm = SimulatedSearch(settings(30)).run(random.Random(0))
    spy = LosingJudge(2)
    _, state = SimulatedSearch(settings(30), judge=spy).run(random.Random(0))
    assert set(spy.judged.values()) == {1, 3}
    assert comparable_outcome(state) == comparable_outcome(calm), "a lost lane says nothing of its node"


def test_nodes_whose_lanes_always_fail_are_dropped_and_never_a_label() -> None:
    spy = LosingJudge(99)
    _, state = SimulatedSearch(settings(30), judge=spy).run(random.Random(0))
    dropped = {n for b in state.batches.values() for n in b.dropped}
    assert dropped
    assert {spy.judged[n] for n in dropped} == {3}
    assert not dropped & set(state.judged)
    assert state.spent.measurements + len(dropped) == 30, "what was tried on a device was reserved for it"


class FailingJudge(LandscapeJudge):
    def judge(self, job: NodeJob) -> NodeResult:
        return NodeResult(Outcome.COMPILE_ERROR, job.against.id, stage="compile", feedback="no such module")


def test_a_first_seed_that_fails_ends_the_search() -> None:
    _, state = SimulatedSearch(settings(), judge=FailingJudge()).run(random.Random(0))
    assert state.stopped is not None
    assert state.stopped.reason == "the first seed fails (compile_error): no such module"
    assert state.spent.measurements == 1
    assert state.best == SEEDS[0].id


def test_a_first_seed_whose_lane_is_always_lost_ends_the_search() -> None:
    _, state = SimulatedSearch(settings(), judge=LosingJudge(99, 1.1)).run(random.Random(0))
    assert state.stopped is not None
    assert "could not be judged: the device fell off the bus" in state.stopped.reason


# --- the end ---


def test_patience() -> None:
    class Flat(LandscapeJudge):
        def judge(self, job: NodeJob) -> NodeResult:
            return NodeResult(Outcome.OK, job.against.id, 0.001)

    _, state = SimulatedSearch(settings(500, patience=4), judge=Flat(), forecasts=False).run(random.Random(0))
    assert state.stopped is not None
    assert state.stopped.reason == "no better node in 4 batches"
    assert len(state.batches) - 1 == 4 + 1, "the fifth was under way"


class ScriptedAuthor(LandscapeAuthor):
    """Few proposals, then nothing."""

    def __init__(self, batches: int, exhausted: bool) -> None:
        super().__init__()
        self._batches, self._exhausted = batches, exhausted

    def propose(self, request: ProposalRequest) -> Proposed:
        if request.batch <= self._batches:
            return super().propose(request)
        return Proposed(request.id, (), problem="nothing left", exhausted=self._exhausted)


@pytest.mark.parametrize("forecasts", [True, False])
def test_exhausted_proposers_end_a_search_after_what_they_gave_is_measured(forecasts: bool) -> None:
    world = SimulatedSearch(settings(500), proposer=ScriptedAuthor(2, True), forecasts=forecasts)
    _, state = world.run(random.Random(0))
    assert state.stopped is not None
    if forecasts:
        assert "measurements left are expected to gain" in state.stopped.reason
        assert state.pool, "what the forecasts find hopeless is not measured"
    else:
        assert state.stopped.reason == "the proposers have nothing more"
        assert not state.pool
    assert len(state.judged) > 16


def test_proposers_without_news_end_a_search_by_patience() -> None:
    world = SimulatedSearch(settings(500, patience=5), proposer=ScriptedAuthor(1, False), forecasts=False)
    _, state = world.run(random.Random(0))
    assert state.stopped is not None
    assert state.stopped.reason in ("no new node in 5 batches", "no better node in 5 batches")


def test_proposers_that_never_give_a_source_are_the_reason_of_the_end() -> None:
    world = SimulatedSearch(settings(500, patience=5), proposer=ScriptedAuthor(0, False), forecasts=False)
    _, state = world.run(random.Random(0))
    assert state.stopped is not None
    assert state.stopped.reason == "no proposer gave a source in 5 batches: nothing left"
    assert proposers_problem(state) == "nothing left"


def test_proposers_that_have_nothing_more_have_not_failed() -> None:
    world = SimulatedSearch(settings(500), proposer=ScriptedAuthor(0, True), forecasts=False)
    _, state = world.run(random.Random(0))
    assert state.stopped is not None
    assert state.stopped.reason == "the proposers have nothing more"
    assert proposers_problem(state) == ""


class CertainForecaster(LandscapeForecaster):
    """Knows that everything is slower, and does not doubt it."""

    def _belief(self, node: Any, there: float) -> NodeForecast:
        return NodeForecast(1.0, 0.01, 0.0, 0.0)


def test_a_search_ends_when_what_is_left_is_not_worth_it() -> None:
    rest = SimulatedSearch(settings(500), forecaster=CertainForecaster(), proposer=ScriptedAuthor(2, True))
    _, state = rest.run(random.Random(0))
    assert state.stopped is not None
    assert "measurements left are expected to gain 0.00% in all" in state.stopped.reason
    assert {state.reason(n) for n in state.judged} <= {"seed", "audit"}
    assert len(state.judged) < 8


def test_the_best_are_confirmed_against_the_first_seed() -> None:
    spy = CountingJudge()
    _, state = SimulatedSearch(settings(30), judge=spy).run(random.Random(0))
    ranked = sorted(state.scores, key=lambda n: state.scores[n])
    assert spy.confirmed == [ranked[:3]]
    assert set(state.confirmed) == set(ranked[:3])
    assert state.best == min(state.confirmed, key=lambda n: state.confirmed[n].log2_ratio or 0.0)
    assert state.best_score == state.confirmed[state.best].log2_ratio
    assert state.spent.measurements == 30, "a confirmation is no measurement of the budget"
    assert state.spent_on["confirmation"].device_seconds == 9.0


class RefutingJudge(CountingJudge):
    """Finds the finalists of the first rounds wrong."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        found = super().confirm(confirm)
        if len(self.confirmed) > self.rounds:
            return found
        return {
            n: NodeResult(Outcome.INCORRECT, stage="confirm", feedback="fresh seeds differ") for n in found
        }


def test_the_next_best_take_the_place_of_finalists_that_are_refuted() -> None:
    spy = RefutingJudge(1)
    _, state = SimulatedSearch(settings(40), judge=spy).run(random.Random(0))
    ranked = sorted(state.scores, key=lambda n: state.scores[n])
    assert spy.confirmed == [ranked[:3], ranked[3:6]]
    assert state.best in ranked[3:6]
    assert {state.status(n) for n in ranked[:3]} == {"refuted"}


def test_nothing_refuted_is_ever_the_best() -> None:
    spy = RefutingJudge(99)
    _, state = SimulatedSearch(settings(40), judge=spy).run(random.Random(0))
    assert len(spy.confirmed) == 3
    assert state.best not in state.confirmed
    assert state.best == sorted(state.scores, key=lambda n: state.scores[n])[9]


def test_finalists_that_are_slower_when_confirmed_lose_to_the_seed() -> None:
    class Sobering(CountingJudge):
        def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
            found = super().confirm(confirm)
            return {n: NodeResult(Outcome.OK, log2_ratio=0.01) for n in found}

    _, state = SimulatedSearch(settings(30), judge=Sobering()).run(random.Random(0))
    assert state.best == state.seeds[0]
    assert state.best_score == 0.0


def test_a_confirmation_whose_lane_is_lost_is_tried_twice_more() -> None:
    class Gone(CountingJudge):
        def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
            super().confirm(confirm)
            raise LaneFailure("no power")

    spy = Gone()
    log, state = SimulatedSearch(settings(20), judge=spy).run(random.Random(0))
    assert len(spy.confirmed) == 3
    assert state.stopped is not None
    assert state.stopped.reason.endswith("unconfirmed: no power")
    assert sum(isinstance(e, Lost) for e in log) == 3
    assert state.best == state.incumbent


def test_a_judge_that_leaves_out_a_finalist_has_not_confirmed() -> None:
    """And is not asked for ever."""

    class Silent(CountingJudge):
        def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
            found = super().confirm(confirm)
            return {confirm.seed_node.id: NodeResult(Outcome.OK, log2_ratio=0.0)} if found else {}

    _, state = SimulatedSearch(settings(20), judge=Silent()).run(random.Random(0))
    assert state.stopped is not None
    assert "unconfirmed: the judge says nothing of" in state.stopped.reason


def test_where_time_is_limited_a_word_on_the_first_finalist_will_do() -> None:
    class Hurried(CountingJudge):
        def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
            assert confirm.seconds is not None
            kept = {confirm.seed_node.id, confirm.nodes[0].id}
            return {n: j for n, j in super().confirm(confirm).items() if n in kept}

    limited = replace(settings(20), budget=SearchBudget(20, wall_seconds=1e6))
    log, state = SimulatedSearch(limited, judge=Hurried()).run(random.Random(0))
    assert state.stopped is not None
    assert "unconfirmed" not in state.stopped.reason
    assert not any(isinstance(e, Lost) for e in log)
    assert set(state.confirmed) - {state.seeds[0]}


def test_nothing_is_confirmed_where_nothing_is_faster() -> None:
    class Slow(CountingJudge):
        def judge(self, job: NodeJob) -> NodeResult:
            return replace(super().judge(job), outcome=Outcome.OK, log2_ratio=0.5)

    spy = Slow()
    _, state = SimulatedSearch(settings(20), judge=spy).run(random.Random(0))
    assert spy.confirmed == []
    assert state.best == state.seeds[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_forecasts_find_more_with_the_same_budget(depth: int) -> None:
    """The point of it all, on a landscape where forecasts are noisy but informed."""
    gain = []
    for seed in range(6):
        chosen: SearchSettings = settings(24, seed=seed, depth=depth)
        with_, without = (
            SimulatedSearch(chosen, forecasts=f).run(random.Random(0))[1] for f in (True, False)
        )
        gain.append(without.best_score - with_.best_score)
    assert sum(gain) / len(gain) > 0.1


def test_a_proposal_repeated_by_two_parents_is_one_node() -> None:
    class Same(LandscapeAuthor):
        def propose(self, request: ProposalRequest) -> Proposed:
            nodes = tuple(make_node(a, request.batch % 7) for a in range(2, 2 + request.n))
            return Proposed(request.id, nodes)

    log, state = SimulatedSearch(settings(20), proposer=Same(), forecasts=False).run(random.Random(0))
    assert len({parse_point(n.source) for n in state.nodes.values()}) == len(state.nodes)
    assert len(state.duplicates) + len(state.nodes) - len(SEEDS) == sum(
        len(e.nodes) for e in log if isinstance(e, Proposed)
    )
    assert {r.reason for r in state.duplicates} == {"the same program"}
