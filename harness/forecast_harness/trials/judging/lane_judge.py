"""What judges of packs and of kernels share: a sandbox lane, and how verdicts and times become `NodeResult`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from forecast_autotune.records import Outcome
from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT
from forecast_harness.records import NodeResult
from forecast_harness.sandbox import canary
from forecast_harness.sandbox.api import JobStatus, SandboxLane
from forecast_harness.sandbox.api import SandboxJob as Asked
from forecast_harness.sandbox.lane_pools import Closable, close_lanes
from forecast_harness.trials.judging.devices import device_slug
from forecast_harness.trials.judging.early_opener import EarlyOpener
from forecast_harness.trials.judging.races.rules import log2_ratio
from forecast_harness.trials.protocol import LaneFailure, NodeJudge
from forecast_harness.verify.lane_modules import LANE_MODULES
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import harness_hash
from forecast_harness.verify.verdict import Judgement, Reason, SolutionVerdict

_MAX_FEEDBACK_CHARS = 1500
COMPILE_ERRORS = re.compile(
    r"\b(SyntaxError|IndentationError|ImportError|ModuleNotFoundError|CompilationError|OutOfResources|"
    r"CompileTimeAssertionFailure|UnsupportedLanguageConstruct|AttributeError: module 'candidate')"
)
"""What a source that never came to run fails with."""


class HostJudge(NodeJudge, Protocol):
    """Judges nodes as host code, in a sandbox, as `PackJudge` and `KernelJudge` do."""

    def prepare_confirmation(self) -> None:
        """Open what a confirmation needs in the background."""


class SandboxNodeJudge:
    """A sandbox lane, and what it says of nodes. Use from one thread at a time."""

    device_environment: ClassVar[Mapping[str, str]] = {}
    """Of a lane's processes, where they have a device."""

    def __init__(self, plan: VerificationPlan, folder: Path, number: int) -> None:
        """Raises `LaneFailure` if the lane's canary does not sing."""
        self._plan, self._folder = plan, folder
        self.name = plan.uuid or f"{plan.device}-{number}"
        self._device = plan.uuid or device_slug(plan.device, plan.index)
        self._next_lane: EarlyOpener[SandboxLane] | None = None
        self._lane = self._open_lane()

    def give_up(self) -> None:
        """End the job in the lane, if there is one: who waits for it gets a `LaneFailure`. From any thread."""
        self._lane.give_up()

    def close(self) -> None:
        """End all processes, side by side: those on a device take seconds to leave it."""
        close_lanes(self._to_close())

    def _to_close(self) -> list[Closable]:
        return [self._lane, *([] if self._next_lane is None else [self._next_lane])]

    def prepare_confirmation(self) -> None:
        """Open a fresh lane in the background: a confirmation will ask for one."""
        if self._next_lane is None:
            self._next_lane = EarlyOpener(self._open_lane)

    def _fresh_lane(self) -> SandboxLane:
        """A lane that no candidate has run in. Raises `LaneFailure`."""
        return self._open_lane() if self._next_lane is None else self._next_lane()

    def _open_lane(self) -> SandboxLane:
        """A fresh lane whose canary sang. Raises `LaneFailure`."""
        environment = {"TRITON_INTERPRET": "1"} if self._plan.device == "cpu" else self.device_environment
        device = None if self._plan.device == "cpu" else self._plan.uuid or str(self._plan.index)
        lane = SandboxLane(device=device, scratch=self._folder, environment=environment, warm=LANE_MODULES)
        lane.__enter__()
        result = lane.run(Asked(f"{canary.__name__}:main", {"device": device}), canary.CANARY_LIMITS)
        if result.status is JobStatus.OK and result.value == "ok":
            return lane
        lane.close()
        raise LaneFailure(f"the canary: {result.value or result.detail}", self.name)

    def _refused_result(
        self,
        reasons: Sequence[Reason],
        verdict: SolutionVerdict,
        spent: float,
        note: str = "",
        timed: int = 0,
    ) -> NodeResult:
        """A node that has no time, for these reasons. Raises `LaneFailure` where the harness is to blame."""
        if overall_judgement(reasons) is Judgement.INFRASTRUCTURE:
            raise LaneFailure(reasons_text(reasons), self.name)
        stage = "time" if timed else "verify"
        if not timed and verdict.trials == 0 and COMPILE_ERRORS.search(reasons[0].detail):
            stage = "compile"
        return NodeResult(
            replace(verdict, reasons=tuple(reasons)).outcome,
            measurements=max(1, timed),
            device_seconds=spent,
            device=self._device,
            stage=stage,
            feedback=truncated_feedback(f"{reasons_text(reasons)} {note}"),
            facts={**self._result_facts(verdict), "codes": sorted({str(r.code) for r in reasons})},
        )

    def _measured_result(
        self,
        value: Mapping[str, Any],
        configs: Sequence[Mapping[str, Any]],
        verdict: SolutionVerdict,
        timed: int,
        spent: float,
        note: str = "",
        *,
        stage: str = "time",
        more: Mapping[str, Any] | None = None,
    ) -> NodeResult:
        """A node that won its race, or ran alone. `value` is a timing job's, `configs` what it raced."""
        ratio, error = log2_ratio(value["differences"])
        seconds, theirs = (seconds_of_side(value, side) for side in (CANDIDATE, INCUMBENT))
        each = [f"{n} {1e6 * s:.1f} us against {1e6 * theirs[n]:.1f} us" for n, s in seconds.items()]
        word = "slower" if ratio > 0 else "faster"
        text = f"Right, and {2 ** abs(ratio):.3f} times {word}: {'; '.join(each)}."
        config = dict(configs[value["winner"]])
        if config:
            text += f" Its best config is {config}."
        ranked = [
            {"config": dict(configs[int(n)]), "log2_ratio": log2_ratio([d])[0]}
            for n, d in value["ranking"].items()
        ]
        facts = {"blocks": len(value["differences"]), "ended": value["ended"], "checks": value["checks"]}
        return NodeResult(
            Outcome.OK,
            log2_ratio=ratio,
            sd=error,
            seconds=seconds,
            config=config,
            measurements=timed,
            device_seconds=spent,
            device=self._device,
            stage=stage,
            feedback=truncated_feedback(f"{text} {note}"),
            facts={**self._result_facts(verdict), **facts, "configs": ranked, **(more or {})},
        )

    def _result_facts(self, verdict: SolutionVerdict) -> dict[str, Any]:
        """What may be shown to a proposer: never the seed."""
        return {
            "harness": harness_hash(),
            "launches": verdict.trials,
            "checked": verdict.checked.to_json(),
            "error_over_limit": verdict.facts.get("error_over_limit"),
            "hints": list(verdict.hints),
            "level": self._lane.level.name.lower(),
        }


