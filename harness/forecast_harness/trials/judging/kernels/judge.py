"""Variants of a Triton kernel, judged on a device: verified against the base, tuned, timed at real sizes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Config, Outcome
from forecast_autotune.variants import Variant
from forecast_autotune.variants.contract import read_contract
from forecast_harness.clocks.devices import ONE_QUEUE, DeviceBusy, exclusive
from forecast_harness.clocks.paired_comparison import INCUMBENT
from forecast_harness.records import (
    ConfirmationJob,
    FullVerification,
    Node,
    NodeJob,
    NodeResult,
    SearchTarget,
    VerificationJob,
)
from forecast_harness.sandbox.api import JobStatus, SandboxError, SandboxLane
from forecast_harness.sandbox.api import SandboxJob as Asked
from forecast_harness.sandbox.lane_pools import Closable, close_lanes
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.search_target import configs_for, decided_config, subjects_of
from forecast_harness.trials.configs.timings import Timing
from forecast_harness.trials.configs.variant_tracing import VariantTracer
from forecast_harness.trials.judging.confirmation_lanes import ConfirmationLanes, ConfirmationOpener
from forecast_harness.trials.judging.confirmation_limit import ConfirmationLimit
from forecast_harness.trials.judging.kernels.call_kinds import CallKinds
from forecast_harness.trials.judging.lane_judge import (
    SandboxNodeJudge,
    overall_judgement,
    reasons_from_json,
    reasons_text,
    seconds_of_side,
    seed_beside,
)
from forecast_harness.trials.judging.races.held_race import HeldRace
from forecast_harness.trials.judging.races.rules import QUICK_RULES, THOROUGH_RULES, RaceRules, log2_ratio
from forecast_harness.trials.protocol import ConfirmationEnded, LaneFailure
from forecast_harness.trials.variants.compilation.base_binaries import BaseBinaries
from forecast_harness.trials.variants.verify import (
    VARIANT_LIMITS,
    VARIANT_PLAN,
    VariantVerification,
    survey,
    verify_variant,
)
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import reason_of_result
from forecast_harness.verify.verdict import Judgement, Reason, ReasonCode, SolutionVerdict

_CONTESTS = 2
"""Of a finalist and the seed, each in processes of its own; a finalist that is not faster in one has no other."""
_RACE_JOB = "forecast_harness.trials.judging.kernels.race:race"


class KernelJudge(SandboxNodeJudge):
    """One sandbox lane that judges variants of one kernel. Use from one thread at a time.

    `rules` say how long a job's race lasts, `thorough` a confirmation's. Raises `LaneFailure` on opening if the
    lane's canary does not sing.
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
        self._target, self._subjects, self._rules = target, subjects_of(target), rules
        self._thorough = thorough
        self._kinds: CallKinds | None = None
        self._binaries = BaseBinaries()
        self._opening_s: dict[str, float] = {}
        """What it took to open this judge, told with what it verifies."""
        began = time.perf_counter()
        self._fresh_lanes = ConfirmationOpener(self._open_lane)
        self._confirming: ConfirmationLanes | None = None
        """Lanes of a confirmation under way."""
        self._tracer = VariantTracer(target, folder)
        super().__init__(replace(plan, cases=min(plan.cases, VARIANT_PLAN.cases), timed=0), folder, number)
        self._opening_s["open"] = round(time.perf_counter() - began, 3)

    def judge(self, job: NodeJob) -> NodeResult:
        """Verify the variant for every kind of call, choose its config, time it beside `job.against`.

        At most `job.trials` of its configs are timed: the one of `job.against`, where the variant can run
        it, those that the shipped surrogate forecasts to be the fastest, and one that it did not choose.
        Forecasts rest on their IR and on what this lane has timed, of any variant. Raises `LaneFailure`.
        """
        began = time.perf_counter()
        rules = self._thorough if job.confirm else self._rules
        found = self._judge_variant(
            job.node, job.against, job.against_config, (), job.trials, rules, [self._lane]
        )
        stage = "confirm" if job.confirm and found.log2_ratio is not None else found.stage
        spent = time.perf_counter() - began
        return replace(found, against=job.against.id, stage=stage, wall_seconds=spent)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """Each finalist verified and timed beside the seed in fresh lanes; twice, where it is faster.

        Those that there is no time for are left out, but for the first. The seed's seconds are those of the first
        contest; without any it is timed beside itself. Raises `ConfirmationEnded` where the first takes far longer
        than there is time.
        """
        limit = ConfirmationLimit(confirm.seconds, self._plan.device)
        rules, seed = limit.rules(self._thorough), confirm.seed_node
        found: dict[str, NodeResult] = {}
        of_seed: NodeResult | None = None
        if self._plan.device != "cpu":
            self.prepare_confirmation()  # all of them open at the same time
        lanes = self._confirming = self._fresh_lanes.take()
        opened = round(limit.spent, 3)
        try:
            with limit.enforced(lanes.give_up):
                for node in (n for n in confirm.nodes if n.id != seed.id):
                    if limit.must_end(len(found)):
                        break
                    began = limit.spent
                    one = self._confirm_one(confirm, node, rules, lanes)
                    facts = {**one.facts, "spent": {"open": opened, **one.facts.get("spent", {})}}
                    found[node.id] = replace(one, wall_seconds=limit.spent - began, facts=facts)
                    of_seed = of_seed or seed_beside(one)
                if of_seed is None and not limit.must_end(len(found)):
                    of_seed = self._confirm_one(confirm, seed, rules, lanes)
        except (LaneFailure, SandboxError) as error:
            if not limit.is_over:
                raise
            if not found:
                raise ConfirmationEnded(
                    f"there was no time: {limit.spent:.0f} s were not enough", self.name
                ) from error
        finally:
            self._confirming = None
            lanes.close()
        if of_seed is None:
            return found
        if of_seed.log2_ratio is not None:
            of_seed = replace(of_seed, log2_ratio=0.0, sd=0.0)
        return {seed.id: of_seed, **found}

    def _confirm_one(
        self, confirm: ConfirmationJob, node: Node, rules: RaceRules, lanes: ConfirmationLanes
    ) -> NodeResult:
        """Its contests are made ready in lanes of their own while it is verified; what they show counts afterwards."""
        seed, configs = confirm.seed_node, confirm.configs
        chosen, beside = configs.get(node.id, {}), configs.get(seed.id, {})
        fixed = [Config.from_json(chosen)] if chosen else []
        held: list[HeldRace] = []
        try:
            for lane in lanes.racing if fixed and node.id != seed.id else ():
                job = self._race_job(node, seed, beside, fixed, rules)
                held.append(HeldRace(lane, job, VARIANT_LIMITS))
            how = (fixed, 1, rules, lanes.verifying, held)
            one = self._judge_variant(node, seed, beside, *how, contests=_CONTESTS)
        finally:
            close_lanes(held)
        return replace(one, against=seed.id, stage="confirm")

    def give_up(self) -> None:
        """As for other judges, a confirmation included."""
        super().give_up()
        if (lanes := self._confirming) is not None:
            lanes.give_up()

    def verify(self, job: VerificationJob) -> FullVerification:
        """Verify a variant with fresh hidden seeds, in its config alone where there is one. Raises `LaneFailure`.

        One config is no check that a record could carry: its confirmation launches all of them.
        """
        began, config = time.perf_counter(), job.config
        checked = self._verify_variant(job.node, [self._lane], (Config.from_json(config),) if config else ())
        if isinstance(checked, NodeResult):
            found = FullVerification(checked.outcome, checked.feedback, checked.facts)
        else:
            found = FullVerification(Outcome.OK, "", self._result_facts(checked[0].verdict))
        steps = {} if isinstance(checked, NodeResult) else _seconds_of(checked[0].verdict)
        facts = {**found.facts, "spent_verifying": {**self._opening_s, **steps}}
        return replace(found, wall_seconds=time.perf_counter() - began, device=self._device, facts=facts)

    def prepare_confirmation(self) -> None:
        """Open in the background what verifies the kinds of call side by side, and what contests are held ready in."""
        kinds = 1 if self._kinds is None else len(self._kinds.verified)
        self._fresh_lanes.prepare(kinds, _CONTESTS)

    def prepare_verification(self) -> None:
        """Find out what the base kernel accepts, which every verification needs. Raises `LaneFailure`."""
        self._call_kinds()

    def _to_close(self) -> list[Closable]:
        return [*super()._to_close(), self._fresh_lanes, self._tracer]

    # --- one variant ---

    def _judge_variant(
        self,
        node: Node,
        against: Node,
        against_config: Mapping[str, Any],
        fixed: Sequence[Config],
        trials: int,
        rules: RaceRules,
        lanes: Sequence[SandboxLane],
        held: Sequence[HeldRace] = (),
        *,
        contests: int = 1,
    ) -> NodeResult:
        """Verify once, then time `fixed` configs, or the best of `trials`.

        Of several contests the last one counts, and one that was not won is the last. `held`: those of them that
        wait already.
        """
        steps = PhaseTimer()
        verified: list[VariantVerification] = []
        if node.source != self._subjects[0].source:  # what the base kernel does is what is right
            with steps.phase("verify"):
                checked = self._verify_variant(node, lanes)
            if isinstance(checked, NodeResult):
                return checked
            verified = checked
        spent = sum(v.verdict.seconds for v in verified)
        verdict = verified[0].verdict if verified else SolutionVerdict(self._target.name, node.id)
        unable = {c for v in verified for c in v.verdict.facts.get("unable", ())}
        able = [c for c in configs_for(self._target, node.source) if str(c) not in unable]
        beside = Config.from_json(against_config) if against_config else None
        decided = decided_config(self._target, node.source)
        if not fixed and decided in able:
            fixed = (decided,)  # the store has tuned this source already
        if not fixed and len(able) > trials:
            self._tracer.prepare_source(node.source, rival=against.source, beside=beside)
        chosen = list(fixed) or self._tracer.best_configs(node.source, able, max(1, trials), beside)
        raced: list[Mapping[str, float]] = []
        for number in range(contests):
            with steps.phase("races"):
                waiting = held[number] if number < len(held) else None
                value = self._run_race(node, against, against_config, chosen, rules, lanes[0], waiting)
            raced.append(value.get("steps", {}))
            spent += value["lane_seconds"]
            caught = [r for listed in value["caught"].values() for r in reasons_from_json(listed)]
            if caught or "winner" not in value:
                nothing = Reason(ReasonCode.FAILS, "no config could be launched at the sizes of the calls")
                return self._refused_result(caught or (nothing,), verdict, spent, timed=len(chosen))
            if log2_ratio(value["differences"])[0] >= 0:
                break
        checks = [c.to_json() for v in verified for c in v.checks]
        shown = [c.to_json() for c in chosen]
        verifying = [_seconds_of(v.verdict) for v in verified]
        more: dict[str, Any] = {
            "checks_passed": checks,
            "spent": {**steps.to_json(), "verifying": verifying, "racing": raced},
            "seconds_beside": seconds_of_side(value, INCUMBENT),
        }
        return self._measured_result(value, shown, verdict, len(chosen), spent, more=more)

    def _verify_variant(
        self,
        node: Node,
        lanes: Sequence[SandboxLane],
        fixed: Sequence[Config] = (),
    ) -> list[VariantVerification] | NodeResult:
        """What was found for every kind of call; a result where the variant is refused.

        With several lanes, at the same time. Raises `LaneFailure`.
        """
        try:
            base = self._target.payload["source_sha256"]
            variant = Variant.of(self._target.entry, base, node.source, node.provenance)
            promised = read_contract(node.source, self._target.entry)
            promised.require_same_parameters(
                read_contract(self._subjects[0].source, self._target.entry).parameters
            )
        except RecordError as error:
            verdict = SolutionVerdict(self._target.name, node.id)
            refused = self._refused_result((Reason(ReasonCode.FAILS, str(error)),), verdict, 0.0)
            return replace(refused, stage="compile")
        variant = replace(variant, configs=tuple(fixed) or promised.configs)
        asked = self._call_kinds().verified
        spent, verified = 0.0, list[VariantVerification]()
        try:
            if len(lanes) > 1:
                with ThreadPoolExecutor(len(lanes)) as pool:
                    answers: Iterable[VariantVerification] = list(
                        pool.map(
                            lambda n: self._verified(variant, *asked[n], lanes[n % len(lanes)]),
                            range(len(asked)),
                        )
                    )
            else:
                answers = (self._verified(variant, *one, lanes[0]) for one in asked)
            for one in answers:
                spent += one.verdict.seconds
                if not one.verdict.accepted:
                    return self._refused_result(one.verdict.reasons, one.verdict, spent)
                verified.append(one)
        except SandboxError as error:
            raise LaneFailure(str(error), self.name) from error
        return verified

    def _verified(
        self, variant: Variant, subject: BaseKernel, known: KernelSurvey, lane: SandboxLane
    ) -> VariantVerification:
        return verify_variant(
            variant,
            subject,
            known,
            lane,
            device=self._device,
            plan=self._plan,
            binaries=self._binaries,
        )

    def _call_kinds(self) -> CallKinds:
        """What the base kernel accepts at the calls; found out once. Raises `LaneFailure`."""
        if self._kinds is None:
            began = time.perf_counter()
            try:
                self._kinds = CallKinds.surveyed(
                    self._subjects,
                    lambda subject: survey(subject, self._lane, plan=self._plan, binaries=self._binaries),
                )
            except (SandboxError, VariantError) as error:
                raise LaneFailure(f"the base kernel: {error}", self.name) from error
            surveying = {f"survey_{name}": s for name, s in self._binaries.steps.items()}
            self._opening_s |= {"survey": round(time.perf_counter() - began, 3), **surveying}
        return self._kinds

    def _race_job(
        self,
        node: Node,
        against: Node,
        against_config: Mapping[str, Any],
        configs: Sequence[Config],
        rules: RaceRules,
    ) -> Asked:
        """The timing job. Raises `LaneFailure` where the base kernel cannot be surveyed."""
        known = self._call_kinds().covering
        payload = {
            "subjects": [s.to_json() for s in self._subjects],
            "writes": [list(s.writes) for s in known],
            "updates": [list(s.updates) for s in known],
            "against": {
                "source": against.source,
                "configs": [self._config_beside(against, against_config).to_json()],
            },
            "variant": {"source": node.source, "configs": [c.to_json() for c in configs]},
            "device": self._plan.device,
            "rules": rules.to_json(),
        }
        return Asked(_RACE_JOB, payload, {"against.py": against.source, "variant.py": node.source})

    def _config_beside(self, against: Node, config: Mapping[str, Any]) -> Config:
        """The config of the node to be timed beside."""
        return Config.from_json(config) if config else configs_for(self._target, against.source)[0]

    def _run_race(
        self,
        node: Node,
        against: Node,
        against_config: Mapping[str, Any],
        configs: Sequence[Config],
        rules: RaceRules,
        lane: SandboxLane,
        held: HeldRace | None = None,
    ) -> dict[str, Any]:
        """The timing job's value, with `lane_seconds`; forecasts learn from it. Raises `LaneFailure`.

        `held`: the same race where it is waiting already.
        """
        job = self._race_job(node, against, against_config, configs, rules) if held is None else None
        try:
            with exclusive(self._plan.device_lock):
                if held is not None:
                    result = held.timed()
                else:
                    assert job is not None
                    result = lane.run(job, VARIANT_LIMITS)
        except (SandboxError, DeviceBusy) as error:
            raise LaneFailure(str(error), self.name) from error
        if result.status is not JobStatus.OK:
            reason = reason_of_result(result)
            if overall_judgement((reason,)) is Judgement.INFRASTRUCTURE:
                raise LaneFailure(reason.detail, self.name)
            return {"caught": {"0": [reason.to_json()]}, "lane_seconds": result.seconds}
        value: dict[str, Any] = result.value
        if "incumbent" in value:
            why = reasons_text(reasons_from_json(value["incumbent"]))
            raise LaneFailure(f"the variant to be timed beside could not be timed: {why}", self.name)
        timings: dict[Config, Timing] = {configs[int(n)]: Outcome(o) for n, o in value["unable"].items()}
        if "winner" in value:
            timings |= {configs[int(n)]: seconds for n, seconds in value["timed"].items()}
            theirs = [value["seconds"][f"{INCUMBENT}:{n}"] for n in range(len(self._subjects))]
            # Another lane may have judged it.
            self._tracer.learn(against.source, {self._config_beside(against, against_config): theirs})
        self._tracer.learn(node.source, timings)
        return {**value, "lane_seconds": result.seconds}


def _seconds_of(verdict: SolutionVerdict) -> dict[str, Any]:
    """Where a verification's seconds went, by what was done and by what for."""
    facts = verdict.facts
    kinds, parts = facts.get("seconds", {}), {**facts.get("steps", {}), **facts.get("examine", {})}
    return {**kinds, "for": parts, "all": round(verdict.seconds, 3)}
