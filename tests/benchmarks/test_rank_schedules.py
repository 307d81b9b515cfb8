"""Random schedules of ranks that tune together, and that the check of their rules finds what is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.fleet.rank_schedules import one_schedule
from benchmarks.lib.ranks.simulated_job import (
    RULES,
    Attempt,
    Hazards,
    SimulatedJob,
    SimulatedRun,
    broken_rules,
    longest_wait,
    small_problem,
)
from benchmarks.lib.ranks.virtual_time import VirtualProcess, VirtualTime
from forecast_autotune.ranks.board import Board
from forecast_autotune.ranks.job import JobLimits
from forecast_autotune.records import Decision
from forecast_autotune.settings import Mode

LIMITS = JobLimits()
TABLE = small_problem(0)
CALM = Hazards(kills=0, missing=0, late_s=0.01, slow_answers=0, slow_candidates=0)
ONE, TWO = list(TABLE.by_candidate())[:2]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(1000, 1024))
def test_ranks_keep_the_rules_whatever_happens(seed: int) -> None:
    found = one_schedule(8, seed)
    assert {name: found[name] for name in RULES} == dict.fromkeys(RULES, 0)
    assert found["decisions"] >= found["problems"]


def test_many_ranks_keep_the_rules() -> None:
    found = one_schedule(64, 1001)
    assert {name: found[name] for name in RULES} == dict.fromkeys(RULES, 0)
    assert found["without_measuring"] > found["decisions"] / 2


def test_a_schedule_goes_the_same_way_again() -> None:
    assert one_schedule(8, 1000) == one_schedule(8, 1000) != one_schedule(8, 1001)


@pytest.mark.parametrize("mode", [Mode.TUNE, Mode.EXHAUSTIVE])
def test_without_hazards_every_candidate_is_timed_at_most_once_and_all_ranks_finish(mode: Mode) -> None:
    run = SimulatedJob(4, 0, problems=[TABLE], hazards=CALM, mode=mode).simulate()
    assert len({a.decision.chosen for a in run.attempts if a.decision is not None}) == 1
    assert all(a.decision is not None for a in run.attempts)
    timed = [candidate for _, _, _, candidate in run.timed]
    assert len(timed) == len(set(timed))
    if mode is Mode.EXHAUSTIVE:
        assert set(timed) == set(TABLE.by_candidate())
        assert max(a.measured for a in run.attempts) < len(timed), "they share"
        assert run.seconds < 12 * 0.53, "less than one rank takes with one worker"


def test_claims_that_are_not_heard_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Board, "claimed_elsewhere", lambda self: {})
    monkeypatch.setattr(Board, "_known_ids", lambda self, listed: [])
    monkeypatch.setattr(Board, "claimed_here", lambda self: list(self.candidates))
    run = SimulatedJob(3, 0, problems=[TABLE], hazards=CALM, mode=Mode.EXHAUSTIVE).simulate()
    assert broken_rules(run, LIMITS)["repeated"] > 0


def attempt(rank: int, **fields: object) -> Attempt:
    return replace(Attempt(rank, TABLE.problem.id, 0.0), **fields)  # type: ignore[arg-type]


def test_a_second_measurement_is_a_fault_unless_the_first_rank_died_before() -> None:
    timed = [(1.0, 0, TABLE.problem.id, ONE), (2.0, 1, TABLE.problem.id, ONE), (3.0, 0, "another", ONE)]
    assert broken_rules(SimulatedRun(timed=timed), LIMITS)["repeated"] == 1
    assert broken_rules(SimulatedRun(timed=timed, killed_at={0: 2.5}), LIMITS)["repeated"] == 1
    found = broken_rules(SimulatedRun(timed=timed, killed_at={0: 1.5}), LIMITS)
    assert (found["repeated"], found["taken_over"]) == (0, 1)


def test_another_choice_is_a_fault() -> None:
    (decision,) = {a.decision for a in SimulatedJob(1, 0, problems=[TABLE], hazards=CALM).simulate().attempts}
    assert isinstance(decision, Decision)
    other = replace(decision, chosen=ONE if decision.chosen != ONE else TWO)
    alike = [attempt(0, decision=decision, end=1.0), attempt(1, decision=decision, end=1.0)]
    assert broken_rules(SimulatedRun(attempts=alike), LIMITS)["disagreed"] == 0
    apart = [*alike, attempt(2, decision=other, end=1.0)]
    assert broken_rules(SimulatedRun(attempts=apart), LIMITS)["disagreed"] == 1


def test_a_wait_counts_from_the_latest_work_or_news() -> None:
    row = f'{{"row": {{"problem": "{TABLE.problem.id}"}}}}'
    one = attempt(0, end=100.0, busy=[(10.0, 20.0)])
    assert longest_wait(one, SimulatedRun()) == 80.0
    assert broken_rules(SimulatedRun(attempts=[one]), LIMITS)["overdue"] == 1
    heard = SimulatedRun(attempts=[one], entries=[(70.0, row), (90.0, '{"claim": []}')])
    assert longest_wait(one, heard) == 50.0
    assert broken_rules(heard, LIMITS)["overdue"] == 0
    slow = attempt(0, end=100.0, busy=[(10.0, 20.0)], slow_answers=[(5.0, 15.0), (30.0, 55.0)])
    assert longest_wait(slow, SimulatedRun()) == 55.0


def test_virtual_processes_take_turns_in_the_order_of_their_times_and_can_be_killed() -> None:
    time, seen = VirtualTime(), list[tuple[str, float]]()
    first, second = VirtualProcess(), VirtualProcess()

    def work(name: str, pause: float) -> None:
        try:
            for _ in range(3):
                time.sleep(pause)
                seen.append((name, time.now()))
        finally:
            seen.append((f"{name} ends", time.now()))

    time.start(first, lambda: work("first", 2.0), 0.0)
    time.start(second, lambda: work("second", 3.0), 0.5)
    time.call_at(5.0, lambda: time.kill(second))
    time.run()
    assert seen == [
        *[("first", 2.0), ("second", 3.5), ("first", 4.0), ("second ends", 5.0)],
        *[("first", 6.0), ("first ends", 6.0)],
    ]


def test_an_error_in_a_process_ends_the_simulation() -> None:
    def fail() -> None:
        raise ValueError("a fault")

    time = VirtualTime()
    time.start(VirtualProcess(), fail, 0.0)
    with pytest.raises(ValueError, match="a fault"):
        time.run()
