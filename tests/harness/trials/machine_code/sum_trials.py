"""A target whose nodes add two vectors: what judges launch of it, with written sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.lib.machine_code.sums import COUNT, SumCall
from forecast_harness.clocks.compilation.requests import BuildRequest
from forecast_harness.clocks.records import Program
from forecast_harness.records import Node, NodeJob
from forecast_harness.trials.machine_code.targets import TrialCalls, TrialConfig
from tests.harness.trials.machine_code.written_sources import SMALL

LARGE = {"large": COUNT}


class SumTrials:
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

    def configs(
        self, job: NodeJob, check: Callable[[], None] = lambda: None
    ) -> tuple[Sequence[TrialConfig], str]:
        return [{"num_warps": w} for w in self.warps][: job.trials], ""

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        cases = tuple(c.arguments for c in (self.calls.small, *self.calls.timed.values()))
        return BuildRequest(node.id, node.source, "run", cases, options=dict(config))

    def sealed(self, program: Program) -> Program:
        return program

    def implausible(self, workload: str, seconds: float) -> str:
        return "faster than memory" if seconds < 3e-6 else ""

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        self.learnt.append((job.node.id, len(timed)))
        self.timed[job.node.id] = timed

    def close(self) -> None:
        """Nothing is held."""
