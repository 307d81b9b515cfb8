"""Nodes of a pack, judged in a sandbox lane: screened, verified, tuned, and timed beside the incumbent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.records import Outcome
from forecast_harness.clocks import paired_comparison
from forecast_harness.clocks.devices import DeviceBusy, exclusive
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
from forecast_harness.sandbox.lane_pools import Closable
from forecast_harness.targets.packs.schema import Pack, Solution
from forecast_harness.targets.search_target import pack_of, solution_of
from forecast_harness.trials.bench import BENCH_LIMITS, BenchResult, Contest, compare_solutions
from forecast_harness.trials.configs.pack_tracing import PackTracer
from forecast_harness.trials.configs.source_configs import (
    SourceConfig,
    apply_config,
    configs_to_time,
    own_configs,
)
from forecast_harness.trials.judging.confirmation_limit import ConfirmationLimit
from forecast_harness.trials.judging.lane_judge import (
    SandboxNodeJudge,
    overall_judgement,
    reasons_from_json,
    reasons_text,
    truncated_feedback,
)
from forecast_harness.trials.judging.races.rules import QUICK_RULES, THOROUGH_RULES, RaceRules, log2_ratio
from forecast_harness.trials.protocol import ConfirmationEnded, LaneFailure
from forecast_harness.verify.cell_limits import cell_limits_for
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import check_pack, reason_of_result, verify
from forecast_harness.verify.verdict import Judgement, ReasonCode, SolutionVerdict

_RACE_JOB = "forecast_harness.trials.judging.packs.race:main"


class PackJudge(SandboxNodeJudge):
    """One sandbox lane that judges nodes of one pack. Use from one thread at a time.

    `locks`: where the locks lie that keep others from timing on the same device; by default one folder for
    the machine. Raises `LaneFailure` on opening if the lane's canary does not sing, and `RecordError` for a
    workload that is too large.
    """

    def __init__(
        self,
        target: SearchTarget,
        plan: VerificationPlan,
        folder: Path,
        *,
        number: int = 0,
        rules: RaceRules = QUICK_RULES,
        locks: Path | None = None,
    ) -> None:
        self._tracer: PackTracer | None = None
        self.contests: Callable[[Pack, VerificationPlan, paired_comparison.StoppingRules], Contest] | None = (
            None
        )
        """Contests whose clock no candidate can touch: where there are any, the first of a confirmation's two."""
        self._target, self._pack, self._rules, self._locks = target, pack_of(target), rules, locks
        self._limits = cell_limits_for(self._pack, BENCH_LIMITS, plan.device)
        super().__init__(plan, folder, number)

    def judge(self, job: NodeJob) -> NodeResult:
        """Verify the node with fresh hidden seeds, choose its config, time it beside `job.against`.

        The config is chosen among the source as it stands and at most `job.trials - 1` of its own `CONFIGS`;
        of a Triton source on a device these begin with the one that suits `job.against`, and forecasts that
        choose the others learn from what this lane has timed.
        A suspicious candidate gets the outcome `infrastructure`: it is done with, and no label. Raises
        `LaneFailure`.
        """
        began = time.perf_counter()
        found = self._judge_node(job)
        return replace(found, against=job.against.id, wall_seconds=time.perf_counter() - began)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """The whole protocol of `compare_solutions` in a lane of its own. The seed is in the answer, at ratio 0.

        Where seconds are limited, each finalist gets its share of them, one after the other, and those that
        there is no time for are left out; never the first. Raises `ConfirmationEnded` where that takes far longer.
        """
        began, ending = time.perf_counter(), ConfirmationLimit(confirm.seconds, self._plan.device)
        seed = self._solution(confirm.seed_node, confirm.configs.get(confirm.seed_node.id, {}))
        others = [n for n in confirm.nodes if n.id != confirm.seed_node.id]
        limit, rules = confirm.seconds, paired_comparison.DEFAULT_RULES
        groups = [others]
        if limit is not None:
            groups = [[node] for node in others]
            # Half of the time is for verifying, and a winner is timed twice.
            rules = replace(rules, seconds=min(rules.seconds, limit / (4 * max(1, len(others)))))
        found: dict[str, NodeResult] = {}
        lane = self._fresh_lane()
        try:
            with ending.enforced(lane.give_up):
                for done, group in enumerate(groups):
                    if ending.must_end(done):
                        break
                    found |= self._bench_finalists(group, seed, confirm, lane, rules)
        except (SandboxError, DeviceBusy, LaneFailure) as error:
            if ending.is_over and not found:
                text = f"there was no time: {ending.spent:.0f} s were not enough"
                raise ConfirmationEnded(text, self.name) from error
            if not ending.is_over:
                raise LaneFailure(str(error), self.name) from error
        finally:
            lane.close()
        each = (time.perf_counter() - began) / len(found)
        return {n: replace(j, wall_seconds=each, device_seconds=each) for n, j in found.items()}

    def _bench_finalists(
        self,
        nodes: Sequence[Node],
        seed: Solution,
        confirm: ConfirmationJob,
        lane: SandboxLane,
        rules: paired_comparison.StoppingRules,
    ) -> dict[str, NodeResult]:
        """Verdicts and contests of some finalists, and the seed's own standing."""
        solutions = [self._solution(n, confirm.configs.get(n.id, {})) for n in nodes]
        first, *rest = compare_solutions(
            self._pack,
            solutions,
            lane,
            against=seed,
            plan=self._plan,
            rules=rules,
            first_contest=None if self.contests is None else self.contests(self._pack, self._plan, rules),
        )
        if not first.verdict.accepted:
            raise LaneFailure(f"the seed was refused: {reasons_text(first.verdict.reasons)}", self.name)
        found = {confirm.seed_node.id: self._benchmark_result(first)}
        for node, entry in zip(nodes, rest, strict=True):
            found[node.id] = replace(
                self._benchmark_result(entry),
                against=confirm.seed_node.id,
                config=dict(confirm.configs.get(node.id, {})),
            )
        return found

    def verify(self, job: VerificationJob) -> FullVerification:
        """Verify a node in one config with fresh hidden seeds. Raises `LaneFailure`."""
        verdict, seconds = self._verify_node(job.node, job.config)
        wrong = "" if verdict.accepted else truncated_feedback(reasons_text(verdict.reasons))
        return FullVerification(
            verdict.outcome, wrong, self._result_facts(verdict), wall_seconds=seconds, device=self._device
        )

    def pack_problems(self) -> list[str]:
        """Why this pack cannot tell right from wrong; empty if it can. To be asked once, before a search."""
        return check_pack(self._pack, self._lane)

    def _to_close(self) -> list[Closable]:
        return [*super()._to_close(), *([] if self._tracer is None else [self._tracer])]

    # --- one node ---

    def _judge_node(self, job: NodeJob) -> NodeResult:
        node = job.node
        listed, note = self._own_configs(node.source)
        verdict, spent = self._verify_node(node, {})
        if not verdict.accepted:
            return self._refused_result(verdict.reasons, verdict, spent, note)
        configs = self._choose_configs(job, listed, max(1, job.trials))
        timed = 0
        # If a winner turns out to be wrong, the source as it stands has been verified already.
        for running in (configs, ({},)):
            if timed and (len(configs) == 1 or timed + len(running) > job.trials):
                break
            value = self._run_race(job, running)
            timed, spent = timed + len(running), spent + value["lane_seconds"]
            caught = {int(n): reasons_from_json(r) for n, r in value["caught"].items()}
            for reasons in caught.values():
                if overall_judgement(reasons) is not Judgement.REJECTED:
                    return self._refused_result(reasons, verdict, spent, note, timed)
            if "winner" not in value:
                reasons = next(iter(caught.values()))
                continue
            config = running[value["winner"]]
            if config:
                checked, seconds = self._verify_node(node, config)
                spent += seconds
                if checked.judgement is Judgement.SUSPICIOUS:
                    return self._refused_result(checked.reasons, checked, spent, note, timed)
                if not checked.accepted:
                    reasons = checked.reasons
                    continue
            self._record_timings(job, running, value)
            stage = "confirm" if job.confirm else "time"
            return self._measured_result(value, running, verdict, timed, spent, note, stage=stage)
        return self._refused_result(reasons, verdict, spent, note, timed)

    def _own_configs(self, source: str) -> tuple[list[SourceConfig], str]:
        """The configs that a source lists and that change it, and a remark where its list cannot be used."""
        return own_configs(source)

    def _choose_configs(self, job: NodeJob, listed: Sequence[SourceConfig], n: int) -> Sequence[SourceConfig]:
        """At most `n` configs to time; those of Triton sources on a device are forecast."""
        return configs_to_time(job.node.source, listed, n, job.against_config, self._tracer_for(job.node))

    def _tracer_for(self, node: Node) -> PackTracer | None:
        """What forecasts a node's configs; None for what it cannot read."""
        if self._plan.device == "cpu" or node.language != "triton":
            return None
        if self._tracer is None:
            self._tracer = PackTracer(self._target, self._folder)
        return self._tracer

    def _record_timings(
        self, job: NodeJob, configs: Sequence[SourceConfig], value: Mapping[str, Any]
    ) -> None:
        """Have later choices heed a race, of both sides: another lane may have judged the rival."""
        if (tracer := self._tracer_for(job.against)) is not None:
            theirs = [s for key, s in value["seconds"].items() if key.startswith(f"{INCUMBENT}:")]
            tracer.learn(job.against.source, [(job.against_config, theirs)])
        if (tracer := self._tracer_for(job.node)) is not None:
            tracer.learn(job.node.source, [(configs[int(n)], s) for n, s in value["timed"].items()])

    def _verify_node(self, node: Node, config: SourceConfig) -> tuple[SolutionVerdict, float]:
        try:
            verdict = verify(self._pack, self._solution(node, config), self._lane, plan=self._plan)
        except SandboxError as error:
            raise LaneFailure(str(error), self.name) from error
        if verdict.judgement is Judgement.INFRASTRUCTURE:
            raise LaneFailure(reasons_text(verdict.reasons), self.name)
        return verdict, verdict.seconds

    def _run_race(self, job: NodeJob, configs: Sequence[SourceConfig]) -> dict[str, Any]:
        """The timing job's value, with `lane_seconds`. Raises `LaneFailure`."""
        contestants: list[dict[str, str]] = []
        files: dict[str, str] = {}
        against = self._solution(job.against, job.against_config)
        candidates = [self._solution(job.node, c) for c in configs]
        for n, one in enumerate([against, *candidates]):
            files[f"{n}/solution.py"] = one.source
            contestants.append(
                {"file": f"{n}/solution.py", "entry": one.entry, "language": str(one.language)}
            )
        payload = {
            "pack": self._pack.to_json(),
            "plan": self._plan.to_json(),
            "rules": (THOROUGH_RULES if job.confirm else self._rules).to_json(),
            "against": contestants[0],
            "configs": contestants[1:],
        }
        try:
            with exclusive(self._plan.device_lock, folder=self._locks):
                result = self._lane.run(Asked(_RACE_JOB, payload, files), self._limits)
        except (SandboxError, DeviceBusy) as error:
            raise LaneFailure(str(error), self.name) from error
        if result.status is not JobStatus.OK:
            reason = reason_of_result(result)
            if reason.code is ReasonCode.HARNESS:
                raise LaneFailure(reason.detail, self.name)
            # No cell's fault comes this far: the job's own status is a fault while a cell was being opened.
            return {"caught": {"0": [reason.to_json()]}, "lane_seconds": result.seconds}
        value: dict[str, Any] = result.value
        if "incumbent" in value:
            why = reasons_text(reasons_from_json(value["incumbent"]))
            raise LaneFailure(f"the node to be timed beside could not be timed: {why}", self.name)
        return {**value, "lane_seconds": result.seconds}

    def _benchmark_result(self, entry: BenchResult) -> NodeResult:
        """One solution's result in `compare_solutions`."""
        if not entry.verdict.accepted:
            refused = self._refused_result(entry.verdict.reasons, entry.verdict, 0.0)
            return replace(refused, stage="confirm")
        last = entry.duels[-1] if entry.duels else {"differences": [0.0]}
        ratio, error = log2_ratio(last["differences"])
        return NodeResult(
            Outcome.OK,
            log2_ratio=ratio,
            sd=error,
            seconds={n: 1e-3 * label.median_ms for n, label in entry.labels.items()},
            measurements=1,
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

    def _solution(self, node: Node, config: SourceConfig) -> Solution:
        solution = solution_of(self._target, node)
        return replace(solution, source=apply_config(solution.source, config))
