"""Full verification beside the batches: what leads, what waits, what is refused, and that the log decides."""

from __future__ import annotations

import io
import random
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

from benchmarks.lib.search.synthetic_landscape import settings
from forecast_autotune.commands.output import Output
from forecast_autotune.records import Outcome
from forecast_harness.records import (
    MIN_PROGRESS,
    ConfirmationJob,
    FullVerification,
    NodeJob,
    NodeResult,
    SearchBudget,
    VerificationJob,
)
from forecast_harness.search.events import Action, Event, Expired, Finished, Lost, Resumed, Verified
from forecast_harness.search.log import read_log
from forecast_harness.search.plan import pending_actions
from forecast_harness.search.report import page
from forecast_harness.search.report.figures import build_report, finalist_rows
from forecast_harness.search.report.live import LiveDisplay
from forecast_harness.search.state import MAX_RETRIES, SearchState, apply_event, replay_events
from forecast_harness.trials.protocol import LaneFailure
from tests.harness.search.simulated_search import LateJudge, SimulatedSearch, run_search


class PatientSearch(SimulatedSearch):
    """Verifies where nothing else is due, as one does that takes longer than all of a batch."""

    def run_in_order(self, order: random.Random) -> tuple[list[Event], SearchState]:
        log: list[Event] = [self.started]
        state = replay_events(log)
        while due := pending_actions(state):
            now = [a for a in due if not isinstance(a, VerificationJob)] or list(due)
            log.append(self.answer(order.choice(now)))
            apply_event(state, log[-1])
        return log, state


Late = tuple[SimulatedSearch, list[Event], SearchState]


@pytest.fixture(scope="module", params=[{"depth": 1}, {"depth": 2, "archive": "greedy"}, {"depth": 3}])
def late(request: pytest.FixtureRequest) -> Late:
    world = SimulatedSearch(settings(40, **request.param), judge=LateJudge())
    return world, *world.run(random.Random(3))


def verifications(actions: tuple[Action, ...]) -> list[VerificationJob]:
    return [a for a in actions if isinstance(a, VerificationJob)]


def test_only_what_is_verified_leads_or_is_timed_beside(late: Late) -> None:
    _, events, _ = late
    state, may_lead = SearchState(), set[str]()
    asked = Counter[str]()
    for event in events:
        apply_event(state, event)
        may_lead |= {state.seeds[0]}
        if isinstance(event, Verified) and event.found.is_right:
            may_lead.add(event.node)
        again = {n for n, j in state.confirmed.items() if j.log2_ratio is not None}
        assert state.incumbent in may_lead
        assert state.best in may_lead | again
        due = pending_actions(state)
        for job in due:
            if isinstance(job, NodeJob):
                assert job.against.id in may_lead
        for one in verifications(due):
            asked[one.id] += 1
            ahead = state.scores[state.incumbent] - MIN_PROGRESS
            waiting = {n for n, s in state.scores.items() if s < ahead and n not in may_lead}
            assert one.node.id == min(waiting, key=lambda n: state.scores[n])
            assert one.config == state.judged[one.node.id].config
        assert len(verifications(due)) <= 1
    assert asked, "nothing waited, so this shows nothing"


def test_decisions_are_a_function_of_the_log(late: Late) -> None:
    """A state that has decided all along, and one that reads the same log at once, want the same next."""
    _, events, _ = late
    live = SearchState()
    for number, event in enumerate(events, 1):
        apply_event(live, event)
        assert pending_actions(live) == pending_actions(replay_events(events[:number]))


def test_a_search_can_go_on_from_any_event(late: Late) -> None:
    world, events, state = late
    for cut in range(2, len(events), 9):
        log, resumed = world.run(random.Random(cut), [*events[:cut], Resumed("")])
        assert resumed.stopped is not None
        assert resumed.spent.measurements == state.spent.measurements
        nodes = [e.node for e in log if isinstance(e, Verified)]
        assert len(nodes) == len(set(nodes))


