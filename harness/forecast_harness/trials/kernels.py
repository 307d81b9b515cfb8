"""Variants of a Triton kernel, judged on a device: verified against the base, tuned, timed at real sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Config, Outcome
from forecast_autotune.variants import Variant
from forecast_autotune.variants.contract import read_contract
from forecast_autotune.variants.signature import INTERPRETER
from forecast_harness.clocks.devices import ONE_QUEUE
from forecast_harness.clocks.paired_comparison import INCUMBENT
from forecast_harness.records import ConfirmationJob, Node, NodeJob, NodeResult, SearchTarget
from forecast_harness.sandbox.api import SandboxError, SandboxJob
from forecast_harness.sandbox.lane_pools import Closable, close_lanes
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.search_target import configs_for, cuda_device, decided_config, subjects_of
from forecast_harness.trials.configs.source_configs import work_of_a_warp
from forecast_harness.trials.configs.variant_tracing import Timing, VariantTracer
from forecast_harness.trials.confirmation import CONTESTS, ConfirmationLanes, ConfirmationLimit
from forecast_harness.trials.judge import SandboxJudge, SandboxTrial
from forecast_harness.trials.kernel_calls import CallKinds
from forecast_harness.trials.protocol import CannotConfirm, LaneFailure
from forecast_harness.trials.race import QUICK_RULES, THOROUGH_RULES, PreparedRace, RaceRules, log2_ratio
from forecast_harness.trials.variants.files import BaseBinaries
from forecast_harness.trials.variants.verify import (
    VARIANT_LIMITS,
    VARIANT_PLAN,
    BaseRefusedError,
    VariantVerification,
    survey,
    verify_variant,
)
from forecast_harness.trials.verdict import Contest, reasons_from_json, seconds_of_side
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import Reason, ReasonCode, SolutionVerdict


class KernelJudge(SandboxJudge):
    """A `SandboxJudge` of variants of one kernel.

    The config of a node is chosen among those of its source: the one of `job.against`, where the variant can run it,
    those that the shipped surrogate forecasts to be the fastest, and one that it did not choose. Forecasts rest on
    their IR and on what this lane has timed, of any variant.
    """

    device_environment = ONE_QUEUE

    def __init__(
        self,
        target: SearchTarget,
        plan: VerificationPlan,
        folder: Path,
        *,
        number: int = 0,
        rules: RaceRules = QUICK_RULES,
        thorough: RaceRules = THOROUGH_RULES,
    ) -> None:
        self._target, self._subjects = target, subjects_of(target)
        self._kinds: CallKinds | None = None
        self._binaries = BaseBinaries()
        self._tracer = VariantTracer(target, folder)
        self._checked_device = INTERPRETER if plan.device == "cpu" else cuda_device().slug
        """The class of devices that checks name: the decorator asks for its own."""
        plan = replace(plan, cases=min(plan.cases, VARIANT_PLAN.cases), timed=0)
        super().__init__(plan, folder, number, rules, thorough)

    def prepare_verification(self) -> None:
        """Find out what the base kernel accepts, which every verification needs. Raises `LaneFailure`."""
        self._call_kinds()

    def _to_close(self) -> list[Closable]:
        return [*super()._to_close(), self._tracer]

    # --- the stages ---

    def _read(self, trial: SandboxTrial) -> None:
        source = trial.job.node.source
        if source != self._subjects[0].source:  # the base kernel is right by definition
            trial.variant = self._variant(trial)
        trial.configs = configs_for(self._target, source)

    def _variant(self, trial: SandboxTrial) -> Variant:
        """The source with its promises. Raises `Refusal`."""
        entry, node = self._target.entry, trial.job.node
        try:
            variant = Variant.of(entry, self._target.payload["source_sha256"], node.source, node.provenance)
            contract = read_contract(node.source, entry)
            self._subjects[0].require_fit(contract)
        except RecordError as error:
            refusal = self._refusal(trial, (Reason(ReasonCode.FAILS, str(error)),))
            refusal.stage = "compile"
            raise refusal from error
        return replace(variant, configs=contract.configs)

    def _verify(self, trial: SandboxTrial) -> None:
        with trial.steps.phase("verify"):
            if trial.variant is None:
                return
            verifications = self._verify_kinds(trial, trial.variant)
        unable = {c for v in verifications for c in v.verdict.facts.get("unable", ())}
        trial.configs = [c for c in trial.configs if str(c) not in unable]
        trial.facts |= {
            "checks_passed": [c.to_json() for v in verifications for c in v.checks],
            "verifying": [_seconds_of(v.verdict) for v in verifications],
        }

    def _verify_kinds(self, trial: SandboxTrial, variant: Variant) -> list[VariantVerification]:
        """Verify the variant for every kind of call; with several lanes, at the same time. Raises as `_stages`."""
        lanes, kinds = trial.lanes, self._call_kinds().verified

        def verify(number: int) -> VariantVerification:
            subject, survey_of_subject = kinds[number]
            return verify_variant(
                variant,
                subject,
                survey_of_subject,
                lanes[number % len(lanes)],
                device=self._checked_device,
                plan=self._plan,
                binaries=self._binaries,
            )

        accepted: list[VariantVerification] = []
        try:
            if len(lanes) > 1:
                with ThreadPoolExecutor(len(lanes)) as pool:
                    verifications: Iterable[VariantVerification] = list(pool.map(verify, range(len(kinds))))
            else:
                verifications = map(verify, range(len(kinds)))
            for verification in verifications:
                trial.device_seconds += verification.verdict.seconds
                if not verification.verdict.accepted:
                    trial.verification = verification.verdict
                    raise self._refusal(trial, verification.verdict.reasons)
                accepted.append(verification)
        except SandboxError as error:
            raise LaneFailure(str(error), self.name) from error
        trial.verification = accepted[0].verdict
        return accepted

    def _verify_in_full(
        self, node: Node, config: Mapping[str, Any]
    ) -> tuple[SolutionVerdict, dict[str, Any]]:
        """One config is no check that a record could carry: its confirmation launches all of them."""
        job = NodeJob("", node, node, {}, self._target, 0, 1)
        trial = self._trial(job, self._rules, [self._lane])
        variant = self._variant(trial)
        if config:
            variant = replace(variant, configs=(Config.from_json(config),))
        self._verify_kinds(trial, variant)
        return trial.verification, {**self._opening_s, **_seconds_of(trial.verification)}

    def _choose(self, trial: SandboxTrial) -> Sequence[Config]:
        job, configs = trial.job, trial.configs
        source, beside = job.node.source, Config.from_json(job.against_config) if job.against_config else None
        stored = decided_config(self._target, source)
        if trial.fixed:
            return trial.fixed
        if stored is not None and stored in configs:
            return (stored,)  # the store has tuned this source already
        if len(configs) > job.trials:
            self._tracer.prepare_source(source, rival=job.against.source, beside=beside)
        return self._tracer.best_configs(source, configs, max(1, job.trials), beside)

    def _race(self, trial: SandboxTrial, configs: Sequence[Config]) -> Contest:
        """Up to `trial.contests` contests, each in a process of its own, while they are won."""
        job, race_steps = trial.job, []
        trial.measurements = len(configs)
        for number in range(trial.contests):
            prepared = trial.prepared[number] if number < len(trial.prepared) else None
            with trial.steps.phase("races"):
                race = self._race_job(job, configs, trial.rules)
                value = self._run_race(race, trial.lanes[0], VARIANT_LIMITS, prepared)
            self._learn(job, configs, value)
            race_steps.append(value.get("steps", {}))
            trial.device_seconds += value["lane_seconds"]
            caught = [r for reasons in value["caught"].values() for r in reasons_from_json(reasons)]
            if caught or "winner" not in value:
                nothing = Reason(ReasonCode.FAILS, "no config could be launched at the sizes of the calls")
                raise self._refusal(trial, caught or (nothing,))
            if log2_ratio(value["differences"])[0] >= 0:
                break
        verifying = trial.facts.pop("verifying", [])
        trial.facts |= {
            "spent": {**trial.steps.to_json(), "verifying": verifying, "racing": race_steps},
            "seconds_beside": seconds_of_side(value, INCUMBENT),
        }
        return Contest.of_race(value, [c.to_json() for c in configs])

    def _finalists(
        self, confirm: ConfirmationJob, limit: ConfirmationLimit, lanes: ConfirmationLanes
    ) -> Callable[[Node], NodeResult]:
        """Contests are made ready in lanes of their own while a node is verified; what they show counts afterwards."""
        rules, seed, configs = limit.rules(self._thorough), confirm.seed_node, confirm.configs

        def confirm_node(node: Node) -> NodeResult:
            config = configs.get(node.id, {})
            fixed = [Config.from_json(config)] if config else []
            job = NodeJob("", node, seed, configs.get(seed.id, {}), self._target, 0, 1, confirm=True)
            prepared: list[PreparedRace] = []
            try:
                for lane in lanes.racing if fixed and node.id != seed.id else ():
                    prepared.append(PreparedRace(lane, self._race_job(job, fixed, rules), VARIANT_LIMITS))
                options: dict[str, Any] = {"fixed": fixed, "prepared": prepared, "contests": CONTESTS}
                return self._stages(self._trial(job, rules, lanes.verifying, **options))
            finally:
                close_lanes(prepared)

        return confirm_node

    def _confirmation_lanes(self) -> tuple[int, int]:
        return 1 if self._kinds is None else len(self._kinds.verified), CONTESTS

    def _call_kinds(self) -> CallKinds:
        """The calls by what the base kernel accepts; surveyed once. Raises `LaneFailure`."""
        if self._kinds is None:
            began = time.perf_counter()

            def survey_call(subject: BaseKernel) -> KernelSurvey:
                return survey(subject, self._lane, plan=self._plan, binaries=self._binaries)

            try:
                self._kinds = CallKinds.surveyed(self._subjects, survey_call)
            except (SandboxError, VariantError) as error:
                failure = CannotConfirm if isinstance(error, BaseRefusedError) else LaneFailure
                raise failure(f"the base kernel: {error}", self.name) from error
            surveying = {f"survey_{name}": s for name, s in self._binaries.steps.items()}
            self._opening_s |= {"survey": round(time.perf_counter() - began, 3), **surveying}
        return self._kinds

    def _race_job(self, job: NodeJob, configs: Sequence[Config], rules: RaceRules) -> SandboxJob:
        """The timing job. Raises `LaneFailure` where the base kernel cannot be surveyed."""
        surveys = self._call_kinds().covering
        payload = {
            "subjects": [s.to_json() for s in self._subjects],
            "writes": [list(s.writes) for s in surveys],
            "updates": [list(s.updates) for s in surveys],
            "against": {
                "source": job.against.source,
                "configs": [c.to_json() for c in self._rival_configs(job)],
            },
            "variant": {"source": job.node.source, "configs": [c.to_json() for c in configs]},
            "device": self._plan.device,
            "rules": rules.to_json(),
        }
        files = {"against.py": job.against.source, "variant.py": job.node.source}
        return SandboxJob("forecast_harness.trials.race_job:race_kernel", payload, files)

    def _rival_configs(self, job: NodeJob) -> Sequence[Config]:
        """The config of the node to be timed beside; where none is known, all: the first that runs is taken."""
        if job.against_config:
            return [Config.from_json(job.against_config)]
        configs = configs_for(self._target, job.against.source)
        return [*configs[:1], *sorted(configs[1:], key=work_of_a_warp)]

    def _learn(self, job: NodeJob, configs: Sequence[Config], value: Mapping[str, Any]) -> None:
        """Have forecasts heed a race, of both sides: another lane may have judged the rival."""
        timings: dict[Config, Timing] = {
            configs[int(n)]: Outcome(o) for n, o in value.get("unable", {}).items()
        }
        if "winner" in value:
            timings |= {configs[int(n)]: seconds for n, seconds in value["timed"].items()}
            theirs = [value["seconds"][f"{INCUMBENT}:{n}"] for n in range(len(self._subjects))]
            self._tracer.learn(job.against.source, {self._rival_configs(job)[value.get("beside", 0)]: theirs})
        if "unable" in value:
            self._tracer.learn(job.node.source, timings)


def _seconds_of(verdict: SolutionVerdict) -> dict[str, Any]:
    """A verification's seconds, by kind of work and by step."""
    facts = verdict.facts
    kinds, steps = facts.get("seconds", {}), {**facts.get("steps", {}), **facts.get("examine", {})}
    return {**kinds, "for": steps, "all": round(verdict.seconds, 3)}
