"""Judges of a pack's nodes on one CUDA device, through machine code: what a search takes for its lanes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError, SettingsError
from forecast_harness.machine_code.compile_workers import CompileWorkers
from forecast_harness.machine_code.node_judging import FullVerification, MachineCodeJudge, TrialCalls
from forecast_harness.machine_code.pack_calls import PackCalls
from forecast_harness.machine_code.runner.client import RunnerClient
from forecast_harness.machine_code.runner.driver import LIBRARY
from forecast_harness.packs.schema import Language, Pack
from forecast_harness.sandbox.jobs import SandboxError
from forecast_harness.sandbox.lane import SandboxLane
from forecast_harness.search.interfaces import LaneFailure, NodeJudge
from forecast_harness.search.judging.devices import device_slug, verification_plan
from forecast_harness.search.judging.source_configs import SourceConfig, apply_config
from forecast_harness.search.lanes.local_lanes import LocalJudgePool
from forecast_harness.search.records import Node, SearchTarget
from forecast_harness.search.targets import pack_of, solution_of
from forecast_harness.timing import device as devices
from forecast_harness.timing.plausibility import impossible_time
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.run import verify

_JUDGES_PER_WORKER = 2
"""Nodes under way for each compile worker, so that none waits while nodes are on the device."""


def facts_for_workers(runner: RunnerClient) -> Mapping[str, Any]:
    """What compile workers are told of a runner's device."""
    blocks = int(runner.facts["multiprocessors"])
    return {
        "arch": int(runner.facts["arch"]),
        "name": runner.facts["name"],
        "properties": {"multiprocessor_count": blocks},
    }


@contextmanager
def open_pack_judges(
    target: SearchTarget, *, folder: Path, index: int = 0, workers: int = 0, library: str = LIBRARY
) -> Iterator[LocalJudgePool]:
    """Judges at work on the device `index`: a pool whose lanes share its runner and its compile workers.

    `workers`: compile workers; 0 for all processors. Raises `RecordError` for a target that is no pack of the own
    format, `SettingsError` for a device that is not there, `SandboxError` where runner or sandbox do not start.
    """
    pack, plan = pack_of(target), verification_plan("cuda", index)
    with ExitStack() as stack:
        runner = stack.enter_context(RunnerClient(library, index))
        if runner.facts["name"] != devices.identity(index)[0]:
            raise SettingsError(
                f"the runner has {runner.facts['name']!r} for device {index}, the driver's tools have "
                f"{devices.identity(index)[0]!r}: set CUDA_DEVICE_ORDER=PCI_BUS_ID and leave "
                "CUDA_VISIBLE_DEVICES unset"
            )
        builder = stack.enter_context(CompileWorkers(facts_for_workers(runner), workers))
        scratch = folder / "machine-code"
        scratch.mkdir(parents=True, exist_ok=True)
        calls = PackCalls(pack, scratch)
        timed = {
            w.name: calls.draw({n: int(v) for n, v in w.axes.items()})
            for w in pack.timed_workloads("cuda", Language.TRITON)
        }

        def implausible(workload: str, seconds: float) -> str:
            case = timed[workload].case
            return impossible_time(seconds, case.moved_bytes, case.flops, plan.peaks)

        def host() -> NodeJudge:
            from forecast_harness.search.judging.pack_judge import PackJudge

            return PackJudge(target, plan, folder / "host", number=index)

        judge = MachineCodeJudge(
            runner,
            builder,
            TrialCalls(calls.draw(), timed),
            target.entry,
            verify=_verifier(target, pack, plan, folder, stack),
            host=host,
            device=plan.uuid or device_slug("cuda", index),
            implausible=implausible,
        )
        stack.callback(judge.close)
        pool = LocalJudgePool(lambda number: judge, _JUDGES_PER_WORKER * builder.count)
        stack.callback(pool.close)
        yield pool


def _verifier(
    target: SearchTarget, pack: Pack, plan: VerificationPlan, folder: Path, stack: ExitStack
) -> FullVerification:
    """Verifies in a sandbox lane with the device, which is opened when it is first needed."""
    lanes: list[SandboxLane] = []

    def found(node: Node, config: SourceConfig) -> str:
        solution = solution_of(target, node)
        solution = replace(solution, source=apply_config(solution.source, config))
        try:
            if not lanes:
                where = plan.uuid or str(plan.index)
                lanes.append(stack.enter_context(SandboxLane(device=where, scratch=folder)))
            verdict = verify(pack, solution, lanes[0], plan=plan)
        except (SandboxError, ForecastAutotuneError) as error:
            raise LaneFailure(str(error), plan.uuid) from error
        if verdict.accepted:
            return ""
        return "; ".join(f"{r.code}: {r.detail}" for r in verdict.reasons) or "refused"

    return found
