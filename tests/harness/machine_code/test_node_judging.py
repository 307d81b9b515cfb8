"""Nodes of a search, judged through machine code by many threads at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.machine_code.compile_workers import BuildRequest, BuildResult
from forecast_harness.machine_code.node_judging import MachineCodeJudge
from forecast_harness.machine_code.runner.client import RunnerClient
from forecast_harness.sandbox.jobs import SandboxError
from forecast_harness.search.history.events import ConfirmationJob, NodeJob
from forecast_harness.search.interfaces import LaneFailure
from forecast_harness.search.judging.lane_judge import FullVerification
from forecast_harness.search.lanes.local_lanes import LocalJudgePool
from forecast_harness.search.records import Node, SearchTarget, TargetKind
from tests.harness.machine_code.noting_host import NotingHost
from tests.harness.machine_code.sum_trials import SumTrials
from tests.harness.machine_code.written_sources import WrittenBuilder

TARGET = SearchTarget(TargetKind.PACK, "sum", "sum-1", "triton", "run", "adds")


class Judged:
    """A judge over a fake driver, and what it has asked of others."""

    def __init__(self, runner: RunnerClient, locks: Path, warps: Sequence[int] = (4,), **more: Any) -> None:
        self.builder, self.trials = WrittenBuilder(), SumTrials(warps)
        self.host = NotingHost({"cheat": "wrong at a hidden size"})
        self.told: list[str] = []
        self.judge = MachineCodeJudge(
            runner,
            self.builder,
            self.trials,
            host=lambda: self.host,
            device="fake",
            on_failure=self.told.append,
            locks=locks,
            **more,
        )

    def close(self) -> None:
        self.judge.close()
        self.builder.close()


@pytest.fixture
def judged(runner: RunnerClient, tmp_path: Path) -> Iterator[Judged]:
    found = Judged(runner, tmp_path)
    yield found
    found.close()


@pytest.fixture
def tuned(runner: RunnerClient, tmp_path: Path) -> Iterator[Judged]:
    found = Judged(runner, tmp_path, (4, 8, 2, 16))
    yield found
    found.close()


def node(name: str, source: str) -> Node:
    return Node(name, source, "triton", (), Provenance(Origin.REWRITE))


SEED = node("seed", "honest 50000")


def job(name: str, source: str, against: Node = SEED) -> NodeJob:
    return NodeJob(f"job-{name}", node(name, source), against, {}, TARGET, 1, 4)


def test_a_faster_node_is_verified_in_full_and_says_by_how_much(judged: Judged) -> None:
    found = judged.judge.judge(job("fast", "honest 24000"))
    assert found.outcome is Outcome.OK
    assert found.log2_ratio == pytest.approx(-1, abs=0.1)
    assert found.seconds["large"] == pytest.approx(25e-6, rel=0.1)
    assert (found.against, found.facts["verified_in_full"], found.facts["launches"]) == ("seed", True, 9)
    assert found.device_seconds > 0
    assert judged.host.verified == ["fast"]
    assert judged.host.prepared
    assert judged.trials.learnt == [("fast", 1)]


@pytest.mark.parametrize(("cost", "ratio"), [(60_000, 0.26), (50_000, 0.0), (49_950, 0.0)])
def test_what_is_not_shown_to_be_faster_is_neither_verified_in_full_nor_called_so(
    judged: Judged, cost: int, ratio: float
) -> None:
    found = judged.judge.judge(job("other", f"honest {cost}"))
    assert found.log2_ratio is not None
    assert found.log2_ratio >= 0
    assert found.log2_ratio == pytest.approx(ratio, abs=0.03)
    assert judged.host.verified == []
    assert not found.facts["verified_in_full"]


def test_a_hopeless_source_is_given_up_after_two_configs(tuned: Judged) -> None:
    found = tuned.judge.judge(job("slow", "honest 200000"))
    assert found.log2_ratio == pytest.approx(1, abs=0.1)
    assert found.measurements == 2
    assert [w for name, w in tuned.builder.asked if name == "slow"] == [4, 8]


def test_the_best_of_all_configs_counts(tuned: Judged) -> None:
    found = tuned.judge.judge(job("many", "honest 48000"))
    assert (found.measurements, found.config) == (4, {"num_warps": 16})
    assert found.log2_ratio == pytest.approx(-2.0, abs=0.2)
    assert len(found.facts["configs"]) == 4


def test_one_config_that_fails_does_not_end_a_source(tuned: Judged) -> None:
    found = tuned.judge.judge(job("wide", "wide 40000"))
    assert (found.outcome, found.config, found.measurements) == (Outcome.OK, {"num_warps": 4}, 1)


@pytest.mark.parametrize(
    ("source", "outcome", "stage"),
    [
        ("wrong 20000", Outcome.INCORRECT, "verify"),
        ("faulty", Outcome.RUNTIME_ERROR, "verify"),
        ("broken", Outcome.COMPILE_ERROR, "compile"),
        ("honest 1000", Outcome.INFRASTRUCTURE, "time"),
    ],
)
def test_a_node_that_fails_says_at_which_stage(
    judged: Judged, source: str, outcome: Outcome, stage: str
) -> None:
    found = judged.judge.judge(job("bad", source))
    assert (found.outcome, found.stage, found.log2_ratio) == (outcome, stage, None)
    assert found.feedback
    assert judged.host.verified == []


def test_a_node_that_verification_refuses_is_not_faster(judged: Judged) -> None:
    found = judged.judge.judge(job("cheat", "honest 20000"))
    assert (found.outcome, found.log2_ratio) == (Outcome.INCORRECT, None)
    assert "hidden size" in found.feedback


@pytest.mark.parametrize(("source", "why"), [("host", "torch.mm"), ("odd", "could not be recorded")])
def test_what_is_no_machine_code_goes_to_the_other_judge(judged: Judged, source: str, why: str) -> None:
    found = judged.judge.judge(job("torch", source))
    assert found.against == "seed"
    assert found.facts["path"] == "host code"
    assert why in found.facts["path_reason"]
    assert judged.told == []  # no failure of ours
    judged.judge.confirm(ConfirmationJob((SEED,), {}, SEED, TARGET))
    assert judged.host.asked == ["torch", "seed"]
    judged.judge.close()
    assert judged.host.closed


def test_a_failure_of_our_own_has_the_node_judged_as_host_code_and_three_in_a_row_all(judged: Judged) -> None:
    found = [judged.judge.judge(job(f"lost-{n}", "lost")) for n in range(3)]
    assert [f.facts["path_reason"] for f in found] == ["the server was lost"] * 3
    assert [t.endswith("all is judged as host code") for t in judged.told] == [False, False, True]
    later = judged.judge.judge(job("fine", "honest 24000"))
    assert later.facts["path"] == "host code"
    assert judged.host.asked == ["lost-0", "lost-1", "lost-2", "fine"]


def test_a_failure_of_our_own_is_the_lanes_where_machine_code_is_insisted_on(
    runner: RunnerClient, tmp_path: Path
) -> None:
    made = Judged(runner, tmp_path, insist=True)
    try:
        with pytest.raises(LaneFailure, match="server was lost"):
            made.judge.judge(job("lost", "lost"))
        with pytest.raises(LaneFailure, match="timed beside"):
            made.judge.judge(job("any", "honest 40000", against=node("other", "broken")))
        assert made.host.asked == []
    finally:
        made.close()


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("honest 50000", ""),
        ("wrong", "wrong values"),
        ("host", "torch.mm"),
        ("honest 100", "faster than memory"),
    ],
)
def test_a_seed_shows_whether_a_target_can_be_judged_so(judged: Judged, source: str, said: str) -> None:
    found = judged.judge.try_seed(job("seed", source))
    assert found.startswith(said) if said else found == ""


def test_a_pool_of_judges_shares_one_device_and_loses_nothing(judged: Judged) -> None:
    pool = LocalJudgePool(lambda number: judged.judge, 4)
    sources = ["honest 40000", "wrong 9000", "faulty", "honest 90000", "broken", "honest 30000"]
    jobs = [job(f"node-{n}", sources[n % len(sources)]) for n in range(12)]
    try:
        found = [f.result(300) for f in [pool.submit(one) for one in jobs]]
    finally:
        pool.close()
    wanted = [
        Outcome.OK,
        Outcome.INCORRECT,
        Outcome.RUNTIME_ERROR,
        Outcome.OK,
        Outcome.COMPILE_ERROR,
        Outcome.OK,
    ]
    assert [r.outcome for r in found] == 2 * wanted
    assert set(judged.host.verified) & {"node-5", "node-11"}, "the fastest, or another that is as fast"
    for lead in (found[5], found[11]):
        assert lead.log2_ratio == pytest.approx(-0.7, abs=0.1)
    assert len(judged.host.verified) < 4, "of two that are equally fast one is verified"
    assert threading.active_count() < 50


def test_one_that_is_slower_than_what_is_verified_meanwhile_is_timed_checked_and_does_not_lead(
    judged: Judged,
) -> None:
    once, waiting = judged.host.verify_in_full, judged.judge._turns._waiting
    begun, others_wait = threading.Event(), threading.Event()

    def verify(node: Node, config: Any) -> FullVerification:
        begun.set()
        assert others_wait.wait(60)
        return once(node, config)

    judged.host.verify_in_full = verify  # type: ignore[method-assign]
    with ThreadPoolExecutor(2) as pool:
        fast = pool.submit(judged.judge.judge, job("fast", "honest 20000"))
        assert begun.wait(60)
        # While one is verified, the device is free for others.
        slower = judged.judge.judge(job("slower", "honest 90000"))
        second = pool.submit(judged.judge.judge, job("second", "honest 24000"))
        while not waiting:
            time.sleep(0.01)
        others_wait.set()
        leads, follows = fast.result(60), second.result(60)
    assert slower.outcome is Outcome.OK
    assert judged.host.verified == ["fast"]
    assert (leads.may_lead, follows.may_lead) == (True, False)
    assert follows.log2_ratio == pytest.approx(-1, abs=0.1)
    assert "Not verified in full" in follows.feedback


def test_a_wrong_value_at_the_timed_size_is_seen_without_full_verification(judged: Judged) -> None:
    judged.judge._turns.note_verified(-9.0)
    found = judged.judge.judge(job("late", "late 24000"))
    assert found.outcome is Outcome.INCORRECT
    assert judged.host.verified == []


def test_after_the_end_nothing_more_is_judged_and_a_host_judge_at_work_is_ended(judged: Judged) -> None:
    begun, ended = threading.Event(), threading.Event()

    def verify(node: Node, config: object) -> object:
        begun.set()
        ended.wait(60)
        raise LaneFailure("ended", "lane")

    judged.host.verify_in_full = verify  # type: ignore[assignment]
    judged.host.close = ended.set  # type: ignore[method-assign]
    found: list[BaseException] = []

    def ask(name: str) -> None:
        try:
            judged.judge.judge(job(name, "honest 24000"))
        except LaneFailure as failure:
            found.append(failure)

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("fast", "faster")]
    for one in threads:
        one.start()
    assert begun.wait(60)
    judged.judge.end()
    judged.judge.close()
    assert ended.is_set()
    for one in threads:
        one.join(60)
    assert {str(f) for f in found} == {"ended", "the lanes are closed"}


@pytest.mark.parametrize("error", [RecordError("breaks the contract"), SandboxError("a worker was lost")])
def test_what_cannot_be_built_is_judged_as_host_code(judged: Judged, error: Exception) -> None:
    def fail(request: object) -> object:
        raise error

    judged.builder.submit = fail  # type: ignore[assignment]
    found = judged.judge.judge(job("fast", "honest 24000"))
    assert (found.facts["path"], found.facts["path_reason"]) == ("host code", str(error))


def test_a_rival_that_was_not_built_once_is_built_again(judged: Judged) -> None:
    once = judged.builder.submit
    asked: list[str] = []

    def submit(request: BuildRequest) -> Future[BuildResult]:
        asked.append(request.candidate)
        if asked.count("seed") > 1 or request.candidate != "seed":
            return once(request)
        lost: Future[BuildResult] = Future()
        lost.set_result(BuildResult(request, infrastructure="a worker was lost"))
        return lost

    judged.builder.submit = submit  # type: ignore[method-assign]
    assert judged.judge.judge(job("fast", "honest 24000")).facts["path"] == "host code"
    assert judged.judge.judge(job("faster", "honest 20000")).facts["path"] == "machine code"
