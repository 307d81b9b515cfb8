"""What is launched of a target, and by whom it is compiled: what judges of machine code are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from forecast_autotune.records import Outcome
from forecast_harness.clocks.compilation.requests import BuildRequest, BuildResult, CallCase
from forecast_harness.clocks.compilation.workers import LONG_S
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner.messages import ObservedLaunch, ProgramInputs, RunnerFaultKind, Violation
from forecast_harness.records import Node, NodeJob
from forecast_harness.sandbox.jobs import JobResult, ResourceLimits, SandboxJob

TrialConfig = Mapping[str, Any]
"""A config of a source as results name it: constants of a pack's source, or a `Config` as JSON."""

FAULT_OUTCOMES = {
    RunnerFaultKind.HANG: Outcome.TIMEOUT,
    RunnerFaultKind.DEVICE_ERROR: Outcome.RUNTIME_ERROR,
    RunnerFaultKind.CRASH: Outcome.RUNTIME_ERROR,
    RunnerFaultKind.REFUSED: Outcome.OUT_OF_RESOURCES,
}
"""The label of a program that did this."""


def first_violation(violations: Sequence[Violation]) -> str:
    """The first thing that a right program does not do, in words; '' for none."""
    return f"{violations[0].rule}: {violations[0].detail}" if violations else ""


class SourceBuilder(Protocol):
    """Compiles, as `CompileWorkers` does."""

    count: int

    @property
    def idle(self) -> int:
        """Workers that nobody has asked for."""

    def submit(self, request: BuildRequest) -> Future[BuildResult]:
        """Compile on the next free worker."""

    def seconds_of(self, building: Future[BuildResult]) -> float:
        """For how long a compilation has been under way, see `CompileWorkers`; 0 before, and once it has ended."""

    def end(self, building: Future[BuildResult]) -> bool:
        """End a compilation that nobody waits for any more; whether it ends."""

    def give_up(self, after_s: float = LONG_S) -> None:
        """End what has taken so many seconds already: nobody waits for it any more."""

    def run_jobs(self, jobs: Sequence[SandboxJob], limits: ResourceLimits) -> list[JobResult]:
        """Do other jobs in the workers' sandboxes, ahead of requests that wait."""


class TrialCall(Protocol):
    """A call with known outputs, as `PreparedCall` is."""

    @property
    def arguments(self) -> CallCase:
        """What is compiled for."""

    @property
    def given(self) -> ProgramInputs:
        """What is launched on."""

    def wrong(self, program: Program, launches: Sequence[ObservedLaunch]) -> str:
        """What is wrong with these outputs; '' for nothing."""


@dataclass(frozen=True)
class TrialCalls:
    """The calls of a target: `small` is checked, `timed` ones, by workload, are raced."""

    small: TrialCall
    timed: Mapping[str, TrialCall]


class TargetTrials(Protocol):
    """What is launched of one target. Called from many threads."""

    language: str
    """Of the sources that are compiled to machine code."""

    @property
    def calls(self) -> TrialCalls:
        """On what its nodes are launched."""

    def configs(
        self, job: NodeJob, check: Callable[[], None] = lambda: None
    ) -> tuple[Sequence[TrialConfig], str]:
        """Configs of a node to time, at most `job.trials`, and a remark. `check` raises once nobody waits for them.

        The first is the one that suits `job.against`, or the source as it stands; the second the one that is
        forecast to be the fastest.
        """

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        """How a node is compiled: for the small call, then for the timed ones."""

    def sealed(self, program: Program) -> Program:
        """A program with what its cell may not decide, such as which buffers are its outputs."""

    def implausible(self, workload: str, seconds: float) -> str:
        """Why one launch of a workload cannot have taken so few seconds; '' if it can."""

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        """Heed what was timed: seconds by workload, of configs of the node, and of the rival; NaN where a config was
        not timed."""

    def close(self) -> None:
        """End what forecasts."""
