"""A judge of machine code over the driver without a device, whose nodes add two vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.records import Node, NodeJob, SearchTarget, TargetKind, VerificationJob
from forecast_harness.trials.machine_code.judge import MachineCodeJudge
from tests.harness.trials.machine_code.noting_host import NotingHost
from tests.harness.trials.machine_code.sum_trials import SumTrials
from tests.harness.trials.machine_code.written_sources import WrittenBuilder

TARGET = SearchTarget(TargetKind.PACK, "sum", "sum-1", "triton", "run", "adds")


class Judged:
    """A judge over a fake driver, and what it has asked of others."""

    def __init__(
        self,
        runner: RunnerClient,
        locks: Path,
        warps: Sequence[int] = (4,),
        sizes: Mapping[str, int] | None = None,
        **more: Any,
    ) -> None:
        self.builder, self.trials = WrittenBuilder(), SumTrials(warps, sizes)
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


def node(name: str, source: str) -> Node:
    return Node(name, source, "triton", (), Provenance(Origin.REWRITE))


SEED = node("seed", "honest 50000")


def job(name: str, source: str, against: Node = SEED) -> NodeJob:
    return NodeJob(f"job-{name}", node(name, source), against, {}, TARGET, 1, 4)


def verification(asked: NodeJob) -> VerificationJob:
    return VerificationJob(f"verify-{asked.node.id}", asked.node, {"num_warps": 4}, TARGET)
