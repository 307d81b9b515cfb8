"""What is done next, and when it ends: budgets, depth, what is asked, failures, confirmation."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from benchmarks.lib.search.synthetic_landscape import (
    SEEDS,
    LandscapeAuthor,
    LandscapeForecaster,
    make_node,
    parse_point,
    settings,
)
from forecast_autotune.commands.output import CommandError
from forecast_autotune.records import Outcome
from forecast_harness.commands.search import _check_end
from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    NodeJob,
    NodeResult,
    ProposalRequest,
    Proposed,
    SearchBudget,
    SearchSettings,
)
from forecast_harness.search.events import (
    Confirmed,
    Expired,
    Finished,
    Forecasted,
    Lost,
    NodeForecastRequest,
    StopSearch,
    Verified,
)
from forecast_harness.search.plan import (
    NODES_AHEAD,
    confirmation_reserve,
    paced_ahead,
    paced_as,
    pending_actions,
    proposers_problem,
)
from forecast_harness.search.state import SearchState, apply_event, replay_events
from forecast_harness.trials.protocol import LaneFailure
from tests.harness.search.simulated_search import CountingJudge, SimulatedSearch, jobs

# --- budgets ---


@hypothesis_settings(max_examples=25)
@given(
    st.integers(0, 25),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_never_more_measurements_than_the_budget(
    limit: int, k: int, parents: int, depth: int, forecasts: bool, order: random.Random
) -> None:
    spy = CountingJudge()
    world = SimulatedSearch(
        settings(limit, k=k, parents=parents, depth=depth, samples=6), judge=spy, forecasts=forecasts
    )
    _, state = world.run(order)
    assert state.spent.measurements == sum(spy.judged.values()) == limit
    assert set(spy.judged.values()) <= {1}
    assert state.stopped is not None
    for batch in state.batches.values():
        chosen = batch.chosen.nodes if batch.chosen else ()
        assert len(chosen) <= max(k * parents, len(SEEDS) if batch.number == 0 else 0)


@pytest.mark.parametrize("forecasts", [True, False])
def test_a_budget_of_device_seconds_is_kept_up_to_the_batches_under_way(forecasts: bool) -> None:
    """Judging takes 0.5 to 1.5 seconds: a batch of four that is chosen by the mean can be off by two."""
    limits = SearchBudget(measurements=None, device_seconds=30.0)
    world = SimulatedSearch(replace(settings(), budget=limits), forecasts=forecasts)
    _, state = world.run(random.Random(0))
    assert state.stopped.reason.startswith("device seconds")
    assert 24.0 < state.spent_on["measurements"].device_seconds < 33.0


def timed_out_search() -> SearchState:
    """A whole search whose time is up before its confirmation."""
    limits = SearchBudget(12, wall_seconds=60.0)
    _, whole = SimulatedSearch(replace(settings(), budget=limits)).run(random.Random(0))
    whole.stopped, whole.confirmed, whole.confirmations = None, {}, 0
    apply_event(whole, Expired(46.0))
    return whole


def test_when_the_time_is_up_the_best_is_confirmed_and_nothing_else_is_begun() -> None:
    whole = timed_out_search()
    assert whole.best != whole.seeds[0]
    (due,) = pending_actions(whole)
    assert isinstance(due, ConfirmationJob)
    assert whole.best in {n.id for n in due.nodes}
    assert due.seconds == 14.0, "what is left"
    for took, waited, kept in ((4.0, 0.0, 13.0), (50.0, 45.0, 15.0), (50.0, 0.0, 30.0)):
        told = {"spent_verifying": {"waited": waited, "verify": took - waited}} if waited else {}
        whole.verifications[:] = [
            Verified("job", whole.best, FullVerification(Outcome.OK, "", told, wall_seconds=took))
        ]
        assert confirmation_reserve(whole, 60.0) == kept, "by what one takes without waiting, half at most"
    apply_event(whole, Confirmed({n.id: NodeResult(Outcome.INCORRECT) for n in due.nodes}))
    assert pending_actions(whole) == (
        StopSearch("the time is up: 46 s went to the search, the rest to confirmation"),
    ), "refuted ones are not replaced any more"


# --- order ---


def test_the_first_seed_is_judged_beside_itself_and_the_others_beside_it() -> None:
    world = SimulatedSearch(settings())
    state = replay_events([world.started])
    (first,) = jobs(pending_actions(state))
    assert (first.node, first.against, first.against_config) == (SEEDS[0], SEEDS[0], {})
    judged = NodeResult(Outcome.OK, SEEDS[0].id, -0.5, config={"BLOCK": 128})
    apply_event(state, Finished(first.id, SEEDS[0].id, 0, judged))
    assert state.scores == {SEEDS[0].id: 0.0}, "the first seed is what scores are relative to"
    (second,) = jobs(pending_actions(state))
    assert (second.node, second.against, second.against_config) == (SEEDS[1], SEEDS[0], {"BLOCK": 128})


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_as_many_batches_are_under_way_as_the_depth(depth: int) -> None:
    """Answering everything but jobs leads up to jobs of `depth` batches, and no further."""
    world = SimulatedSearch(settings(200, depth=depth))
    state = replay_events([world.started])
    while not state.batch(0).ended:
        apply_event(state, world.answer(pending_actions(state)[0]))
    while due := [a for a in pending_actions(state) if not isinstance(a, NodeJob)]:
        apply_event(state, world.answer(due[0]))
    assert {j.batch for j in jobs(pending_actions(state))} == set(range(1, depth + 1))
    for job in [j for j in jobs(pending_actions(state)) if j.batch == 1][1:]:
        apply_event(state, world.answer(job))
    assert all(isinstance(a, NodeJob) for a in pending_actions(state)), "one job of batch 1 is still open"
    (last,) = [j for j in jobs(pending_actions(state)) if j.batch == 1]
    apply_event(state, world.answer(last))
    assert {a.batch for a in pending_actions(state) if isinstance(a, ProposalRequest)} == {depth + 1}


def test_requests_tell_all_that_a_proposer_needs() -> None:
    world = SimulatedSearch(settings(60, archive="greedy"))
    log, _ = world.run(random.Random(0))
    state, asked = replay_events(log[:1]), dict[str, ProposalRequest]()
    for event in log[1:]:
        asked |= {a.id: a for a in pending_actions(state) if isinstance(a, ProposalRequest)}
        apply_event(state, event)
    due = list(asked.values())
    late = [r for r in due if r.batch > 5]
    assert {r.arm for r in due} == {"table/near", "table/far"}
    assert len({r.id for r in due}) == len(due)
    for request in late:
        parent = request.parents[0]
        assert request.score == state.scores[parent.id]
        assert len(request.parents) == 3 == len(set(request.parents))
        assert set(request.judged) >= {n.id for n in (*request.parents, *request.failures)}
        assert parent.id in request.known
        assert all(f.parents[0] == parent.id for f in request.failures)
        assert all(state.scores.get(f.id, 9.0) > request.score for f in request.failures)
    assert any(r.failures for r in late)
    by_batch = Counter((r.batch, r.parents[0].id) for r in due for _ in range(r.n))
    assert set(by_batch.values()) == {8}


def test_questions_hold_the_new_and_the_best_of_the_deferred() -> None:
    asked: list[NodeForecastRequest] = []

    class Noting(LandscapeForecaster):
        def forecast(self, question: NodeForecastRequest) -> Forecasted:
            asked.append(question)
            return super().forecast(question)

    _, state = SimulatedSearch(settings(80), forecaster=Noting()).run(random.Random(0))
    last = asked[-1]
    new = set(state.batches[last.batch].nodes)
    old = [n.id for n in last.nodes if n.id not in new]
    assert new <= {n.id for n in last.nodes}
    assert len(old) == 2 * 2 * 8 < len(state.pool), "twice what a batch proposes"
    assert not {n.id for n in last.nodes} & {n.id for n, _, _ in last.judged}
    reused = [n for b in state.batches.values() for n in (b.chosen.nodes if b.chosen else ())]
    assert any(state.nodes[n].batch < b.number for b in state.batches.values() for n in b.finished)
    assert len(reused) == len(set(reused))


def test_while_nothing_can_be_forecast_every_arm_gets_its_measurements() -> None:
    """A forecaster that learns abstains at first: equal candidates are taken in turn from all answers."""

    class Silent(LandscapeForecaster):
        def forecast(self, question: NodeForecastRequest) -> Forecasted:
            found = super().forecast(question)
            return replace(found, beliefs={n: replace(b, abstains=True) for n, b in found.beliefs.items()})

    _, state = SimulatedSearch(settings(40, archive="greedy"), forecaster=Silent()).run(random.Random(0))
    for batch in state.batches.values():
        chosen = [state.nodes[n] for n in (batch.chosen.nodes if batch.number and batch.chosen else ())]
        new = [n for n in chosen if n.batch == batch.number and state.reason(n.id) == "uncertain"]
        asked = {a.request for a in batch.answers.values() if set(batch.nodes) & {n.id for n in a.nodes}}
        assert len({n.request for n in new}) == min(len(asked), len(new))


# --- how many batches of which size are under way ---


@pytest.mark.parametrize(("k", "parents"), [(2, None), (4, None), (8, None), (4, 1), (4, 2), (3, 3)])
def test_as_many_measurements_are_under_way_whatever_the_size_of_a_batch(k: int, parents: int | None) -> None:
    found = paced_ahead(SearchSettings(k=k, parents=parents or 2), parents)
    assert found.parents == (parents or 1)
    batch = found.k * found.parents
    assert abs(found.depth * batch - NODES_AHEAD) <= batch / 2 or found.depth == SearchSettings().depth


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("parents", [None, 1, 2, 4])
def test_a_search_knows_results_before_it_may_end_without_new_nodes(k: int, parents: int | None) -> None:
    found = paced_ahead(SearchSettings(k=k), parents)
    assert found.depth < found.patience


def test_a_search_goes_on_as_it_began_except_for_what_an_option_says() -> None:
    begun = paced_ahead(SearchSettings(k=2), None)
    now = SearchSettings(k=3)
    assert paced_as(now, begun, None) == SearchSettings(
        k=3, parents=begun.parents, depth=begun.depth, patience=begun.patience
    )
    assert paced_as(now, begun, 5).parents == 5


# --- failures ---


class ChangedJudge(CountingJudge):
    """Says something else of nodes, or of finalists."""

    def __init__(
        self, *, judge: Callable[..., Any] | None = None, confirm: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self._judge, self._confirm = judge, confirm

    def judge(self, job: NodeJob) -> NodeResult:
        found = super().judge(job)
        return self._judge(job, found) if self._judge else found

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        found = super().confirm(confirm)
        return self._confirm(confirm, found) if self._confirm else found


def test_nodes_whose_lanes_always_fail_are_dropped_and_never_a_label() -> None:
    def lost(job: NodeJob, found: NodeResult) -> NodeResult:
        if job.batch and random.Random(job.node.id).random() < 0.3:
            raise LaneFailure("the device fell off the bus", "lane 1")
        return found

    spy = ChangedJudge(judge=lost)
    _, state = SimulatedSearch(settings(30), judge=spy).run(random.Random(0))
    dropped = {n for b in state.batches.values() for n in b.dropped}
    assert dropped
    assert {spy.judged[n] for n in dropped} == {3}
    assert not dropped & set(state.judged)
    assert state.spent.measurements + len(dropped) == 30, "what was tried on a device was reserved for it"


def test_a_first_seed_that_fails_ends_the_search() -> None:
    failed = NodeResult(Outcome.COMPILE_ERROR, SEEDS[0].id, stage="compile", feedback="no such module")
    judge = ChangedJudge(judge=lambda job, found: failed)
    _, state = SimulatedSearch(settings(), judge=judge).run(random.Random(0))
    assert state.stopped.reason == "the first seed fails (compile_error): no such module"
    assert state.spent.measurements == 1
    assert state.best == SEEDS[0].id


# --- the end ---


def test_patience() -> None:
    flat = ChangedJudge(judge=lambda job, found: NodeResult(Outcome.OK, job.against.id, 0.001))
    _, state = SimulatedSearch(settings(500, patience=4), judge=flat, forecasts=False).run(random.Random(0))
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


@pytest.mark.parametrize(
    ("batches", "exhausted", "reason", "problem"),
    [
        (1, False, "no (new|better) node in 5 batches", ""),
        (0, False, "no proposer gave a source in 5 batches: nothing left", "nothing left"),
        (0, True, "the proposers have nothing more", ""),
    ],
    ids=["without news", "never a source", "nothing more"],
)
def test_proposers_without_sources_end_a_search(
    batches: int, exhausted: bool, reason: str, problem: str
) -> None:
    author = ScriptedAuthor(batches, exhausted)
    world = SimulatedSearch(settings(500, patience=5), proposer=author, forecasts=False)
    _, state = world.run(random.Random(0))
    assert re.fullmatch(reason, state.stopped.reason)
    assert proposers_problem(state) == problem
    with pytest.raises(CommandError, match="none gave any: nothing left") if problem else nullcontext():
        _check_end(state)


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


def refuting_judge(rounds: int) -> ChangedJudge:
    """Finds the finalists of the first rounds wrong."""
    wrong = NodeResult(Outcome.INCORRECT, stage="confirm", feedback="fresh seeds differ")
    judge = ChangedJudge(
        confirm=lambda job, found: found if len(judge.confirmed) > rounds else dict.fromkeys(found, wrong)
    )
    return judge


def test_the_next_best_take_the_place_of_finalists_that_are_refuted() -> None:
    spy = refuting_judge(1)
    _, state = SimulatedSearch(settings(40), judge=spy).run(random.Random(0))
    ranked = sorted(state.scores, key=lambda n: state.scores[n])
    assert spy.confirmed == [ranked[:3], ranked[3:6]]
    assert state.best in ranked[3:6]
    assert {state.status(n) for n in ranked[:3]} == {"refuted"}


def test_finalists_that_are_slower_when_confirmed_lose_to_the_seed() -> None:
    slower = NodeResult(Outcome.OK, log2_ratio=0.01)
    judge = ChangedJudge(confirm=lambda job, found: dict.fromkeys(found, slower))
    _, state = SimulatedSearch(settings(30), judge=judge).run(random.Random(0))
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
    assert state.stopped.reason.endswith("unconfirmed: no power")
    assert sum(isinstance(e, Lost) for e in log) == 3
    assert state.best == state.incumbent


def test_where_time_is_limited_a_word_on_the_first_finalist_will_do() -> None:
    def hurried(job: ConfirmationJob, found: Mapping[str, NodeResult]) -> Mapping[str, NodeResult]:
        assert job.seconds is not None
        return {n: found[n] for n in (job.seed_node.id, job.nodes[0].id) if n in found}

    limited = replace(settings(20), budget=SearchBudget(20, wall_seconds=1e6))
    log, state = SimulatedSearch(limited, judge=ChangedJudge(confirm=hurried)).run(random.Random(0))
    assert "unconfirmed" not in state.stopped.reason
    assert not any(isinstance(e, Lost) for e in log)
    assert set(state.confirmed) - {state.seeds[0]}


def test_nothing_is_confirmed_where_nothing_is_faster() -> None:
    spy = ChangedJudge(judge=lambda job, found: replace(found, outcome=Outcome.OK, log2_ratio=0.5))
    _, state = SimulatedSearch(settings(20), judge=spy).run(random.Random(0))
    assert spy.confirmed == []
    assert state.best == state.seeds[0]


def test_forecasts_find_more_with_the_same_budget() -> None:
    """The point of it all, on a landscape where forecasts are noisy but informed."""
    gain = []
    for seed in range(6):
        chosen: SearchSettings = settings(24, seed=seed)
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
