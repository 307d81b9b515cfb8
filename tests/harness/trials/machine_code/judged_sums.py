"""Judges over the driver without a device, whose nodes add two vectors, with builders and hosts of tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lib.machine_code import fake_code as code
from benchmarks.lib.machine_code.fake_code import addition, honest
from benchmarks.lib.machine_code.sums import COUNT, SumCall
from forecast_autotune.records import Outcome
from forecast_autotune.variants.records import Origin, Provenance
from forecast_harness.clocks.compilation.workers import BuildRequest, BuildResult
from forecast_harness.clocks.runner.client import RunnerClient
from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    Node,
    NodeJob,
    NodeResult,
    SearchTarget,
    TargetKind,
    VerificationJob,
)
from forecast_harness.trials.machine_code.judge import MachineCodeJudge
from forecast_harness.trials.machine_code.targets import TargetTrials, TrialCalls, TrialConfig

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


LARGE = {"large": COUNT}


class SumTrials(TargetTrials):
    """Sources as `WrittenBuilder` takes them; `warps` are those of their configs."""

    language = "triton"

    def __init__(self, warps: Sequence[int] = (4,), sizes: Mapping[str, int] | None = None) -> None:
        """`sizes`: elements of the timed calls."""
        timed = {name: SumCall(n, size) for n, (name, size) in enumerate((sizes or LARGE).items(), 2)}
        self.calls = TrialCalls(SumCall(1, SMALL), timed)
        self.warps = warps
        self.learnt: list[tuple[str, int]] = []
        self.timed: dict[str, Sequence[tuple[TrialConfig, Sequence[float]]]] = {}
        """Of the latest job of a node."""

    def configs(self, job: NodeJob, check: Callable[[], None] = lambda: None) -> Sequence[TrialConfig]:
        return [{"num_warps": w} for w in self.warps][: job.trials]

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        cases = tuple(c.arguments for c in (self.calls.small, *self.calls.timed.values()))
        return BuildRequest(node.id, node.source, "run", cases, options=dict(config))

    def implausible(self, workload: str, seconds: float) -> str:
        return "faster than memory" if seconds < 3e-6 else ""

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        self.learnt.append((job.node.id, len(timed)))
        self.timed[job.node.id] = timed


SMALL = 64
"""Elements of the call that is checked."""


class QuickBuilds:
    """The part of `CompileWorkers` that ends what takes long."""

    def give_up(self, after_s: float = 0.0) -> None:
        """Nothing takes long."""

    def seconds_of(self, building: Future[BuildResult]) -> float:
        return 0.0

    def end(self, building: Future[BuildResult]) -> bool:
        return building.cancel()


class WrittenBuilder(QuickBuilds):
    """Compiles sources such as `honest 50000`: what the kernel does, and ns that it takes at 4 warps."""

    count = 2

    def __init__(self) -> None:
        self.counts: list[tuple[str, int, list[int]]] = []
        """Candidate, warps, and the elements of the calls that it was compiled for."""
        self._pool = ThreadPoolExecutor(2)

    @property
    def idle(self) -> int:
        return 0

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        return self._pool.submit(self._build, request)

    def close(self) -> None:
        self._pool.shutdown()

    def _build(self, request: BuildRequest) -> BuildResult:
        warps = int(request.options.get("num_warps", 4))
        kind, _, cost = request.source.partition(" ")
        if kind == "broken":
            return BuildResult(request, error="CompilationError: no such name")
        if kind == "odd":
            return BuildResult(request, error="RuntimeError: no such device")
        if kind == "host":
            return BuildResult(request, host_code="torch.mm computes on data")
        if kind == "lost":
            return BuildResult(request, infrastructure="the server was lost")
        ns = int(cost or 50_000) * 4 // warps
        counts = [case.tensors["x"].shape[0] for case in request.cases]
        self.counts.append((request.candidate, warps, counts))
        results = [(_operations(kind, ns, warps, count), count) for count in counts]
        return BuildResult(request, tuple(addition(request.candidate, *case) for case in results))


def _operations(kind: str, ns: int, warps: int, count: int) -> list[code.Operation]:
    wrong = [code.copy((2, 0), (0, 0), 4 * SMALL), code.spend(ns)]
    if kind == "wrong" or (kind == "late" and count > SMALL):
        return wrong
    if kind == "faulty" or (kind == "wide" and warps != 4):
        return [code.fail(700)]
    # One program for large calls and another one for all others, as where a kernel is specialised.
    if kind == "narrow" and count < COUNT and warps == 16:
        return wrong
    return honest(ns + 1 if kind in ("special", "narrow") and count < COUNT else ns)


class NotingHost:
    """Stands for the judge of host code: notes what it is asked."""

    def __init__(self, wrong: Mapping[str, str]) -> None:
        self.asked: list[str] = []
        self.verified: list[str] = []
        self.closed = self.prepared = False
        self._wrong = wrong

    def judge(self, job: NodeJob) -> NodeResult:
        self.asked.append(job.node.id)
        return NodeResult(Outcome.OK, log2_ratio=0.5, stage="time")

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        self.asked += [n.id for n in confirm.nodes]
        return {n.id: NodeResult(Outcome.OK, log2_ratio=0.0, stage="confirm") for n in confirm.nodes}

    def verify(self, job: VerificationJob) -> FullVerification:
        self.verified.append(job.node.id)
        wrong = self._wrong.get(job.node.id, "")
        return FullVerification(Outcome.INCORRECT if wrong else Outcome.OK, wrong, {"launches": 9})

    def prepare_confirmation(self) -> None:
        self.prepared = True

    def give_up(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        self.closed = True


class ReadyHost:
    """Opens a host that is there already."""

    def __init__(self, host: NotingHost) -> None:
        self._host = host

    def __call__(self) -> NotingHost:
        return self._host

    def give_up(self) -> None:
        """Nothing is under way."""