def test_no_batch_waits_for_a_verification() -> None:
    """All is measured, and the confirmation verifies what is left."""
    judge = LateJudge()
    _, state = PatientSearch(settings(40), judge=judge).run_in_order(random.Random(0))
    assert state.spent.measurements == 40
    assert judge.verified == []
    assert state.incumbent == state.seeds[0]
    assert state.confirmed
    parents = {p for n in state.nodes.values() for p in n.parents}
    waiting = {n for n, j in state.judged.items() if j.is_unverified_gain}
    assert waiting & parents, "they are developed all the same"
    assert {j.against for j in state.judged.values()} <= set(state.seeds)


def test_the_fastest_that_is_verified_comes_first_among_the_finalists() -> None:
    def finalists(state: SearchState) -> list[str]:
        (action,) = pending_actions(state)
        assert isinstance(action, ConfirmationJob)
        return [n.id for n in action.nodes]

    world = SimulatedSearch(settings(40), judge=LateJudge())
    events, _ = world.run(random.Random(1))
    place = next(n for n, e in enumerate(events) if isinstance(e, Verified) and e.found.is_right)
    more = next(
        n for n in range(place, len(events)) if verifications(pending_actions(replay_events(events[: n + 1])))
    )
    state = replay_events([*events[: more + 1], Expired(1.0)])
    ranked = sorted(
        (n for n, s in state.scores.items() if s < 0.0 and n != state.seeds[0]),
        key=lambda n: state.scores[n],
    )
    first = next(n for n in ranked if state.judged[n].may_lead)
    assert first != ranked[0]
    assert finalists(state) == [first, *(n for n in ranked if n != first)][:3]


def test_a_verification_whose_lane_is_lost_is_tried_twice_more() -> None:
    class Losing(LateJudge):
        def verify(self, job: VerificationJob) -> FullVerification:
            super().verify(job)
            raise LaneFailure("no power")

    judge = Losing()
    log, state = SimulatedSearch(settings(30), judge=judge).run(random.Random(2))
    lost = [e for e in log if isinstance(e, Lost)]
    assert {e.reason for e in lost} == {"no power"}
    assert set(Counter(judge.verified).values()) <= set(range(1, MAX_RETRIES + 2))
    assert max(Counter(judge.verified).values()) == MAX_RETRIES + 1
    assert len({e.job for e in lost}) == len(lost)
    assert state.spent.measurements == 30
    assert not any(b.lost for b in state.batches.values()), "no node's own job was lost"


def test_a_suspicious_node_is_done_with_and_tried_no_more() -> None:
    class Suspecting(LateJudge):
        def verify(self, job: VerificationJob) -> FullVerification:
            found = super().verify(job)
            return found if found.is_right else replace(found, outcome=Outcome.INFRASTRUCTURE)

    judge = Suspecting()
    _, state = SimulatedSearch(settings(40), judge=judge).run(random.Random(1))
    suspicious = [v.node for v in state.verifications if not v.found.is_right]
    assert suspicious
    assert not set(suspicious) & {*state.scores, *state.confirmed}
    assert set(Counter(judge.verified).values()) == {1}


def test_after_a_lost_confirmation_only_what_is_verified_is_a_finalist() -> None:
    class Crashing(LateJudge):
        def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
            found = super().confirm(confirm)
            if not {n.id for n in confirm.nodes} <= set(self.verified):
                raise LaneFailure("one of them ended the lane")
            return found

    lost = []
    for seed in range(4):
        judge = Crashing()
        world = SimulatedSearch(settings(40), judge=judge)
        events, _ = world.run(random.Random(seed))
        states = [replay_events(events[:n]) for n in range(3, len(events))]
        stopped = [s for s in states if verifications(pending_actions(s)) and s.incumbent != s.seeds[0]]
        ended = [*events[: 3 + states.index(stopped[-1])], Expired(1.0)]
        _, state = world.run(random.Random(seed), ended)
        lost.append(len(state.lost_confirmations))
        assert state.evidence(state.best) == "confirmed"
        assert set(state.confirmed) <= {*judge.verified, state.seeds[0]}
    assert set(lost) == {0, 1}, "1 where the first finalist waits for its verification"


