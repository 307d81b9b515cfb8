"""What ranks that tune together measure, wait for, decide and keep."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from forecast_autotune.errors import NoWorkingConfigError
from forecast_autotune.ranks.job import Job, JobStoreLostError, RankWarning
from forecast_autotune.records import Candidate, Decision, Evidence, Measurement, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from tests.core.ranks.small_jobs import (
    EXHAUSTIVE,
    NAMES,
    TABLE,
    ManualClock,
    MemoryKeyValueStore,
    claim,
    decide,
    problem_on,
    ranks,
)
from tests.core.tuning.loop import Bench

FASTEST = min((m for m in TABLE.measurements if m.ok), key=lambda m: m.ms).candidate


def no_device() -> Any:
    raise AssertionError("nothing is to be measured")


def test_one_rank_by_itself_decides_as_without_a_job() -> None:
    (first, _), bench = ranks(), Bench(TABLE)
    alone = decide(None)
    shared = decide(first, bench)
    assert shared.chosen == alone.chosen == FASTEST
    assert (shared.evidence, shared.measured) == (Evidence.MEASURED, len(NAMES))
    assert sorted(c.id for c in bench.asked) == sorted(c.id for c in NAMES)


def test_a_late_rank_takes_the_decision_and_measures_nothing() -> None:
    first, second = ranks()
    kept = Store(None)
    decision = decide(first)
    late = decide(second, no_device, store=kept)
    assert late.chosen == decision.chosen
    assert (late.evidence, late.measured, late.known) == (Evidence.STORED, 0, len(NAMES))
    assert "rank 0" in late.reason
    assert {m.candidate for m in kept.measurements(TABLE.problem)} == set(NAMES), "with what it rests on"
    assert kept.decision(TABLE.problem) is not None
    assert decide(None, no_device, store=kept).chosen == decision.chosen, "the next job needs no rank for it"


def test_ranks_that_share_a_directory_keep_each_measurement_once(tmp_path: Any) -> None:
    first, second = ranks()
    decide(first, store=Store(tmp_path))
    count = len(Store(tmp_path).measurements(TABLE.problem))
    decide(second, no_device, store=Store(tmp_path))
    assert len(Store(tmp_path).measurements(TABLE.problem)) == count >= len(NAMES)


def test_the_claim_of_a_dead_rank_is_taken_over() -> None:
    clock = ManualClock()
    dead, alive = ranks(clock=clock)
    assert claim(dead).acquire(60.0) is None
    bench = Bench(TABLE)
    decision = decide(alive, bench)
    assert decision.chosen == FASTEST
    assert len(bench.asked) == len(NAMES)
    limits = alive.limits
    assert limits.lease_s <= clock.now() <= limits.lease_s + 2 * limits.beat_s < limits.wait_s


class Beating(MemoryKeyValueStore):
    """Everybody who is asked after lives."""

    count = 0

    def get(self, key: str) -> str | None:
        if not key.startswith("beat/"):
            return super().get(key)
        self.count += 1
        return str(self.count)


def test_a_rank_that_measures_is_waited_for() -> None:
    clock = ManualClock()
    slow, rank = ranks(clock=clock, values=Beating())
    held = claim(slow)
    held.acquire(60.0)
    done, passed = decide(None), 0.0

    def sleep(seconds: float) -> None:
        nonlocal passed
        clock.sleep(seconds)
        if clock.now() - passed > 30:
            passed = clock.now()
            held.report_progress()
        if clock.now() > 300:
            held.conclude(done, [])

    rank.sleep = sleep
    assert decide(rank, no_device).chosen == done.chosen


def test_a_budget_of_seconds_ends_the_wait() -> None:
    clock = ManualClock()
    slow, rank = ranks(clock=clock, values=Beating())
    settings = EXHAUSTIVE.with_(max_seconds=5)
    claim(slow, settings).acquire(60.0)
    decide(rank, settings=settings)
    assert clock.now() <= 7


def test_nothing_is_waited_for_inside_another_decision() -> None:
    clock = ManualClock()
    slow, rank = ranks(clock=clock, values=Beating())
    claim(slow).acquire(60.0)
    bench = Bench(TABLE)
    decide(rank, bench, patient=False)
    assert len(bench.asked) == len(NAMES)
    assert clock.now() < 1


def test_the_first_decision_counts_and_stands_over_what_a_store_held() -> None:
    first, second = ranks()
    kept = Store(None)
    decide(None, store=kept)
    held = kept.decision(TABLE.problem)
    assert held is not None
    another = replace(held, chosen=NAMES[1])
    claim(first).conclude(another, [])
    decision = decide(second, no_device, store=kept)
    assert decision.chosen == NAMES[1]
    assert kept.decision(TABLE.problem) == another


def test_a_decision_that_comes_while_measuring_counts() -> None:
    first, second = ranks()
    done = decide(None)

    class Overtaken(Bench):
        """Another rank decides while this one measures."""

        def measure(self, *args: Any, **options: Any) -> Iterator[Measurement]:
            for m in super().measure(*args, **options):
                if len(self.asked) == 2:
                    claim(first).conclude(replace(done, chosen=NAMES[1]), [])
                yield m

    bench, kept = Overtaken(TABLE), Store(None)
    decision = decide(second, bench, store=kept)
    assert decision.chosen == NAMES[1] != FASTEST
    assert {m.candidate for m in kept.measurements(TABLE.problem)} == set(NAMES), "what it measured is kept"


@pytest.mark.parametrize(
    "change",
    [
        {"settings": EXHAUSTIVE.with_(tolerance=0.3)},
        {"settings": Settings()},
        {"table": problem_on("another GPU")},
        {"table": Table(TABLE.problem, TABLE.measurements[:-2])},
    ],
    ids=["tolerance", "mode", "device class", "candidates"],
)
def test_ranks_with_other_devices_settings_or_candidates_decide_apart(change: dict[str, Any]) -> None:
    first, second = ranks()
    decide(first)
    bench = Bench(change.get("table", TABLE))
    decision = decide(second, bench, **change)
    assert decision.measured == len(bench.asked) > 0


def test_where_all_candidates_fail_every_rank_says_so() -> None:
    failed = [Measurement(TABLE.problem.id, c, Outcome.COMPILE_ERROR) for c in NAMES]
    table = Table(TABLE.problem, failed)
    first, second = ranks()
    with pytest.raises(NoWorkingConfigError):
        decide(first, table=table)
    with pytest.raises(NoWorkingConfigError):
        decide(second, table=table)
    assert second.now() < 1, "nobody waits for a turn to find out"


class Failing(MemoryKeyValueStore):
    """A store whose server goes away after so many calls."""

    def __init__(self, calls: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = calls, error

    def get(self, key: str) -> str | None:
        self._count()
        return super().get(key)

    def set(self, key: str, value: str) -> None:
        self._count()
        super().set(key, value)

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        self._count()
        return super().compare_set(key, expected, desired)

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise self.error


@pytest.mark.parametrize("error", [JobStoreLostError("gone"), RuntimeError("a fault of ours")], ids=repr)
@pytest.mark.parametrize("calls", [*range(12), 20, 30])
def test_a_store_that_fails_costs_one_warning_and_the_sharing(calls: int, error: Exception) -> None:
    rank, _ = ranks(values=Failing(calls, error))
    other = Table(problem_on("another GPU").problem, problem_on("another GPU").measurements)
    bench = Bench(TABLE)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        decision = decide(rank, bench)
        again = decide(rank, table=other)
    assert decision.chosen == FASTEST
    assert len(bench.asked) == len(set(bench.asked)) == len(NAMES)
    assert again.measured == len(NAMES)
    assert [w.category for w in seen] == [RankWarning]
    assert "tunes by itself" in str(seen[0].message)


def result_key(job: Job) -> str:
    """Where the problem's decision is."""
    return claim(job)._result


