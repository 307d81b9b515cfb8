"""Solutions of a pack, judged in a sandbox lane: verified, tuned, and timed beside the incumbent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_harness.clocks.paired_comparison import DEFAULT_RULES, StoppingRules
from forecast_harness.records import ConfirmationJob, Node, NodeJob, NodeResult, SearchTarget
from forecast_harness.sandbox.api import SandboxError, SandboxJob
from forecast_harness.targets.packs.schema import Language, Pack, Solution
from forecast_harness.targets.search_target import pack_of, solution_of
from forecast_harness.trials.bench import BENCH_LIMITS, BenchResult, SolutionBench, SolutionContest
from forecast_harness.trials.configs.source_configs import (
    SourceConfig,
    apply_config,
    configs_to_time,
    own_configs,
)
from forecast_harness.trials.confirmation import ConfirmationLanes, ConfirmationLimit
from forecast_harness.trials.judge import SandboxJudge, SandboxTrial
from forecast_harness.trials.protocol import LaneFailure
from forecast_harness.trials.race import HOST_RULES, QUICK_RULES, THOROUGH_RULES, RaceRules, log2_ratio
from forecast_harness.trials.verdict import (
    Contest,
    call_facts,
    overall_judgement,
    reasons_from_json,
    reasons_text,
)
from forecast_harness.verify.plan import VerificationPlan, cell_limits_for
from forecast_harness.verify.run import check_pack, verify
from forecast_harness.verify.verdict import Judgement, Reason, ReasonCode, SolutionVerdict

_FIRST_CASES = 6
"""Launches with other shapes, values and layouts before a source is timed."""
_CLEAR_ERRORS = 2.0
"""Standard errors by which a source has to be ahead to count so: else busy machines had one lucky rival after another
verified in full."""
_MOST_OTHER_CALLS = 4
_OTHER_RULES = replace(QUICK_RULES, most=16, hopeless=100.0, seconds=2.0, wall=6.0)
"""The most workloads that are timed alone, and the rules of their races."""


def first_plan(plan: VerificationPlan) -> VerificationPlan:
    """The plan by which a source is verified before it is timed."""
    return replace(plan, cases=_FIRST_CASES, timed=0, launches=0)


_COMPILED_S = 20.0
"""Seconds that have to be left of a confirmation for the seed to be timed under `torch.compile`, too."""
_COMPILED = {
    False: "import torch as _torch\n{entry} = _torch.compile({entry})\n",
    True: """class _Compiled({entry}):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compile()