def test_a_pipe_is_told_of_the_best_once_it_is_verified() -> None:
    events, _ = SimulatedSearch(settings(40), judge=LateJudge()).run(random.Random(1))
    output, seen = Output(False), SearchState()
    output.errors = Console(file=io.StringIO(), width=200)
    best, better = 0.0, 0
    live = LiveDisplay(output)
    for event in events:
        live(apply_event(seen, event))
        score = seen.scores.get(seen.incumbent, 0.0)
        better, best = better + (score < best), min(best, score)
    assert isinstance(output.errors.file, io.StringIO)
    told = output.errors.file.getvalue().splitlines()
    assert sum("the best so far" in line for line in told) == better > 0
    assert any("verified in full: incorrect wrong at a hidden size" in line for line in told)
    assert any("is not verified in full yet)" in line for line in told if "batch" in line)


def test_the_report_calls_nothing_the_best_that_is_not_verified() -> None:
    events, _ = SimulatedSearch(settings(40), judge=LateJudge()).run(random.Random(1))
    states = [replay_events(events[:n]) for n in range(3, len(events))]
    state = next(s for s in states if verifications(pending_actions(s)) and s.incumbent != s.seeds[0])
    story = build_report(state)
    waiting = {n for n, e in story.entries.items() if e.is_unverified}
    assert waiting
    assert story.final.node not in waiting
    rows = {row.id for row in finalist_rows(story, ())}
    assert state.incumbent in rows
    assert not waiting & rows
    assert {story.entries[n].status for n in waiting} == {"not verified in full"}
    assert page(state)


# --- with threads ---


def test_nodes_are_judged_while_one_is_verified_and_one_at_a_time(tmp_path: Path) -> None:
    under_way, most = 0, 0
    judged, lock = [0], threading.Condition()

    class Overlapping(LateJudge):
        def judge(self, job: NodeJob) -> NodeResult:
            with lock:
                judged[0] += 1
                lock.notify_all()
            return super().judge(job)

        def verify(self, job: VerificationJob) -> FullVerification:
            nonlocal under_way, most
            with lock:
                under_way += 1
                most = max(most, under_way)
                wanted = min(40, judged[0] + 12)  # more than a batch holds
                assert lock.wait_for(lambda: judged[0] >= wanted, 60), "a batch waited for it"
                under_way -= 1
            return super().verify(job)

    state = run_search(tmp_path, settings(40), make_judge=lambda _: Overlapping(), lanes=3)
    assert state.spent.measurements == 40
    assert most == 1
    assert state.verifications
    again = replay_events(read_log(tmp_path / "log.jsonl"))
    assert (again.best, again.scores) == (state.best, state.scores)


class HangingJudge(LateJudge):
    """Verifies until it is given up."""

    def __init__(self, given_up: threading.Event) -> None:
        super().__init__()
        self.given_up = given_up

    def wait(self) -> NoReturn:
        assert self.given_up.wait(60)
        raise LaneFailure("given up")

    def verify(self, job: VerificationJob) -> FullVerification:
        self.wait()

    def give_up(self) -> None:
        self.given_up.set()


def test_the_end_of_the_time_gives_up_a_verification_and_confirms_what_waited_for_it(tmp_path: Path) -> None:
    given_up = threading.Event()

    class Slow(HangingJudge):
        def judge(self, job: NodeJob) -> NodeResult:
            return super().judge(job) if job.batch <= 3 else self.wait()

        def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
            assert given_up.is_set()
            return super().confirm(confirm)

    limit = replace(settings(10_000), budget=SearchBudget(10_000, wall_seconds=2.0))
    judges = [Slow(given_up), Slow(given_up)]
    state = run_search(tmp_path, limit, make_judge=lambda number: judges[number])
    events = read_log(tmp_path / "log.jsonl")
    assert state.expired is not None
    late = events[next(n for n, e in enumerate(events) if isinstance(e, Expired)) + 1 :]
    assert not any(isinstance(e, Finished | Verified | Lost) for e in late)
    assert state.confirmed
    assert state.evidence(state.best) == "confirmed"
    assert not state.verifications
