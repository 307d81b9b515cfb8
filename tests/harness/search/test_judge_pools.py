"""Pools of judges: every job once, none lost, broken lanes kept out."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from forecast_autotune.records import Outcome
from forecast_harness.records import ConfirmationJob, VerificationJob
from forecast_harness.trials import judge_pool
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.protocol import LaneFailure, NodeJudge
from tests.harness.search.lane_judges import SEED, TARGET, ScriptedJudge, job, judged_jobs
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def soon_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_pool, "RETRY_S", 0.05)


@pytest.fixture
def table(tmp_path: Path) -> Callable[[int], NodeJudge]:
    return partial(ScriptedJudge, folder=tmp_path)


def test_finalists_are_confirmed_once(table: Callable[[int], NodeJudge], tmp_path: Path) -> None:
    request = ConfirmationJob((job("a").node, job("b").node), {"node-a": {"N": 1}}, SEED, TARGET)
    with contextlib.closing(LocalJudgePool(table, 2)) as lanes:
        assert lanes.confirm(request).result(30) == lanes.confirm(request).result(30)
        assert set(lanes.confirm(request).result(30)) == {"node-a", "node-b"}
        assert judged_jobs(tmp_path) == ["confirm"]


def test_a_verification_goes_before_what_waits(table: Callable[[int], NodeJudge], tmp_path: Path) -> None:
    lanes = LocalJudgePool(table, 1)
    request = VerificationJob("verify-a", job("a").node, {}, TARGET)
    try:
        held = lanes.submit(job("held", "hold"))
        wait_until((tmp_path / "held").exists)
        waiting = [lanes.submit(job(str(n))) for n in range(3)]
        verifying = lanes.verify(request)
        assert lanes.verify(request) is verifying
        (tmp_path / "go").touch()
        assert verifying.result(30).is_right
        assert [f.result(30).outcome for f in (held, *waiting)] == [Outcome.OK] * 4
        assert judged_jobs(tmp_path) == ["job-held", "verify-a", "job-0", "job-1", "job-2"]
    finally:
        lanes.close()


def test_what_is_given_up_is_lost_and_its_lane_stays_open(tmp_path: Path) -> None:
    results: list[ScriptedJudge] = []

    def make(number: int) -> NodeJudge:
        results.append(ScriptedJudge(number, tmp_path))
        return results[-1]

    with contextlib.closing(LocalJudgePool(make, 1)) as lanes:
        held = lanes.submit(job("held", "hold ended early"))
        wait_until((tmp_path / "held").exists)
        waiting = lanes.submit(job("waiting"))
        lanes.give_up()
        with pytest.raises(LaneFailure, match="ended early"):
            held.result(30)
        with pytest.raises(LaneFailure, match="given up"):
            waiting.result(30)
        assert lanes.submit(job("next")).result(30).outcome is Outcome.OK
        assert judged_jobs(tmp_path) == ["job-next"]
        assert len(results) == 1
        assert not results[0].closed


def test_a_lost_job_is_told_and_may_be_tried_again_in_a_fresh_lane(table: Callable[[int], NodeJudge]) -> None:
    with contextlib.closing(LocalJudgePool(table, 1)) as lanes:
        with pytest.raises(LaneFailure, match="fell off the bus") as caught:
            lanes.submit(job("flaky", "lose 1")).result(30)
        assert caught.value.lane == "table-0"
        assert lanes.submit(job("flaky", "lose 1")).result(30).outcome is Outcome.OK
        assert lanes.lanes[0].restarts == 1
        assert lanes.capacity == 1


def test_a_broken_lane_is_quarantined_and_comes_back(
    table: Callable[[int], NodeJudge], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.touch()

    def make(number: int) -> NodeJudge:
        if number == 1 and broken.exists():
            raise LaneFailure("the canary computed 3, expected 4")
        return table(number)

    with contextlib.closing(LocalJudgePool(make, 2)) as lanes:
        wait_until(lambda: lanes.capacity == 1)
        assert "canary" in lanes.lanes[1].problem
        assert {lanes.submit(job(str(n))).result(30).device for n in range(8)} == {"table-0"}
        broken.unlink()
        wait_until(lambda: lanes.capacity == 2)
        assert lanes.lanes[1].state == "ready"


def test_after_the_end_nothing_waits_for_ever(table: Callable[[int], NodeJudge]) -> None:
    before = set(threading.enumerate())
    lanes = LocalJudgePool(table, 1)
    running = lanes.submit(job("long", "sleep 0.3"))
    wait_until(lambda: running.running())
    waiting = lanes.submit(job("waiting"))
    own = set(threading.enumerate()) - before
    lanes.close()
    assert running.result(0).outcome is Outcome.OK
    assert waiting.cancelled()
    with pytest.raises(LaneFailure, match="closed"):
        lanes.submit(job("late")).result(0)
    assert own
    assert not any(thread.is_alive() for thread in own)
