"""Cheap checks of a variant before it is verified: does it compile, and is it right on one call?

Variants are compiled on all processors at once, and launched by the runner beside the base kernel's results. A variant
that is refused here is not verified; one that passes has only shown that it is worth verifying.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.variants import Variant
from forecast_harness.clocks.compilation.requests import BuildResult
from forecast_harness.clocks.compilation.workers import CompileWorkers
from forecast_harness.clocks.runner.client import RunnerClient, RunnerLost
from forecast_harness.clocks.runner.health import NoMachineCodePath, facts_for_workers, open_healthy_runner
from forecast_harness.clocks.runner.messages import ProgramFault, RunnerFaultKind
from forecast_harness.records import Node, SearchTarget, TargetKind
from forecast_harness.targets.kernels.base_kernel import BaseKernel
from forecast_harness.trials.machine_code.clock import check_on_call
from forecast_harness.trials.machine_code.kernel_trials import KernelTrials
from forecast_harness.trials.verdict import COMPILE_ERRORS
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import ContestantRejected, Reason, ReasonCode


class VariantGate:
    """Refuses variants of one base kernel, seen at one kind of call. `refusal` may be called from many threads."""

    def __init__(self, trials: KernelTrials, runner: RunnerClient, builder: CompileWorkers) -> None:
        self._trials, self._runner, self._builder = trials, runner, builder
        self._built: dict[str, Future[BuildResult]] = {}
        self.compiled = self.checked = 0
        """Variants so far."""
        self.failure = ""
        """Why the runner is not asked any more: a failure of our own."""

    def submit(self, variant: Variant) -> None:
        """Have a variant compiled, in the config that is verified first; one that breaks a rule is not looked at."""
        node = Node(variant.name, variant.source, "triton", (), variant.provenance)
        with suppress(RecordError):
            self._built[variant.name] = self._builder.submit(self._trials.request(node, {}))

    def refusal(self, variant: Variant) -> Reason | None:
        """Why a variant that was submitted is not worth verifying; None where it is, or where nothing is known."""
        if (building := self._built.pop(variant.name, None)) is None:
            return None
        built = building.result()
        self.compiled += 1
        if not built.programs:
            # Another config may compile: only what no config changes is a refusal.
            syntax = COMPILE_ERRORS.search(built.error) and "OutOfResources" not in built.error
            return Reason(ReasonCode.FAILS, built.error[:2000]) if syntax else None
        if self.failure:
            return None
        call, program = self._trials.calls.small, self._trials.sealed(built.programs[0])
        try:
            # Once: whatever passes is verified launch after launch.
            check_on_call(partial(self._runner.check, launches=1), call, program)
        except ContestantRejected as rejected:
            fault = rejected.__cause__
            if isinstance(fault, ProgramFault) and fault.kind is RunnerFaultKind.REFUSED:
                return None  # too large a config, say
            self.checked += not isinstance(fault, ProgramFault)
            return rejected.reasons[0]
        except RunnerLost as lost:
            self.failure = str(lost)
            return None
        self.checked += 1
        return None


def open_variant_gate(
    stack: ExitStack,
    subject: BaseKernel,
    source_sha256: str,
    plan: VerificationPlan,
    folder: Path,
    progress: Callable[[str], None] = lambda stage: None,
) -> VariantGate:
    """A gate on a device, closed with `stack`. Raises `NoMachineCodePath` where it does not work here."""
    target = SearchTarget(
        TargetKind.KERNEL,
        subject.kernel,
        source_sha256,
        "triton",
        subject.kernel,
        "",
        {"subjects": [subject.to_json()], "source_sha256": source_sha256},
    )
    with ExitStack() as opened:
        try:
            progress("starting the runner and compile workers")
            runner = opened.enter_context(open_healthy_runner(plan.index, plan.uuid))
            builder = opened.enter_context(CompileWorkers(facts_for_workers(runner)))
            progress("launching the base kernel")
            trials = KernelTrials(target, plan, folder)
            opened.callback(trials.close)
            trials.learn_results(runner, builder)
        except (ForecastAutotuneError, OSError) as error:
            raise NoMachineCodePath(str(error)) from error
        stack.push(opened.pop_all())
        return VariantGate(trials, runner, builder)
