"""Nodes of a search, judged through machine code by many threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest

from benchmarks.lib.machine_code.sums import SumCall
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.machine_code.node_judging import MachineCodeJudge, TrialCalls
from forecast_harness.machine_code.runner.client import RunnerClient
from forecast_harness.search.history.events import ConfirmationJob, NodeJob
from forecast_harness.search.interfaces import LaneFailure
from forecast_harness.search.lanes.local_lanes import LocalJudgePool
from forecast_harness.search.records import Node, NodeResult, SearchTarget, TargetKind
from tests.harness.machine_code.written_sources import SMALL, WrittenBuilder

TARGET = SearchTarget(TargetKind.PACK, "sum", "sum-1", "triton", "run", "adds")


class HostJudge:
    """Stands for the judge of host code: notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.closed = False

    def judge(self, job: NodeJob) -> NodeResult:
        self.asked.append(job.node.id)
        return NodeResult(Outcome.OK, log2_ratio=0.5, stage="time")

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        self.asked += [n.id for n in confirm.nodes]
        return {n.id: NodeResult(Outcome.OK, log2_ratio=0.0, stage="confirm") for n in confirm.nodes}

    def close(self) -> None:
        self.closed = True


class Judged:
    """A judge over a fake driver, and what it has asked of others."""

    def __init__(self, runner: RunnerClient, wrong: Mapping[str, str]) -> None:
        self.builder, self.host = WrittenBuilder(), HostJudge()
        self.verified: list[str] = []

        def verify(node: Node, config: object) -> str:
            self.verified.append(node.id)
            return wrong.get(node.id, "")

        self.judge = MachineCodeJudge(
            runner,
            self.builder,
            TrialCalls(SumCall(1, SMALL), {"large": SumCall(2)}),
            "run",
            verify=verify,
            host=lambda: self.host,
            device="fake",
            implausible=lambda workload, seconds: "faster than memory" if seconds < 3e-6 else "",
        )


@pytest.fixture
def judged(runner: RunnerClient) -> Iterator[Judged]:
    found = Judged(runner, {"cheat": "wrong at a hidden size"})
    yield found
    found.judge.close()
    found.builder.close()


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
    assert (found.against, found.facts["verified_in_full"]) == ("seed", True)
    assert judged.verified == ["fast"]


def test_a_slower_node_is_not_verified_in_full(judged: Judged) -> None:
    found = judged.judge.judge(job("slow", "honest 80000"))
    assert found.log2_ratio is not None
    assert found.log2_ratio > 0.5
    assert judged.verified == []
    assert not found.facts["verified_in_full"]


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
    assert judged.verified == []


def test_a_node_that_verification_refuses_is_not_faster(judged: Judged) -> None:
    found = judged.judge.judge(job("cheat", "honest 20000"))
    assert (found.outcome, found.log2_ratio) == (Outcome.INCORRECT, None)
    assert "hidden size" in found.feedback


def test_host_code_and_confirmations_go_to_the_other_judge(judged: Judged) -> None:
    assert judged.judge.judge(job("torch", "host")).against == "seed"
    judged.judge.confirm(ConfirmationJob((SEED,), {}, SEED, TARGET))
    assert judged.host.asked == ["torch", "seed"]
    judged.judge.close()
    assert judged.host.closed


def test_what_is_lost_in_our_own_doing_is_no_label(judged: Judged) -> None:
    with pytest.raises(LaneFailure, match="server was lost"):
        judged.judge.judge(job("lost", "lost"))
    with pytest.raises(LaneFailure, match="timed beside"):
        judged.judge.judge(job("any", "honest 40000", against=node("other", "broken")))


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
    assert sorted(judged.verified) == ["node-0", "node-11", "node-5", "node-6"]
    assert threading.active_count() < 50
