"""A target whose nodes add two vectors: what judges launch of it, with written sources."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.lib.machine_code.sums import SumCall
from forecast_harness.machine_code.compilation.build_requests import BuildRequest
from forecast_harness.machine_code.records import Program
from forecast_harness.machine_code.trials.target_trials import TrialCalls, TrialConfig
from forecast_harness.search.history.events import NodeJob
from forecast_harness.search.records import Node
from tests.harness.machine_code.written_sources import SMALL


class SumTrials:
    """Sources as `WrittenBuilder` takes them; `warps` are those of their configs."""

    language = "triton"

    def __init__(self, warps: Sequence[int] = (4,)) -> None:
        self.calls = TrialCalls(SumCall(1, SMALL), {"large": SumCall(2)})
        self.warps = warps
        self.learnt: list[tuple[str, int]] = []

    def configs(
        self, job: NodeJob, check: Callable[[], None] = lambda: None
    ) -> tuple[Sequence[TrialConfig], str]:
        return [{"num_warps": w} for w in self.warps][: job.trials], ""

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        return BuildRequest(node.id, node.source, "run", (), options=dict(config))

    def sealed(self, program: Program) -> Program:
        return program

    def implausible(self, workload: str, seconds: float) -> str:
        return "faster than memory" if seconds < 3e-6 else ""

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        self.learnt.append((job.node.id, len(timed)))

    def close(self) -> None:
        """Nothing is held."""
