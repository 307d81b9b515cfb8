"""The judge: every source goes through the same stages, whatever its target and its way to the clock.

    read -> compiled -> right on one call -> timed -> raced -> verified -> confirmed

`Judge` orders the stages; each kind of judge says how one is done. Host code is judged in a sandbox (`SandboxJudge`, by
kind of target in `kernels`, `packs` and `cuda`): it is verified before it is timed, a pack's with few cases, and one
job compiles it, compares results at one call of every size, drops the slower configs and races the best. Machine code
is judged by a runner (`machine_code.judge`): configs are chosen by compiling, checking on one call and timing as few as
tell. Full verification waits there, and for packs, until the source may lead. Sides of a race are timed by a
`TrialClock`, of a cell or of the runner.
All end in the verdict of `verdict`, and are confirmed as `confirmation` says.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from forecast_autotune.records import Outcome
from forecast_autotune.variants import Variant
from forecast_harness.clocks.devices import DeviceBusy, exclusive
from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    Node,
    NodeJob,
    NodeResult,
    VerificationJob,
)
from forecast_harness.sandbox import canary
from forecast_harness.sandbox.api import (
    JobResult,
    JobStatus,
    ResourceLimits,
    SandboxError,
    SandboxJob,
    SandboxLane,
)
from forecast_harness.sandbox.lane_pools import Closable, close_lanes
from forecast_harness.trials.confirmation import ConfirmationLanes, ConfirmationLimit, ConfirmationOpener
from forecast_harness.trials.devices import LANE_MODULES, device_slug
from forecast_harness.trials.protocol import ConfirmationEnded, LaneFailure
from forecast_harness.trials.race import PreparedRace, RaceRules
from forecast_harness.trials.verdict import (
    COMPILE_ERRORS,
    Contest,
    Refusal,
    overall_judgement,
    reasons_from_json,
    reasons_text,
    truncated_feedback,
)
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import harness_hash, reason_of_result
from forecast_harness.verify.verdict import Judgement, Reason, SolutionVerdict


@dataclass
class Trial:
    """One source on its way to a verdict."""

    job: NodeJob
    configs: Sequence[Any] = ()
    """The configs that may be timed."""
    measurements: int = 0
    device_seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


S = TypeVar("S")
T = TypeVar("T", bound=Trial)


class Judge(ABC, Generic[T]):
    """Takes sources through the stages."""

    def __init__(self, device: str) -> None:
        """`device`: UUID, or slug, of the device that sources run on."""
        self._device = device

    def judge(self, job: NodeJob) -> NodeResult:
        """The verdict on a node, tuned and timed beside `job.against`. Raises `LaneFailure`."""
        began = time.perf_counter()
        verdict = self._judge_node(job)
        return replace(verdict, against=job.against.id, wall_seconds=time.perf_counter() - began)

    @abstractmethod
    def _judge_node(self, job: NodeJob) -> NodeResult:
        """The verdict on a node by its `_stages`. Raises `LaneFailure`."""

    def _verdict_of(self, stages: Callable[[S], NodeResult], source: S) -> NodeResult:
        """The result of these stages, refusals included."""
        try:
            return stages(source)
        except Refusal as refusal:
            return refusal.verdict(self._device)

    def _stages(self, trial: T) -> NodeResult:
        """The verdict on a source that comes through all stages up to the race. Raises `Refusal`, `LaneFailure`."""
        self._read(trial)
        self._verify(trial)
        contest = self._race(trial, self._choose(trial))
        text = contest.text or contest.times_beside()
        if contest.config:
            text += f" Its best config is {dict(contest.config)}."
        return NodeResult(
            Outcome.OK,
            log2_ratio=contest.log2_ratio,
            sd=contest.error,
            seconds=dict(contest.seconds),
            config=dict(contest.config),
            measurements=trial.measurements,
            device_seconds=trial.device_seconds,
            device=self._device,
            stage="confirm" if trial.job.confirm else "time",
            feedback=truncated_feedback(text),
            facts={
                **self._facts(trial),
                **(contest.each_call if trial.job.confirm else {}),
                **contest.facts,
                "configs": [{"config": dict(c), "log2_ratio": ratio} for c, ratio in contest.ranked],
            },
        )

    def _facts(self, trial: T) -> Mapping[str, Any]:
        """Facts of a source that was raced, beside those of its contest."""
        return trial.facts

    @abstractmethod
    def _read(self, trial: T) -> None:
        """Read what the source promises, without running it: its configs."""

    def _verify(self, trial: T) -> None:
        """Verify the source with hidden sizes and values; nothing, where `verify` does so once the source may lead."""

    @abstractmethod
    def _choose(self, trial: T) -> Sequence[Any]:
        """The configs to race, at most `trial.job.trials`."""

    @abstractmethod
    def _race(self, trial: T, configs: Sequence[Any]) -> Contest:
        """The source beside its rival, in the best of these configs."""


@dataclass(kw_only=True)
class SandboxTrial(Trial):
    """One source of host code on its way to a verdict."""

    rules: RaceRules
    lanes: Sequence[SandboxLane]
    """The lanes of its verification; it is timed in the first."""
    verification: SolutionVerdict
    fixed: Sequence[Any] = ()
    """Configs that are timed instead of those that would be chosen."""
    contests: int = 1
    """The most contests: the last one counts, and one that is not won is the last."""
    prepared: Sequence[PreparedRace] = ()
    """Contests that wait already."""
    variant: Variant | None = None
    """The source with its promises, where it is a variant of a kernel."""
    steps: PhaseTimer = field(default_factory=PhaseTimer)


class SandboxJudge(Judge[SandboxTrial]):
    """One sandbox lane that judges sources of one target as host code. Use from one thread at a time.

    `rules` say how long a job's race lasts, `thorough` a confirmation's. Raises `LaneFailure` on opening if the lane's
    canary does not answer.
    """

    device_environment: ClassVar[Mapping[str, str]] = {}
    """The environment of a lane's processes, where they have a device."""
    verifies_seed_first: ClassVar[bool] = False
    """Whether a confirmation knows of the seed before of any finalist."""

    def __init__(
        self,
        plan: VerificationPlan,
        folder: Path,
        number: int,
        rules: RaceRules,
        thorough: RaceRules,
    ) -> None:
        """`number`: the lane's, where its device has no UUID."""
        super().__init__(plan.uuid or device_slug(plan.device, plan.index))
        self._plan, self._folder = plan, folder
        self._rules, self._thorough = rules, thorough
        self.name = plan.uuid or f"{plan.device}-{number}"
        self._fresh_lanes = ConfirmationOpener(self._open_lane)
        self._confirming: ConfirmationLanes | None = None
        """Lanes of a confirmation under way."""
        began = time.perf_counter()
        self._lane = self._open_lane()
        self._opening_s: dict[str, float] = {"open": round(time.perf_counter() - began, 3)}
        """Seconds that opening this judge took, reported with what it verifies."""

    # --- questions ---

    def verify(self, job: VerificationJob) -> FullVerification:
        """Verify a node with fresh hidden seeds, in its config alone where there is one. Raises `LaneFailure`."""
        began = time.perf_counter()
        try:
            verdict, steps = self._verify_in_full(job.node, job.config)
            result = FullVerification(Outcome.OK, "", self._result_facts(verdict))
        except Refusal as refusal:
            result, steps = FullVerification(refusal.outcome, refusal.feedback, refusal.facts), {}
        facts = {**result.facts, "spent_verifying": {**self._opening_s, **steps}}
        return replace(result, wall_seconds=time.perf_counter() - began, device=self._device, facts=facts)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """Each finalist verified and timed beside the seed in fresh lanes; twice, where it is faster.

        Those that there is no time for are left out, but for the first. The seed is in the answer, at ratio 0. Raises
        `ConfirmationEnded` where the first takes far longer than there is time.
        """
        limit = ConfirmationLimit(confirm.seconds)
        seed, result = confirm.seed_node, dict[str, NodeResult]()
        of_seed: NodeResult | None = None
        if self._plan.device != "cpu":
            self.prepare_confirmation()  # all of them open at the same time
        lanes = self._confirming = self._fresh_lanes.take()
        opening_s = round(limit.spent, 3)
        try:
            with limit.enforced(lanes.give_up):
                confirm_node = self._finalists(confirm, limit, lanes)
                for node in (n for n in confirm.nodes if n.id != seed.id):
                    if limit.must_end(len(result)):
                        break
                    began = limit.spent
                    verdict = self._verdict_of(confirm_node, node)
                    facts = {**verdict.facts, "spent": {"open": opening_s, **verdict.facts.get("spent", {})}}
                    result[node.id] = replace(
                        verdict,
                        against=seed.id,
                        stage="confirm",
                        wall_seconds=limit.spent - began,
                        facts=facts,
                    )
                    of_seed = of_seed or _seed_beside(result[node.id])
                if of_seed is None and (self.verifies_seed_first or not limit.must_end(len(result))):
                    of_seed = replace(self._verdict_of(confirm_node, seed), against=seed.id, stage="confirm")
        except (LaneFailure, SandboxError, DeviceBusy) as error:
            if not limit.is_over:
                raise LaneFailure(str(error), self.name) from error
            if not result:
                text = f"there was no time: {limit.spent:.0f} s were not enough"
                raise ConfirmationEnded(text, self.name) from error
        finally:
            self._confirming = None
            lanes.close()
        if of_seed is None:
            return result
        if of_seed.log2_ratio is not None:
            of_seed = replace(of_seed, log2_ratio=0.0, sd=0.0)
        return {seed.id: of_seed, **result}

    def prepare_confirmation(self) -> None:
        """Open in the background what a confirmation will ask for."""
        self._fresh_lanes.prepare(*self._confirmation_lanes())

    def give_up(self) -> None:
        """End the job in the lane, or the confirmation: who waits for it gets a `LaneFailure`. From any thread."""
        self._lane.give_up()
        if (lanes := self._confirming) is not None:
            lanes.give_up()

    def close(self) -> None:
        """End all processes, side by side: those on a device take seconds to leave it."""
        close_lanes(self._to_close())

    def _to_close(self) -> list[Closable]:
        return [self._lane, self._fresh_lanes]

    # --- the stages ---

    def _judge_node(self, job: NodeJob) -> NodeResult:
        rules = self._thorough if job.confirm else self._rules
        return self._verdict_of(self._stages, self._trial(job, rules, [self._lane]))

    def _trial(
        self, job: NodeJob, rules: RaceRules, lanes: Sequence[SandboxLane], **more: Any
    ) -> SandboxTrial:
        verification = SolutionVerdict(job.target.name, job.node.id)
        return SandboxTrial(job, rules=rules, lanes=lanes, verification=verification, **more)

    @abstractmethod
    def _verify_in_full(
        self, node: Node, config: Mapping[str, Any]
    ) -> tuple[SolutionVerdict, dict[str, Any]]:
        """The verdict on a node that is right, in a config, and where the seconds went."""

    @abstractmethod
    def _finalists(
        self, confirm: ConfirmationJob, limit: ConfirmationLimit, lanes: ConfirmationLanes
    ) -> Callable[[Node], NodeResult]:
        """The function that confirms one node beside the seed after the other; raises as `_stages`."""

    def _confirmation_lanes(self) -> tuple[int, int]:
        """The number of fresh lanes that verify in a confirmation, and of those that hold contests ready."""
        return 1, 0

    def _run_race(
        self, job: SandboxJob, lane: SandboxLane, limits: ResourceLimits, prepared: PreparedRace | None = None
    ) -> dict[str, Any]:
        """A timing job's value, with `lane_seconds`; `prepared`: the same race, if it waits. Raises `LaneFailure`."""
        try:
            with exclusive(self._plan.device_lock):
                result = lane.run(job, limits) if prepared is None else prepared.timed()
        except (SandboxError, DeviceBusy) as error:
            raise LaneFailure(str(error), self.name) from error
        value = self._race_value(result)
        if "incumbent" in value:
            why = reasons_text(reasons_from_json(value["incumbent"]))
            raise LaneFailure(f"the node to be timed beside could not be timed: {why}", self.name)
        return value

    def _race_value(self, result: JobResult) -> dict[str, Any]:
        if result.status is JobStatus.OK:
            return {**result.value, "lane_seconds": result.seconds}
        reason = reason_of_result(result)
        if reason.judgement is Judgement.INFRASTRUCTURE:
            raise LaneFailure(reason.detail, self.name)
        # No cell's fault comes this far: the job's own status is a fault while a cell was being opened.
        return {"caught": {"0": [reason.to_json()]}, "lane_seconds": result.seconds}

    # --- results ---

    def _refusal(self, trial: SandboxTrial, reasons: Sequence[Reason]) -> Refusal:
        """The refusal of a source for these reasons. Raises `LaneFailure` where the harness is to blame."""
        if overall_judgement(reasons) is Judgement.INFRASTRUCTURE:
            raise LaneFailure(reasons_text(reasons), self.name)
        verdict = trial.verification
        stage = "time" if trial.measurements else "verify"
        if stage == "verify" and verdict.trials == 0 and COMPILE_ERRORS.search(reasons[0].detail):
            stage = "compile"
        return Refusal(
            replace(verdict, reasons=tuple(reasons)).outcome,
            stage,
            reasons_text(reasons),
            {**self._result_facts(verdict), "codes": sorted({str(r.code) for r in reasons})},
            measurements=max(1, trial.measurements),
            device_seconds=trial.device_seconds,
        )

    def _facts(self, trial: SandboxTrial) -> Mapping[str, Any]:
        return {**self._result_facts(trial.verification), **trial.facts}

    def _result_facts(self, verdict: SolutionVerdict) -> dict[str, Any]:
        """Facts that may be shown to a proposer: never the seed."""
        return {
            "harness": harness_hash(),
            "launches": verdict.trials,
            "checked": verdict.checked.to_json(),
            "error_over_limit": verdict.facts.get("error_over_limit"),
            "peak_bytes": verdict.facts.get("peak_bytes", {}),
            "base_peak_bytes": verdict.facts.get("base_peak_bytes", {}),
            "hints": list(verdict.hints),
            "level": self._lane.level.name.lower(),
        }

    def _open_lane(self) -> SandboxLane:
        """A fresh lane whose canary answered. Raises `LaneFailure`."""
        environment = {"TRITON_INTERPRET": "1"} if self._plan.device == "cpu" else self.device_environment
        device = None if self._plan.device == "cpu" else self._plan.uuid or str(self._plan.index)
        lane = SandboxLane(device=device, scratch=self._folder, environment=environment, warm=LANE_MODULES)
        lane.__enter__()
        result = lane.run(SandboxJob(f"{canary.__name__}:main", {"device": device}), canary.CANARY_LIMITS)
        if result.status is JobStatus.OK and result.value == "ok":
            return lane
        lane.close()
        raise LaneFailure(f"the canary: {result.value or result.detail}", self.name)


def _seed_beside(finalist: NodeResult) -> NodeResult | None:
    """The seed's result in a contest with a finalist, if there was one."""
    if not (seconds := finalist.facts.get("seconds_beside")):
        return None
    return NodeResult(
        Outcome.OK,
        finalist.against,
        0.0,
        seconds=seconds,
        device=finalist.device,
        stage="confirm",
        facts={"contests": 0},
    )