GOOD_ROW = TABLE.measurements[0].to_json()


def rows(*listed: Any) -> str:
    return json.dumps({"rank": 7, "decision": None, "rows": listed})


NONSENSE = {
    "no JSON": "{",
    "no object": "[1]",
    "empty": "{}",
    "NaN": '{"rank": 7, "decision": null, "rows": [{"median_ms": NaN}]}',
    "deep": "[" * 20000,
    "huge": json.dumps({"rank": 7, "decision": None, "rows": ["0" * (1 << 24)]}),
    "rows are no list": json.dumps({"rank": 7, "decision": None, "rows": 7}),
    "row of another problem": rows({**GOOD_ROW, "problem": "another"}),
    "row of no candidate": rows({**GOOD_ROW, "variant": "unheard of"}),
    "negative time": rows({**GOOD_ROW, "median_ms": -1.0}),
    "fault as a row": rows(Measurement(TABLE.problem.id, NAMES[0], Outcome.INFRASTRUCTURE).to_json()),
    "row that is a text": rows("fast"),
    "decision of nothing": json.dumps({"rank": 7, "decision": {}, "rows": []}),
    "a number that no store holds": rows({**GOOD_ROW, "note": 10**400}),
    "a row that is deep": rows({**GOOD_ROW, "note": json.loads("[" * 90 + "]" * 90)}),
}


@pytest.mark.parametrize("text", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_from_another_rank_costs_one_warning(text: str) -> None:
    values = MemoryKeyValueStore()
    rank, _ = ranks(values=values)
    values.set(result_key(rank), text)
    bench = Bench(TABLE)
    with pytest.warns(RankWarning) as seen:
        decision = decide(rank, bench)
    assert len(seen) == 1
    assert decision.chosen == FASTEST
    assert len(bench.asked) == len(NAMES)


def decision_for(candidate: Candidate, problem: str = TABLE.problem.id) -> Decision:
    return replace(decide(None), chosen=candidate, problem=problem)


@pytest.mark.parametrize(
    "bad",
    [
        decision_for(NAMES[0], "another"),
        decision_for(replace(NAMES[0], variant="unheard of")),
        decision_for(TABLE.measurements[-1].candidate),
    ],
    ids=["another problem", "no candidate", "one that failed"],
)
def test_a_decision_that_cannot_be_is_not_taken(bad: Decision) -> None:
    values = MemoryKeyValueStore()
    rank, _ = ranks(values=values)
    failed = TABLE.measurements[-1]
    assert not failed.ok
    result = {"rank": 7, "decision": bad.to_json(), "rows": [failed.to_json()]}
    values.set(result_key(rank), json.dumps(result))
    with pytest.warns(RankWarning):
        assert decide(rank).chosen == FASTEST


def test_a_rank_beats_while_it_decides_and_not_after() -> None:
    beating: list[str] = []

    class Watched(MemoryKeyValueStore):
        def beating(self, key: str) -> Any:
            beating.append(key)
            return super().beating(key)

    rank, _ = ranks(values=Watched())
    decide(rank)
    assert beating == [claim(rank).beat_key]
    decide(rank, no_device)
    assert beating == [claim(rank).beat_key], "a decision that is there needs no sign of life"