def reasons_from_json(listed: Sequence[Mapping[str, str]]) -> tuple[Reason, ...]:
    """Reasons from their JSON."""
    return tuple(Reason.from_json(r) for r in listed)


def overall_judgement(reasons: Sequence[Reason]) -> Judgement:
    """What these findings amount to, as `SolutionVerdict.judgement` has it."""
    return SolutionVerdict("", "", tuple(reasons)).judgement


def reasons_text(reasons: Sequence[Reason]) -> str:
    """Reasons as sentences, without the number of the trial, which says how seeds were drawn."""
    return "; ".join(f"{r.code}: {r.detail}" for r in reasons)


def seconds_of_side(value: Mapping[str, Any], side: int) -> dict[str, float]:
    """A timing job's seconds of one side, by what was timed."""
    mine = f"{side}:"
    return {n.removeprefix(mine): s for n, s in value["seconds"].items() if n.startswith(mine)}


def seed_beside(one: NodeResult) -> NodeResult | None:
    """What a contest with a finalist tells of the seed, if there was one."""
    if not (seconds := one.facts.get("seconds_beside")):
        return None
    return NodeResult(
        Outcome.OK,
        one.against,
        0.0,
        seconds=seconds,
        device=one.device,
        stage="confirm",
        facts={"contests": 0},
    )


def truncated_feedback(text: str) -> str:
    """Text of a length that a prompt can bear."""
    text = text.strip()
    return text if len(text) <= _MAX_FEEDBACK_CHARS else f"{text[: _MAX_FEEDBACK_CHARS - 4]} ..."