{entry} = _Compiled
""",
}
"""Text behind a source whose entry is a class, or is none."""


def compiled_solution(solution: Solution) -> Solution | None:
    """A PyTorch solution under `torch.compile`; None for one in another language, or that compiles itself."""
    if solution.language is not Language.TORCH or "torch.compile" in solution.source:
        return None
    text = _COMPILED[f"class {solution.entry}" in solution.source].format(entry=solution.entry)
    return replace(solution, name="torch.compile", source=f"{solution.source}\n\n{text}")


class PackJudge(SandboxJudge):
    """A `SandboxJudge` of solutions of one pack.

    The config of a node is chosen among the source as it stands and at most `job.trials - 1` of its own `CONFIGS`; of a
    Triton source on a device these begin with the one that suits `job.against`. A
    suspicious candidate gets the outcome `infrastructure`: it is done with, and no label.
    Raises `RecordError` on opening for a workload that is too large.
    """

    verifies_seed_first = True

    def __init__(
        self,
        target: SearchTarget,
        plan: VerificationPlan,
        folder: Path,
        *,
        number: int = 0,
        rules: RaceRules | None = None,
    ) -> None:
        self.contests: Callable[[Pack, VerificationPlan, StoppingRules], SolutionContest] | None = None
        """Contests whose clock no candidate can touch: where there are any, the first of a confirmation's two."""
        self._target, self._pack = target, pack_of(target)
        self._limits = cell_limits_for(self._pack, BENCH_LIMITS, plan.device)
        usual = HOST_RULES if plan.device == "cpu" else QUICK_RULES
        super().__init__(plan, folder, number, rules or usual, THOROUGH_RULES)

    def pack_problems(self) -> list[str]:
        """Why this pack cannot tell right from wrong; empty if it can. To be asked once, before a search."""
        return check_pack(self._pack, self._lane)

    # --- the stages ---

    def _read(self, trial: SandboxTrial) -> None:
        """Raises `Refusal` for a list of configs that cannot be read."""
        try:
            trial.configs = self._own_configs(trial.job.node.source)
        except RecordError as error:
            refusal = self._refusal(trial, (Reason(ReasonCode.FAILS, str(error)),))
            refusal.stage = "compile"
            raise refusal from error

    def _verify(self, trial: SandboxTrial) -> None:
        """The source as it stands, with few cases: what turns out to be ahead is verified in full when it would lead.

        A source that others are timed beside is verified in full at once.
        """
        in_full = trial.job.node.id == trial.job.against.id
        plan = self._plan if in_full else first_plan(self._plan)
        trial.verification = self._verdict(trial, {}, plan)
        trial.facts["verified_in_full"] = in_full
        if not trial.verification.accepted:
            raise self._refusal(trial, trial.verification.reasons)

    def _choose(self, trial: SandboxTrial) -> Sequence[SourceConfig]:
        return self._choose_configs(trial.job, trial.configs, max(1, trial.job.trials))

    def _race(self, trial: SandboxTrial, configs: Sequence[SourceConfig]) -> Contest:
        """If a winner turns out to be wrong, the source as it stands runs alone. One not shown to be ahead is not."""
        for choice in (configs, ({},)):
            measurements = trial.measurements
            if measurements and (len(configs) == 1 or measurements + len(choice) > trial.job.trials):
                break
            race = self._race_job(trial.job, choice, trial.rules)
            value = self._run_race(race, trial.lanes[0], self._limits)
            trial.measurements += len(choice)
            trial.device_seconds += value["lane_seconds"]
            caught = [reasons_from_json(r) for r in value["caught"].values()]
            for reasons in caught:
                if overall_judgement(reasons) is not Judgement.REJECTED:
                    raise self._refusal(trial, reasons)
            if "winner" not in value:
                reasons = caught[0]
                continue
            contest = Contest.of_race(value, choice)
            is_ahead = contest.log2_ratio + _CLEAR_ERRORS * contest.error < 0.0
            return contest if is_ahead else replace(contest, log2_ratio=max(0.0, contest.log2_ratio))
        raise self._refusal(trial, reasons)

    def _verify_in_full(
        self, node: Node, config: Mapping[str, Any]
    ) -> tuple[SolutionVerdict, dict[str, Any]]:
        trial = self._trial(NodeJob("", node, node, {}, self._target, 0, 1), self._rules, [self._lane])
        trial.verification = self._verdict(trial, config, self._plan)
        if not trial.verification.accepted:
            raise self._refusal(trial, trial.verification.reasons)
        return trial.verification, {}

    def _finalists(
        self, confirm: ConfirmationJob, limit: ConfirmationLimit, lanes: ConfirmationLanes
    ) -> Callable[[Node], NodeResult]:
        """The whole protocol of `SolutionBench` in a lane of its own; a finalist gets its share of limited seconds."""
        rules, seed = DEFAULT_RULES, confirm.seed_node
        if confirm.seconds is not None:
            # Half of the time is for verifying, and a winner is timed twice.
            share = confirm.seconds / (4 * max(1, len(confirm.nodes) - 1))
            rules = replace(rules, seconds=min(rules.seconds, share))
        first = None if self.contests is None else self.contests(self._pack, self._plan, rules)
        bench = SolutionBench(self._pack, lanes.verifying[0], self._plan, rules, first_contest=first)
        incumbent = bench.enter(self._solution(seed, confirm.configs.get(seed.id, {})))
        if not incumbent.verdict.accepted:
            raise LaneFailure(f"the seed was refused: {reasons_text(incumbent.verdict.reasons)}", self.name)

        faster: list[str] = []

        def confirm_node(node: Node) -> NodeResult:
            began, config = time.perf_counter(), confirm.configs.get(node.id, {})
            entry = bench.incumbent if node.id == seed.id else bench.enter(self._solution(node, config))
            assert entry is not None
            job = NodeJob("", node, seed, {}, self._target, 0, 1, confirm=True)
            trial = self._trial(job, self._thorough, lanes.verifying, fixed=[config])
            trial.verification, trial.device_seconds = entry.verdict, time.perf_counter() - began
            result = self._bench_verdict(trial, entry)
            if node.id == seed.id and faster:
                return replace(
                    result, facts={**result.facts, **self._compiled_seconds(bench, seed, confirm, limit)}
                )
            if result.evidence != "confirmed" or node.id == seed.id or limit.must_end(1):
                return result
            faster.append(node.id)
            job = replace(job, against_config=confirm.configs.get(seed.id, {}))
            assert bench.incumbent is not None
            beside = {n: t.median_ms for n, t in bench.incumbent.labels.items()}
            ratios = {n: math.log2(1e3 * s / beside[n]) for n, s in result.seconds.items() if n in beside}
            return replace(result, facts={**result.facts, **self._each_call(trial, job, config, ratios)})

        return confirm_node

    def _compiled_seconds(
        self, bench: SolutionBench, seed: Node, confirm: ConfirmationJob, limit: ConfirmationLimit
    ) -> dict[str, Any]:
        """`compiled`: a PyTorch seed's seconds under `torch.compile`, by workload; none where it fails."""
        solution = compiled_solution(self._solution(seed, confirm.configs.get(seed.id, {})))
        if solution is None or limit.left < _COMPILED_S:
            return {}
        with suppress(SandboxError):
            return {"compiled": bench.seconds_of(solution)}
        return {}

    def _each_call(
        self, trial: SandboxTrial, job: NodeJob, config: SourceConfig, first_ratios: Mapping[str, float]
    ) -> dict[str, Any]:
        """A source that won beside the seed, at single workloads: see `call_facts`. Raises `Refusal` for a wrong one.

        `first_ratios`: log2 ratios at the workloads that the contest timed, each side's median on its own; a workload
        that seems slower there is timed alone, as are workloads that no search times.
        """
        ratios = {n: (ratio, 0.0) for n, ratio in first_ratios.items() if ratio <= 0.0}
        others = [w for w in self._pack.workloads if w.name not in ratios]
        others = [w for w in others if w.name in first_ratios or not w.large]
        others.sort(key=lambda w: w.name not in first_ratios)
        for workload in others[:_MOST_OTHER_CALLS]:
            pack = self._pack.with_(workloads=(replace(workload, host=False, large=False),))
            with suppress(LaneFailure):  # a machine that is too busy to tell says nothing
                value = self._run_race(
                    self._race_job(job, [config], _OTHER_RULES, pack), trial.lanes[0], self._limits
                )
                if caught := [r for reasons in value["caught"].values() for r in reasons_from_json(reasons)]:
                    raise self._refusal(trial, caught)
                ratios[workload.name] = log2_ratio(value["differences"])
        return call_facts(ratios if len(self._pack.workloads) > 1 else {})

    def _bench_verdict(self, trial: SandboxTrial, entry: BenchResult) -> NodeResult:
        """One solution's standing in a bench. Raises `Refusal`."""
        if not entry.verdict.accepted:
            raise self._refusal(trial, entry.verdict.reasons)
        last = entry.duels[-1] if entry.duels else {"differences": [0.0]}
        ratio, error = log2_ratio(last["differences"])
        return NodeResult(
            Outcome.OK,
            log2_ratio=ratio,
            sd=error,
            seconds={n: 1e-3 * label.median_ms for n, label in entry.labels.items()},
            config=dict(trial.fixed[0]),
            measurements=1,
            device_seconds=trial.device_seconds,
            device=self._device,
            stage="confirm",
            facts={
                **self._result_facts(entry.verdict),
                "checked": entry.checked.to_json(),
                "standing": entry.outcome,
                "gain": entry.gain,
                "interval": last.get("interval"),
                "contests": len(entry.duels),
            },
        )

    # --- steps that differ in other languages ---

    def _own_configs(self, source: str) -> list[SourceConfig]:
        """The configs that a source lists and that change it. Raises `RecordError` for a malformed list."""
        return own_configs(source)

    def _choose_configs(
        self, job: NodeJob, configs: Sequence[SourceConfig], n: int
    ) -> Sequence[SourceConfig]:
        """At most `n` configs to time."""
        is_compiled = self._plan.device != "cpu" and job.node.language == "triton"
        return configs_to_time(configs, n, job.against_config if is_compiled else {})

    def _solution(self, node: Node, config: SourceConfig) -> Solution:
        solution = solution_of(self._target, node)
        return replace(solution, source=apply_config(solution.source, config))

    def _verify_node(self, node: Node, config: SourceConfig, plan: VerificationPlan) -> SolutionVerdict:
        return verify(self._pack, self._solution(node, config), self._lane, plan=plan)

    # ---

    def _verdict(self, trial: SandboxTrial, config: SourceConfig, plan: VerificationPlan) -> SolutionVerdict:
        try:
            verdict = self._verify_node(trial.job.node, config, plan)
        except SandboxError as error:
            raise LaneFailure(str(error), self.name) from error
        if verdict.judgement is Judgement.INFRASTRUCTURE:
            raise LaneFailure(reasons_text(verdict.reasons), self.name)
        trial.device_seconds += verdict.seconds
        return verdict

    def _race_job(
        self, job: NodeJob, configs: Sequence[SourceConfig], rules: RaceRules, pack: Pack | None = None
    ) -> SandboxJob:
        contestants: list[dict[str, str]] = []
        files: dict[str, str] = {}
        against = self._solution(job.against, job.against_config)
        for n, solution in enumerate([against, *(self._solution(job.node, c) for c in configs)]):
            file = f"{n}/solution.py"
            files[file] = solution.source
            contestants.append({"file": file, "entry": solution.entry, "language": str(solution.language)})
        payload = {
            "pack": (pack or self._pack).to_json(),
            "plan": self._plan.to_json(),
            "rules": rules.to_json(),
            "against": contestants[0],
            "configs": contestants[1:],
        }
        return SandboxJob("forecast_harness.trials.race_job:race_pack", payload, files)
