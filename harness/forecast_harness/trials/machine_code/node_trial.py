"""One node on its way through a judge of machine code, and what ends it early."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.records import Outcome
from forecast_harness.clocks.records import Program
from forecast_harness.records import NodeJob, NodeResult
from forecast_harness.trials.judging.lane_judge import truncated_feedback
from forecast_harness.trials.machine_code.target_trials import TrialConfig

_FAR_BETTER = 1.08
"""Times as fast as the source's best config: no config is expected to be that at some calls and slower at others."""


class NodeRefused(Exception):
    """A node's own failure; `outcome` is its label."""

    def __init__(
        self, outcome: Outcome, stage: str, detail: str, facts: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(detail)
        self.outcome, self.stage, self.detail, self.facts = outcome, stage, detail, dict(facts or {})

    def result(self, device: str, path: str) -> NodeResult:
        """What is said of the node."""
        return NodeResult(
            self.outcome,
            measurements=1,
            device=device,
            stage=self.stage,
            feedback=truncated_feedback(self.detail),
            facts={**self.facts, "path": path},
        )


class NoMachineCode(Exception):
    """A node that is to be judged as host code; the text says why."""


class PathFailed(Exception):
    """A failure of our own: nothing is known of the node; the text says what failed."""


@dataclass(frozen=True)
class RaceResult:
    """A config beside the rival."""

    log2_ratio: float
    """Of its time over the rival's."""
    error: float
    """Standard error of `log2_ratio`."""
    seconds: Mapping[str, float]
    """By workload."""
    theirs: Mapping[str, float]
    """The rival's."""
    blocks: int


@dataclass
class NodeTrial:
    """One job on its way."""

    job: NodeJob
    configs: Sequence[TrialConfig]
    note: str
    rivals: Mapping[str, Program]
    rival_s: Mapping[str, float]
    seconds: dict[int, dict[str, float]] = field(default_factory=dict)
    """By config and workload, of configs that were timed at all of them."""
    partly: dict[int, dict[str, float]] = field(default_factory=dict)
    """Of configs that were timed at some."""
    programs: dict[int, dict[str, Program]] = field(default_factory=dict)
    """By config and workload."""
    usual_s: float | None = None
    """The longest that a config took to compile which runs."""
    late: int = 0
    """Configs that took too long to compile."""

    def add(
        self, number: int, programs: Mapping[str, Program], seconds: Mapping[str, float], *, is_whole: bool
    ) -> None:
        """What was timed of a config; `is_whole`: nothing more of it will be."""
        self.programs[number] = {**self.programs.get(number, {}), **programs}
        known = {**self.partly.pop(number, {}), **seconds}
        (self.seconds if is_whole else self.partly)[number] = known

    @property
    def tried(self) -> int:
        """Configs that were timed at all, or at some calls."""
        return len(self.seconds) + len(self.partly)

    def is_behind(self, number: int) -> bool:
        """Whether a config that is timed in part could be the fastest only where it is far better at all other calls
        than the best of those that are timed in full."""
        if number not in self.partly or not self.seconds:
            return False
        known, best = self.partly[number], self.seconds[self.best]
        behind = sum(math.log(s / best[name]) for name, s in known.items())
        return behind > (len(self.rivals) - len(known)) * math.log(_FAR_BETTER)

    def log_ratio(self, number: int) -> float:
        """Mean over workloads of the natural log of a config's seconds over the rival's."""
        return statistics.fmean(math.log(s / self.rival_s[n]) for n, s in self.seconds[number].items())

    @property
    def best(self) -> int:
        """The fastest config so far."""
        return min(self.seconds, key=self.log_ratio)

    def result(self, found: RaceResult, text: str, facts: Mapping[str, Any], device: str) -> NodeResult:
        """What is said of the node, by its fastest config's race; `text` is for people."""
        config = dict(self.configs[self.best])
        if config:
            text += f" Its best config is {config}."
        ranked = [
            {"config": dict(self.configs[n]), "log2_ratio": self.log_ratio(n) / math.log(2)}
            for n in self.seconds
        ]
        return NodeResult(
            Outcome.OK,
            log2_ratio=found.log2_ratio,
            sd=found.error,
            seconds=dict(found.seconds),
            config=config,
            measurements=self.tried,
            device=device,
            stage="time",
            feedback=truncated_feedback(f"{text} {self.note}"),
            facts={**facts, "configs": ranked},
        )
