"""Opens judges through machine code: a runner for each device, compile workers for all of them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from forecast_autotune.errors import ForecastAutotuneError
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.paired_comparison import StoppingRules
from forecast_harness.clocks.runner.client import NoMachineCodePath, RunnerClient, facts_for_workers
from forecast_harness.records import Node, NodeJob, SearchTarget, TargetKind
from forecast_harness.sandbox.lane_pools import close_lanes
from forecast_harness.targets.packs.schema import Pack
from forecast_harness.targets.search_target import is_cuda_kernel
from forecast_harness.trials.confirmation import EarlyOpener
from forecast_harness.trials.cuda import CudaJudge
from forecast_harness.trials.devices import EarlyProcesses, device_slug
from forecast_harness.trials.host_judges import open_judge
from forecast_harness.trials.judge import SandboxJudge
from forecast_harness.trials.judge_pool import LocalJudgePool
from forecast_harness.trials.kernels import KernelJudge
from forecast_harness.trials.machine_code.judge import MachineCodeJudge
from forecast_harness.trials.machine_code.kernel_trials import KernelTrials
from forecast_harness.trials.machine_code.pack_contest import PackContests, RequestOf
from forecast_harness.trials.machine_code.targets import CudaTrials, PackTrials
from forecast_harness.trials.packs import PackJudge
from forecast_harness.trials.protocol import CannotConfirm
from forecast_harness.verify.plan import VerificationPlan

AnyTrials = KernelTrials | PackTrials | CudaTrials
_JUDGES_PER_WORKER = 2
"""Nodes under way for each compile worker, so that none waits while nodes are on the device."""


class MachineCodeLanes(LocalJudgePool):
    """Judges at work, many for each device; closing it ends runners and compile workers, too.

    One lane more than there are nodes at a time: full verification goes on beside them.
    """

    def __init__(
        self,
        judges: list[MachineCodeJudge],
        count: int,
        resources: ExitStack,
        hosts: Sequence[EarlyOpener[SandboxJudge]] = (),
    ) -> None:
        """`hosts`: the openers of the judges of host code, one of which a lane may be waiting for at the end."""
        self._resources, self._judges, self._hosts = resources, judges, list(hosts)
        super().__init__(lambda number: judges[number % len(judges)], count + 1)

    @property
    def capacity(self) -> int:
        """Nodes that are judged at once."""
        return max(1, super().capacity - 1)

    @property
    def problem(self) -> str:
        """Why no judge of host code, which verifies and confirms, could be made for the target."""
        failures = [host.failure for host in self._hosts]
        cannot_confirm = all(isinstance(failure, CannotConfirm) for failure in failures)
        return str(failures[0]) if failures and cannot_confirm else ""

    def close(self) -> None:
        """End judges, lanes, runners and compile workers."""
        for judge in self._judges:
            judge.end()
        try:
            close_lanes(self._hosts)
            super().close()
        finally:
            self._resources.close()


def open_machine_code_lanes(
    target: SearchTarget,
    seed: Node,
    plans: list[VerificationPlan],
    *,
    folder: Path,
    workers: int = 0,
    early: EarlyProcesses | None = None,
    insist: bool = False,
    on_failure: Callable[[str], None] = lambda reason: None,
    progress: Callable[[str], None] = lambda stage: None,
) -> MachineCodeLanes:
    """Judges of a target on these devices, whose runners have proved their health with kernels of their own and
    with the seed.

    `workers`: compile workers of all devices together; 0 for all processors. `early`: workers and runners of these
    plans that were begun before the target was known; they are closed with the lanes. `insist`: a failure of our own
    later on ends a lane, instead of having the node judged as host code; `on_failure` is told why. `progress` is told
    what is being done.

    Raises `NoMachineCodePath` for a target, device or runner that is not up to it.
    """
    with ExitStack() as stack:
        if early is not None:
            stack.callback(early.close)
        trials_type = _trials_of(target)
        if (language := trials_type.language) != seed.language:
            raise NoMachineCodePath(
                f"the seed is written in {seed.language}, and only {language} is compiled so"
            )
        try:
            # Needed in the middle of a search, when others wait for it.
            openings = [_HostOpening(target, plan, folder) for plan in plans]
            hosts: list[EarlyOpener[SandboxJudge]] = [EarlyOpener(o, o.give_up) for o in openings]
            # Large inputs of a target's calls take seconds to draw.
            trial_openers: list[EarlyOpener[AnyTrials]] = [
                EarlyOpener(partial(trials_type, target, plan, folder / "machine-code" / str(plan.index)))
                for plan in plans
            ]
            for close in [o.close for o in hosts] + [o.close for o in trial_openers]:
                stack.callback(close)
            progress(
                f"starting {f'{len(plans)} runners' if len(plans) > 1 else 'a runner'} and compile workers"
            )
            processes = early or EarlyProcesses(plans, workers)
            stack.callback(processes.close)
            runners = [processes.runner(number) for number in range(len(plans))]
            if len({int(r.facts["arch"]) for r in runners}) > 1:
                raise NoMachineCodePath("the devices differ in what code they take")
            builder = processes.workers
            builder.device = dict(facts_for_workers(runners[0]))
            judges = []
            for number, (runner, plan) in enumerate(zip(runners, plans, strict=True)):
                openings[number].opened = runner, builder
                progress(f"launching the seed on device {plan.index}")
                trials = trial_openers[number]()
                stack.callback(trials.close)
                seed_build = None
                if isinstance(trials, KernelTrials):
                    trials.learn_results(runner, builder)
                    seed_build = trials.base_build
                judge = MachineCodeJudge(
                    runner,
                    builder,
                    trials,
                    host=hosts[number],
                    device=plan.uuid or device_slug(plan.device, plan.index),
                    insist=insist,
                    on_failure=on_failure,
                    device_lock=plan.device_lock,
                )
                stack.callback(judge.close)
                if problem := judge.try_seed(NodeJob("seed", seed, seed, {}, target, 0, 1), seed_build):
                    raise NoMachineCodePath(f"the seed: {problem}")
                judges.append(judge)
        except (ForecastAutotuneError, OSError) as error:
            raise NoMachineCodePath(str(error)) from error
        return MachineCodeLanes(judges, _JUDGES_PER_WORKER * builder.count, stack.pop_all(), hosts)


def _trials_of(target: SearchTarget) -> type[AnyTrials]:
    if is_cuda_kernel(target):
        return CudaTrials
    return PackTrials if target.kind is TargetKind.PACK else KernelTrials


class _HostOpening:
    """Opens a judge of host code, ready to verify, and makes the contests of its confirmations."""

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path) -> None:
        self._target, self._plan, self._folder = target, plan, folder
        self._at_work: KernelJudge | None = None
        """The judge that surveys the base kernel now."""
        self.opened: tuple[RunnerClient, CompileWorkers] | None = None
        """The search's runner and compile workers, which contests go through once it has them."""
        self._request_of: RequestOf | None = None
        """The compile requests of solutions, where they are not Triton's."""

    def __call__(self) -> SandboxJudge:
        """A judge. Raises `LaneFailure`."""
        plan = self._plan
        judge = open_judge(
            self._target,
            device=plan.device,
            index=plan.index,
            folder=self._folder / "host" / str(plan.index),
        )
        if isinstance(judge, PackJudge):
            judge.contests = self._contests
        if isinstance(judge, CudaJudge):
            self._request_of = judge.requests
        if isinstance(judge, KernelJudge):
            self._at_work = judge
            try:
                judge.prepare_verification()
            except BaseException:
                judge.close()
                raise
            finally:
                self._at_work = None
        return judge

    def _contests(self, pack: Pack, plan: VerificationPlan, rules: StoppingRules) -> PackContests:
        return PackContests(pack, plan, rules, self.opened, self._request_of)

    def give_up(self) -> None:
        """End what takes longest: nobody waits for the judge any more."""
        if (judge := self._at_work) is not None:
            judge.give_up()
