"""Variants of a Triton kernel, judged on a device: verified against the base, tuned, timed at real sizes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Config, Outcome
from forecast_autotune.variants import Variant
from forecast_autotune.variants.contract import read_contract
from forecast_harness.sandbox.api import JobStatus, SandboxError, SandboxLane
from forecast_harness.sandbox.api import SandboxJob as Asked
from forecast_harness.sandbox.lane_pools import Closable, close_lanes
from forecast_harness.search.forecasters.timings import Timing
from forecast_harness.search.forecasters.variant_tracing import VariantTracer
from forecast_harness.search.history.events import ConfirmationJob, NodeJob, VerificationJob
from forecast_harness.search.interfaces import LaneFailure
from forecast_harness.search.judging.early_opener import EarlyOpener
from forecast_harness.search.judging.lane_judge import (
    SandboxNodeJudge,
    confirmation_must_end,
    overall_judgement,
    reasons_from_json,
    reasons_text,
)
from forecast_harness.search.judging.race_rules import QUICK_RULES, THOROUGH_RULES, RaceRules, log2_ratio
from forecast_harness.search.records import FullVerification, Node, NodeResult, SearchTarget
from forecast_harness.search.targets import configs_for, decided_config, subjects_of
from forecast_harness.timing.device import DeviceBusy, exclusive
from forecast_harness.timing.paired_clock import INCUMBENT
from forecast_harness.variants.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.variants.verification.verify import (
    VARIANT_LIMITS,
    VARIANT_PLAN,
    VariantVerification,
    survey,
    verify_variant,
)
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import reason_of_result
from forecast_harness.verify.verdict import Judgement, Reason, ReasonCode, SolutionVerdict

_CONTEST_SHARE = 1 / 6
"""Of the seconds of a confirmation, for one contest: there are three of the first finalist and the seed, and it is
verified."""
_RACE_JOB = "forecast_harness.search.judging.kernel_race:race"


class KernelJudge(SandboxNodeJudge):
    """One sandbox lane that judges variants of one kernel. Use from one thread at a time.

    `rules` say how long a job's race lasts, `thorough` a confirmation's. Raises `LaneFailure` on opening if the
    lane's canary does not sing.
    """

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
        self._surveys: tuple[KernelSurvey, ...] = ()
        self._next_sides: list[EarlyOpener[SandboxLane]] = []
        self._tracer = VariantTracer(target, folder)
        super().__init__(replace(plan, cases=min(plan.cases, VARIANT_PLAN.cases), timed=0), folder, number)

    def judge(self, job: NodeJob) -> NodeResult:
        """Verify the variant for every kind of call, choose its config, time it beside `job.against`.

        At most `job.trials` of its configs are timed: the one of `job.against`, where the variant can run
        it, those that the shipped surrogate forecasts to be the fastest, and one that it did not choose.
        Forecasts rest on their IR and on what this lane has timed, of any variant. Raises `LaneFailure`.
        """
        began = time.perf_counter()
        rules = self._thorough if job.confirm else self._rules
        found = self._judge_variant(
            job.node, job.against, job.against_config, (), job.trials, rules, self._lane
        )
        stage = "confirm" if job.confirm and found.log2_ratio is not None else found.stage
        spent = time.perf_counter() - began
        return replace(found, against=job.against.id, stage=stage, wall_seconds=spent)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """Each finalist verified and timed beside the seed in a fresh lane; twice, where it is faster.

        Those that there is no time for are left out; never the first.
        """
        start = time.perf_counter()
        seed, configs, rules = confirm.seed_node, confirm.configs, self._thorough
        if confirm.seconds is not None:
            rules = replace(rules, seconds=min(rules.seconds, _CONTEST_SHARE * confirm.seconds))
        found: dict[str, NodeResult] = {}
        lane = self._fresh_lane()
        sides = self._fresh_sides()
        try:
            for node in (seed, *(n for n in confirm.nodes if n.id != seed.id)):
                began = time.perf_counter()
                # The seed counts as one, and takes as long.
                if confirmation_must_end(confirm.seconds, began - start, len(found), least=2):
                    break
                chosen = configs.get(node.id, {})
                fixed = (Config.from_json(chosen),) if chosen else ()
                how = (fixed, 1, rules, lane, sides)
                one = self._judge_variant(node, seed, configs.get(seed.id, {}), *how, contests=2)
                if node.id == seed.id and one.log2_ratio is not None:
                    one = replace(one, log2_ratio=0.0, sd=0.0)
                spent = time.perf_counter() - began
                found[node.id] = replace(one, against=seed.id, stage="confirm", wall_seconds=spent)
        finally:
            close_lanes([lane, *sides])
        return found

    def verify(self, job: VerificationJob) -> FullVerification:
        """Verify a variant with fresh hidden seeds, in its config alone where there is one. Raises `LaneFailure`.

        One config is no check that a record could carry: its confirmation launches all of them.
        """
        began, config = time.perf_counter(), job.config
        checked = self._verify_variant(job.node, self._lane, (Config.from_json(config),) if config else ())
        if isinstance(checked, NodeResult):
            found = FullVerification(checked.outcome, checked.feedback, checked.facts)
        else:
            found = FullVerification(Outcome.OK, "", self._result_facts(checked[0].verdict))
        return replace(found, wall_seconds=time.perf_counter() - began, device=self._device)

    def prepare_confirmation(self) -> None:
        """As for other judges, with lanes that verify other kinds of call at the same time."""
        super().prepare_confirmation()
        if not self._next_sides:
            self._next_sides = [EarlyOpener(self._open_lane) for _ in self._subjects[1:]]

    def _fresh_sides(self) -> list[SandboxLane]:
        """Those that were opened ahead, as far as they could be: without them one lane does it all."""
        found = []
        openers, self._next_sides = self._next_sides, []
        for opener in openers:
            with suppress(LaneFailure, SandboxError):
                found.append(opener())
            opener.close()
        return found

    def prepare_verification(self) -> None:
        """Find out what the base kernel accepts, which every verification needs. Raises `LaneFailure`."""
        self._base_surveys()

    def _to_close(self) -> list[Closable]:
        return [*super()._to_close(), *self._next_sides, self._tracer]

    # --- one variant ---

    def _judge_variant(
        self,
        node: Node,
        against: Node,
        against_config: Mapping[str, Any],
        fixed: Sequence[Config],
        trials: int,
        rules: RaceRules,
        lane: SandboxLane,
        sides: Sequence[SandboxLane] = (),
        *,
        contests: int = 1,
    ) -> NodeResult:
        """Verify once, then time `fixed` configs, or the best of `trials`.

        Of several contests the last one counts, and one that was not won is the last.
        """
        verified: list[VariantVerification] = []
        if node.source != self._subjects[0].source:  # what the base kernel does is what is right
            checked = self._verify_variant(node, lane, sides=sides)
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
        chosen = list(fixed) or self._tracer.best_configs(node.source, able, max(1, trials), beside)
        for _ in range(contests):
            value = self._run_race(node, against, against_config, chosen, rules, lane)
            spent += value["lane_seconds"]
            caught = [r for listed in value["caught"].values() for r in reasons_from_json(listed)]
            if caught or "winner" not in value:
                nothing = Reason(ReasonCode.FAILS, "no config could be launched at the sizes of the calls")
                return self._refused_result(caught or (nothing,), verdict, spent, timed=len(chosen))
            if log2_ratio(value["differences"])[0] >= 0:
                break
        checks = [c.to_json() for v in verified for c in v.checks]
        shown = [c.to_json() for c in chosen]
        return self._measured_result(
            value, shown, verdict, len(chosen), spent, more={"checks_passed": checks}
        )

    def _verify_variant(
        self,
        node: Node,
        lane: SandboxLane,
        fixed: Sequence[Config] = (),
        sides: Sequence[SandboxLane] = (),
    ) -> list[VariantVerification] | NodeResult:
        """What was found for every kind of call; a result where the variant is refused.

        `sides`: lanes that verify other kinds of call at the same time. Raises `LaneFailure`.
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
        asked = list(zip(self._subjects, self._base_surveys(), strict=True))
        spent, verified = 0.0, list[VariantVerification]()
        try:
            if sides:
                lanes = [lane, *sides]
                with ThreadPoolExecutor(len(lanes)) as pool:
                    answers: Iterable[VariantVerification] = list(
                        pool.map(
                            lambda n: self._verified(variant, *asked[n], lanes[n % len(lanes)]),
                            range(len(asked)),
                        )
                    )
            else:
                answers = (self._verified(variant, *one, lane) for one in asked)
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
        return verify_variant(variant, subject, known, lane, device=self._device, plan=self._plan)

    def _base_surveys(self) -> tuple[KernelSurvey, ...]:
        """What the base kernel accepts, per subject; found out once. Raises `LaneFailure`."""
        if not self._surveys:
            try:
                self._surveys = tuple(survey(s, self._lane, plan=self._plan) for s in self._subjects)
            except (SandboxError, VariantError) as error:
                raise LaneFailure(f"the base kernel: {error}", self.name) from error
        return self._surveys

    def _run_race(
        self,
        node: Node,
        against: Node,
        against_config: Mapping[str, Any],
        configs: Sequence[Config],
        rules: RaceRules,
        lane: SandboxLane,
    ) -> dict[str, Any]:
        """The timing job's value, with `lane_seconds`; forecasts learn from it. Raises `LaneFailure`."""
        known = self._base_surveys()
        first = (
            [Config.from_json(against_config)]
            if against_config
            else configs_for(self._target, against.source)
        )
        payload = {
            "subjects": [s.to_json() for s in self._subjects],
            "writes": [list(s.writes) for s in known],
            "updates": [list(s.updates) for s in known],
            "against": {"source": against.source, "configs": [c.to_json() for c in first[:1]]},
            "variant": {"source": node.source, "configs": [c.to_json() for c in configs]},
            "device": self._plan.device,
            "rules": rules.to_json(),
        }
        files = {"against.py": against.source, "variant.py": node.source}
        try:
            with exclusive(self._plan.device_lock):
                result = lane.run(Asked(_RACE_JOB, payload, files), VARIANT_LIMITS)
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
            self._tracer.learn(against.source, {first[0]: theirs})
        self._tracer.learn(node.source, timings)
        return {**value, "lane_seconds": result.seconds}
