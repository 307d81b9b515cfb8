"""Opens judges through machine code: a runner for each device, compile workers for all of them together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_harness.machine_code.compile_workers import CompileWorkers
from forecast_harness.machine_code.kernel_trials import KernelTrials
from forecast_harness.machine_code.node_judging import MachineCodeJudge
from forecast_harness.machine_code.pack_trials import PackTrials
from forecast_harness.machine_code.runner.client import RunnerClient
from forecast_harness.machine_code.runner.driver import LIBRARY
from forecast_harness.machine_code.runner.health import runner_problem
from forecast_harness.machine_code.trials import SourceBuilder, TargetTrials
from forecast_harness.search.history.events import NodeJob
from forecast_harness.search.judging.devices import device_slug
from forecast_harness.search.judging.early_opener import EarlyOpener
from forecast_harness.search.judging.factory import open_judge
from forecast_harness.search.judging.lane_judge import HostJudge
from forecast_harness.search.lanes.local_lanes import LocalJudgePool
from forecast_harness.search.records import Node, SearchTarget, TargetKind
from forecast_harness.timing import device as devices
from forecast_harness.verify.plan import VerificationPlan

FLUSH_BYTES = 0
"""What a runner writes to empty its device's caches; 0: what suits the device."""
_HEALTH_TRIES, _HEALTH_PAUSE_S = 10, 1.0
"""Others may use the device at the moment, and a clock that waits for them tells no time."""
_JUDGES_PER_WORKER = 2
"""Nodes under way for each compile worker, so that none waits while nodes are on the device."""


class NoMachineCodePath(Exception):
    """A target that is not judged through machine code here; the text says why."""


def facts_for_workers(runner: RunnerClient) -> Mapping[str, Any]:
    """What compile workers are told of a runner's device."""
    blocks = int(runner.facts["multiprocessors"])
    return {
        "arch": int(runner.facts["arch"]),
        "name": runner.facts["name"],
        "properties": {"multiprocessor_count": blocks},
    }


class MachineCodeLanes(LocalJudgePool):
    """Judges at work, many for each device; closing it ends runners and compile workers, too."""

    def __init__(self, judges: list[MachineCodeJudge], count: int, held: ExitStack) -> None:
        self._held, self._judges = held, judges
        super().__init__(lambda number: judges[number % len(judges)], count)

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
    if seed.language != "triton":
        raise NoMachineCodePath(f"the seed is written in {seed.language}, and only Triton is compiled so")
    with ExitStack() as stack:
        try:
            # Needed in the middle of a search, when others wait for it.
            hosts = [EarlyOpener(_host_opener(target, plan, folder)) for plan in plans]
            for host in hosts:
                stack.callback(host.close)
            runners: list[RunnerClient] = []
            for plan in plans:
                progress(f"starting the runner of device {plan.index}")
                runners.append(stack.enter_context(open_fit_runner(plan)))
            if len({int(r.facts["arch"]) for r in runners}) > 1:
                raise NoMachineCodePath("the devices differ in what code they take")
            progress("starting compile workers")
            builder = stack.enter_context(CompileWorkers(facts_for_workers(runners[0]), workers))
            judges = []
            for runner, plan, host in zip(runners, plans, hosts, strict=True):
                progress(f"launching the seed on device {plan.index}")
                where = folder / "machine-code" / str(plan.index)
                trials = _open_trials(target, plan, where, runner, builder)
                stack.callback(trials.close)
                judge = MachineCodeJudge(
                    runner,
                    builder,
                    trials,
                    host=host,
                    device=plan.uuid or device_slug(plan.device, plan.index),
                    insist=insist,
                    on_failure=on_failure,
                    device_lock=plan.device_lock,
                )
                stack.callback(judge.close)
                if said := judge.try_seed(NodeJob("seed", seed, seed, {}, target, 0, 1)):
                    raise NoMachineCodePath(f"the seed: {said}")
                judges.append(judge)
        except (ForecastAutotuneError, OSError) as error:
            raise NoMachineCodePath(str(error)) from error
        return MachineCodeLanes(judges, _JUDGES_PER_WORKER * builder.count, stack.pop_all())


@contextmanager
def open_fit_runner(plan: VerificationPlan) -> Iterator[RunnerClient]:
    """A runner of a device that has proved its health.

    Raises `NoMachineCodePath` for one that has not, and `RunnerLost` where it does not start.
    """
    # By its UUID: the driver's own number may be another card's, by CUDA_VISIBLE_DEVICES or CUDA_DEVICE_ORDER.
    index = 0 if plan.uuid else plan.index
    with RunnerClient(LIBRARY, index, visible=plan.uuid, flush_bytes=FLUSH_BYTES) as runner:
        for _ in range(_HEALTH_TRIES):
            if not (said := runner_problem(runner)):
                break
            time.sleep(_HEALTH_PAUSE_S)
        else:
            raise NoMachineCodePath(said)
        if plan.uuid and runner.facts["name"] != (named := devices.identity(plan.index)[0]):
            raise NoMachineCodePath(
                f"the runner has {runner.facts['name']!r} for device {plan.index}, the driver's tools have {named!r}: "
                "set CUDA_DEVICE_ORDER=PCI_BUS_ID and leave CUDA_VISIBLE_DEVICES unset"
            )
        yield runner


def _open_trials(
    target: SearchTarget, plan: VerificationPlan, folder: Path, runner: RunnerClient, builder: SourceBuilder
) -> TargetTrials:
    if target.kind is TargetKind.PACK:
        return PackTrials(target, plan, folder)
    return KernelTrials(target, plan, folder, runner, builder)


def _host_opener(target: SearchTarget, plan: VerificationPlan, folder: Path) -> Callable[[], HostJudge]:
    def opened() -> HostJudge:
        return open_judge(
            target, device=plan.device, index=plan.index, folder=folder / "host" / str(plan.index)
        )

    return opened
