"""Opens judges through machine code: a runner for each device, compile workers for all of them together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from forecast_autotune.errors import ForecastAutotuneError
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.runner.client import (
    NoMachineCodePath,
    RunnerClient,
    facts_for_workers,
    open_healthy_runner,
)
from forecast_harness.records import Node, NodeJob, SearchTarget, TargetKind
from forecast_harness.targets.search_target import is_cuda_kernel
from forecast_harness.trials.cuda import CudaJudge
from forecast_harness.trials.devices import device_slug
from forecast_harness.trials.host_judges import open_judge
from forecast_harness.trials.judge import SandboxJudge
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.machine_code.judge import MachineCodeJudge
from forecast_harness.trials.machine_code.kernel_trials import KernelTrials
from forecast_harness.trials.machine_code.pack_contest import PackContests
from forecast_harness.trials.machine_code.targets import CudaTrials, PackTrials
from forecast_harness.trials.packs import PackJudge
from forecast_harness.verify.plan import VerificationPlan

AnyTrials = KernelTrials | PackTrials | CudaTrials
_JUDGES_PER_WORKER = 2
"""Nodes under way for each compile worker, so that none waits while nodes are on the device."""


class MachineCodeLanes(LocalJudgePool):
    """Judges at work, many for each device; closing it ends runners and compile workers, too.

    One lane more than there are nodes at a time: full verification goes on beside them.
    """

    def __init__(self, judges: list[MachineCodeJudge], count: int, held: ExitStack) -> None:
        self._held, self._judges = held, judges
        super().__init__(lambda number: judges[number % len(judges)], count + 1)

    @property
    def capacity(self) -> int:
        """Nodes that are judged at once."""
        return max(1, super().capacity - 1)

    @property
    def problem(self) -> str:
        """Why no judge of host code verifies and confirms sources of the target, once one was asked to."""
        return next((judge.refusal for judge in self._judges if judge.refusal), "")

    def close(self) -> None:
        """End all."""
        for judge in self._judges:
            judge.end()
        try:
            super().close()
        finally:
            self._held.close()


def open_machine_code_lanes(
    target: SearchTarget,
    seed: Node,
    plans: list[VerificationPlan],
    *,
    folder: Path,
    workers: int = 0,
    insist: bool = False,
    on_failure: Callable[[str], None] = lambda reason: None,
    progress: Callable[[str], None] = lambda stage: None,
) -> MachineCodeLanes:
    """Judges of a target on these devices, whose runners have proved their health with kernels of their own and
    with the seed.

    `workers`: compile workers of all devices together; 0 for all processors. `insist`: a failure of our own later on
    ends a lane, instead of having the node judged as host code; `on_failure` is told why. `progress` is told what is
    being done.

    Raises `NoMachineCodePath` for a target, device or runner that is not up to it.
    """
    with ExitStack() as stack:
        trials_type = _trials_of(target)
        if (wanted := trials_type.language) != seed.language:
            raise NoMachineCodePath(
                f"the seed is written in {seed.language}, and only {wanted} is compiled so"
            )
        try:
            progress(
                f"starting {f'{len(plans)} runners' if len(plans) > 1 else 'a runner'} and compile workers"
            )
            builder = CompileWorkers(count=workers).start()
            stack.callback(builder.close)
            runners = [
                stack.enter_context(closing(open_healthy_runner(plan.index, plan.uuid))) for plan in plans
            ]
            if len({int(r.facts["arch"]) for r in runners}) > 1:
                raise NoMachineCodePath("the devices differ in what code they take")
            builder.device = dict(facts_for_workers(runners[0]))
            judges = []
            for runner, plan in zip(runners, plans, strict=True):
                progress(f"launching the seed on device {plan.index}")
                trials = trials_type(target, plan, folder / "machine-code" / str(plan.index))
                stack.callback(trials.close)
                known = None
                if isinstance(trials, KernelTrials):
                    trials.learn_results(runner, builder)
                    known = trials.base_build
                judge = MachineCodeJudge(
                    runner,
                    builder,
                    trials,
                    host=partial(open_host, target, plan, folder, (runner, builder)),
                    device=plan.uuid or device_slug(plan.device, plan.index),
                    insist=insist,
                    on_failure=on_failure,
                    device_lock=plan.device_lock,
                )
                stack.callback(judge.close)
                if problem := judge.try_seed(NodeJob("seed", seed, seed, {}, target, 0, 1), known):
                    raise NoMachineCodePath(f"the seed: {problem}")
                judges.append(judge)
        except (ForecastAutotuneError, OSError) as error:
            raise NoMachineCodePath(str(error)) from error
        return MachineCodeLanes(judges, _JUDGES_PER_WORKER * builder.count, stack.pop_all())


def _trials_of(target: SearchTarget) -> type[AnyTrials]:
    if is_cuda_kernel(target):
        return CudaTrials
    return PackTrials if target.kind is TargetKind.PACK else KernelTrials


def open_host(
    target: SearchTarget, plan: VerificationPlan, folder: Path, opened: tuple[RunnerClient, CompileWorkers]
) -> SandboxJudge:
    """A judge of host code, whose contests of solutions go through this runner and these workers.

    Raises `LaneFailure`.
    """
    folder = folder / "host" / str(plan.index)
    judge = open_judge(target, device=plan.device, index=plan.index, folder=folder)
    if isinstance(judge, PackJudge):
        request_of = judge.requests if isinstance(judge, CudaJudge) else None
        judge.contests = partial(PackContests, opened=opened, request_of=request_of)
    return judge
