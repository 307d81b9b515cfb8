"""Nodes of a search judged through machine code: a `NodeJudge` whose candidates run no Python where the clock is.

Many threads share one device: each compiles, checks and times one node, and the runner takes one request after
the other, so the device works while others compile. A node that is faster than the one beside it is verified in
full in a sandbox before it is called so. What is no solution of kernels alone is judged as host code.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_harness.machine_code.compile_workers import BuildRequest, BuildResult
from forecast_harness.machine_code.gates import FAULT_OUTCOMES, SourceBuilder, TrialCall, first_violation
from forecast_harness.machine_code.records import Program
from forecast_harness.machine_code.runner.client import ProgramFault, RunnerClient, RunnerLost, TimingAnswer
from forecast_harness.machine_code.runner.session import PAUSES, TimingLimits
from forecast_harness.search.history.events import ConfirmationJob, NodeJob
from forecast_harness.search.interfaces import LaneFailure, NodeJudge
from forecast_harness.search.judging.lane_judge import truncated_feedback
from forecast_harness.search.judging.race_rules import log2_ratio
from forecast_harness.search.judging.source_configs import (
    SourceConfig,
    apply_config,
    configs_of,
    diverse_configs,
)
from forecast_harness.search.records import Node, NodeResult

_HOPELESS = 1.3
"""Times the seconds of the node beside it, at which a config is given up."""
_RACE = TimingLimits(least=3 * PAUSES, most=6 * PAUSES, checks=0)
_BLOCK = 4
"""Launches that are taken together, where they are not behind pauses."""

FullVerification = Callable[[Node, SourceConfig], str]
"""Verifies a node in one config in full, in fresh processes; what is wrong, or ''."""


class NodeRefused(Exception):
    """A node's own failure; `outcome` is its label."""

    def __init__(self, outcome: Outcome, stage: str, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.stage, self.detail = outcome, stage, detail


@dataclass(frozen=True)
class TrialCalls:
    """The calls of a target: `small` ones are checked, `timed` ones, by workload, are raced."""

    small: TrialCall
    timed: Mapping[str, TrialCall]


class MachineCodeJudge:
    """Judges nodes of one target on one device. `judge` may be called from many threads.

    `host` makes the judge for all that is no machine code, once it is needed: host code, and confirmations.
    """

    def __init__(
        self,
        runner: RunnerClient,
        builder: SourceBuilder,
        calls: TrialCalls,
        entry: str,
        *,
        verify: FullVerification,
        host: Callable[[], NodeJudge],
        device: str = "",
        implausible: Callable[[str, float], str] = lambda workload, seconds: "",
    ) -> None:
        """`implausible`: why one launch of a workload cannot have taken so few seconds, or ''."""
        self._runner, self._builder, self._calls, self._entry = runner, builder, calls, entry
        self._verify, self._make_host, self._device = verify, host, device
        self._implausible = implausible
        self._host: NodeJudge | None = None
        self._cache_lock = threading.Lock()
        self._device_lock = threading.RLock()
        """Held by whoever uses the device: what others do there meanwhile would be in a time."""
        self._built: dict[str, Future[BuildResult]] = {}

    def judge(self, job: NodeJob) -> NodeResult:
        """Check, tune and time a node beside `job.against`. Raises `LaneFailure`."""
        began = time.perf_counter()
        try:
            found = self._judged(job)
        except NodeRefused as refused:
            found = self._result(refused.outcome, refused.stage, refused.detail)
        except RunnerLost as lost:
            raise LaneFailure(str(lost), self._device) from lost
        if found is None:
            with self._device_lock:
                found = self._host_judge().judge(job)
        return replace(found, against=job.against.id, wall_seconds=time.perf_counter() - began)

    def confirm(self, confirm: ConfirmationJob) -> Mapping[str, NodeResult]:
        """As the judge of host code does: in a lane of its own, with the whole protocol. Raises `LaneFailure`."""
        with self._device_lock:
            return self._host_judge().confirm(confirm)

    def close(self) -> None:
        """End the judge of host code; another is made when it is needed. Runner and builder are their owner's."""
        with self._device_lock:
            host, self._host = self._host, None
        if host is not None:
            host.close()

    def _host_judge(self) -> NodeJudge:
        if self._host is None:
            self._host = self._make_host()
        return self._host

    # --- one node ---

    def _judged(self, job: NodeJob) -> NodeResult | None:
        """None for host code."""
        if job.node.language != "triton" or job.against.language != "triton":
            return None
        configs, note = self._configs(job)
        against = self._program(job.against, job.against_config)
        first = self._build(job.node, configs[0])
        beside = against.result()
        if beside.host_code or first.result().host_code:
            return None
        if not beside.programs:
            raise LaneFailure(
                f"the node to be timed beside: {beside.error or beside.infrastructure}", self._device
            )
        rivals = dict(zip(self._calls.timed, beside.programs[1:], strict=True))
        bounds = {n: self._seconds(rivals[n], n, 0.0) for n in rivals}
        timed: dict[int, dict[str, float]] = {}
        programs: dict[int, Sequence[Program]] = {}
        failure = NodeRefused(Outcome.COMPILE_ERROR, "compile", "no config was built")
        building = [first]
        for number in range(len(configs)):
            try:
                programs[number] = self._checked(building[number].result())
                timed[number] = {
                    n: self._seconds(p, n, bounds[n] * _HOPELESS)
                    for n, p in zip(self._calls.timed, programs[number][1:], strict=True)
                }
            except NodeRefused as refused:
                failure = refused
                if number == 0 and refused.outcome is Outcome.INCORRECT:
                    raise
            if number == 0:
                building += [self._build(job.node, c) for c in configs[1:]]
        if not timed:
            raise failure
        best = min(timed, key=lambda n: sum(math.log(s) for s in timed[n].values()))
        return self._raced(job, configs[best], programs[best], rivals, len(timed), note)

    def _configs(self, job: NodeJob) -> tuple[Sequence[SourceConfig], str]:
        try:
            source = job.node.source
            listed = [c for c in configs_of(source) if apply_config(source, c) != source]
        except RecordError as error:
            return ({},), f"CONFIGS were not used: {error}"
        return diverse_configs([{}, *listed], max(1, job.trials)), ""

    def _raced(
        self,
        job: NodeJob,
        config: SourceConfig,
        programs: Sequence[Program],
        rivals: Mapping[str, Program],
        timed: int,
        note: str,
    ) -> NodeResult:
        """The best config beside the other node; verified in full where it is the faster one."""
        blocks: list[list[float]] = []
        seconds, theirs = {}, {}
        for name, program in zip(self._calls.timed, programs[1:], strict=True):
            answer = self._timed([rivals[name], program], name, _RACE)
            pairs = [_block_means(s, answer.recorded) for s in answer.seconds]
            blocks.append([math.log(a / b) for a, b in zip(*pairs, strict=True)])
            theirs[name], seconds[name] = (statistics.median(p) for p in pairs)
            if said := self._implausible(name, seconds[name]):
                raise NodeRefused(Outcome.INFRASTRUCTURE, "time", f"impossible: {said}")
        least = min(len(b) for b in blocks)
        ratio, error = log2_ratio([statistics.fmean(b[n] for b in blocks) for n in range(least)])
        if ratio < 0:
            with self._device_lock:
                wrong = self._verify(job.node, config)
            if wrong:
                raise NodeRefused(Outcome.INCORRECT, "verify", wrong)
        each = [f"{n} {1e6 * s:.1f} us against {1e6 * theirs[n]:.1f} us" for n, s in seconds.items()]
        word = "slower" if ratio > 0 else "faster"
        text = f"Right, and {2 ** abs(ratio):.3f} times {word}: {'; '.join(each)}."
        text += f" Its best config is {dict(config)}." if config else ""
        return NodeResult(
            Outcome.OK,
            log2_ratio=ratio,
            sd=error,
            seconds=seconds,
            config=dict(config),
            measurements=timed,
            device=self._device,
            stage="time",
            feedback=truncated_feedback(f"{text} {note}"),
            facts={"path": "machine code", "verified_in_full": ratio < 0, "blocks": least},
        )

    def _result(self, outcome: Outcome, stage: str, detail: str) -> NodeResult:
        facts: dict[str, Any] = {"path": "machine code"}
        return NodeResult(
            outcome,
            measurements=1,
            device=self._device,
            stage=stage,
            feedback=truncated_feedback(detail),
            facts=facts,
        )

    # --- building, checking, timing ---

    def _program(self, node: Node, config: SourceConfig) -> Future[BuildResult]:
        """Of a node that others are timed beside: built once."""
        key = repr((node.id, sorted(config.items())))
        with self._cache_lock:
            if key not in self._built:
                self._built[key] = self._build(node, config)
            return self._built[key]

    def _build(self, node: Node, config: SourceConfig) -> Future[BuildResult]:
        cases = (self._calls.small.arguments, *(c.arguments for c in self._calls.timed.values()))
        source = apply_config(node.source, config)
        return self._builder.submit(BuildRequest(node.id, source, self._entry, cases))

    def _checked(self, built: BuildResult) -> Sequence[Program]:
        if built.infrastructure:
            raise LaneFailure(built.infrastructure, self._device)
        if built.error or built.host_code:
            raise NodeRefused(Outcome.COMPILE_ERROR, "compile", built.error or built.host_code)
        call, program = self._calls.small, built.programs[0]
        try:
            with self._device_lock:
                answer = self._runner.check(program, call.given)
        except ProgramFault as fault:
            raise NodeRefused(FAULT_OUTCOMES[fault.kind], "verify", fault.detail) from fault
        if said := first_violation(answer.violations) or call.wrong(program, answer.launches):
            raise NodeRefused(Outcome.INCORRECT, "verify", said)
        return built.programs

    def _seconds(self, program: Program, workload: str, bound_s: float) -> float:
        """Seconds of one launch; of the fastest, where that is beyond the bound."""
        answer = self._timed([program], workload, TimingLimits(bound_s=bound_s, checks=0))
        return statistics.median(_block_means(answer.seconds[0], answer.recorded))

    def _timed(self, programs: Sequence[Program], workload: str, limits: TimingLimits) -> TimingAnswer:
        try:
            with self._device_lock:
                answer = self._runner.time(programs, self._calls.timed[workload].given, limits)
        except ProgramFault as fault:
            if fault.candidate != programs[-1].candidate:
                raise LaneFailure(f"the node beside it failed: {fault.detail}", self._device) from fault
            raise NodeRefused(FAULT_OUTCOMES[fault.kind], "time", fault.detail) from fault
        if said := first_violation(answer.violations):
            raise NodeRefused(Outcome.INCORRECT, "time", said)
        return answer


def _block_means(seconds: Sequence[float], recorded: bool) -> list[float]:
    """Means of launches that are taken together: behind each pause once, or some in a row."""
    size = PAUSES if recorded else min(_BLOCK, len(seconds))
    return [statistics.fmean(seconds[n : n + size]) for n in range(0, len(seconds) - size + 1, size)]
