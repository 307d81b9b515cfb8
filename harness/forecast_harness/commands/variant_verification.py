"""How `variants` verifies many sources: cheap gates first, several lanes at once, counts while it lasts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import CommandError, Output, UsageError
from forecast_autotune.variants import Check, Variant
from forecast_harness.commands.count_line import CountLine
from forecast_harness.variants.verification.base_binaries import BaseBinaries
from forecast_harness.variants.verification.lanes import run_each
from forecast_harness.variants.verification.verify import (
    VariantVerification,
    refused_variant,
    survey,
    verify_variant,
)
from forecast_harness.verify.cost_control import PhaseTimer

if TYPE_CHECKING:
    from forecast_harness.machine_code.variant_gate import VariantGate
    from forecast_harness.sandbox.api import SandboxLane
    from forecast_harness.sandbox.lane_pools import LanePool
    from forecast_harness.variants.kernels.base_kernel import BaseKernel, KernelSurvey
    from forecast_harness.verify.plan import VerificationPlan

_ROUNDS_WITHOUT_GATE = 2
"""Verifications of each lane that are done sooner than a runner and the compile workers have started: what is wrong
shows in the first launches of a verification, too."""


@dataclass
class VariantWork:
    """Verifies variants for one kind of call after the other."""

    path: str
    """Whether a runner looks at variants before they are verified: `machine-code`, `host-code` for never, or `auto`
    where there are many."""
    output: Output
    lanes: LanePool
    plan: VerificationPlan
    device: str
    """The slug that checks name."""
    source_sha256: str
    """Of the base kernel."""
    seconds: PhaseTimer = field(default_factory=PhaseTimer)
    """By what they were spent on; a survey's own begin with `survey_`."""
    _stage: str = ""
    _begun: int = 0
    _verified: int = 0
    _remark: str = ""

    def verify(
        self,
        subject: BaseKernel,
        variants: Sequence[Variant],
        keep: Callable[[Variant, Sequence[Check]], object],
    ) -> tuple[KernelSurvey, list[tuple[Variant, VariantVerification]]]:
        """What was found out about the base kernel, and a verdict on every variant, in their order.

        `keep` is told of each as soon as it is there. Raises `VariantError` where nothing can be verified against
        the base kernel, and `CommandError` where `path` insists on what does not work here.
        """
        self._stage, self._begun, self._verified, self._remark = "looking at the base kernel", 0, 0, ""
        gate: VariantGate | None = None
        found: dict[int, VariantVerification] = {}
        with ExitStack() as stack:
            stack.enter_context(
                CountLine(self.output.errors, lambda: self._stage or self._counts(gate, len(variants)))
            )
            self.lanes.open_ahead(
                len(variants)
            )  # all but the first wait for that one, and are then open at once
            with self.seconds.phase("gate"):
                gate = self._open_gate(stack, subject, len(variants))
            for variant in variants if gate is not None else ():
                assert gate is not None
                gate.submit(variant)
            self._stage = "looking at the base kernel"
            binaries = BaseBinaries()
            with self.seconds.phase("lane"):
                first = stack.enter_context(ExitStack())
                lane = first.enter_context(self.lanes.borrowed())
            with first, self.seconds.phase("survey"):
                known = survey(subject, lane, plan=self.plan, binaries=binaries)
            for name, spent in binaries.steps.items():
                self.seconds.add(f"survey_{name}", spent)
            self._stage = ""

            def judged(variant: Variant, lane: SandboxLane) -> VariantVerification:
                self._begun += 1
                reason = gate.refusal(variant) if gate is not None else None
                if reason is not None:
                    return refused_variant(variant, known, self.device, reason)
                return verify_variant(
                    variant, subject, known, lane, device=self.device, plan=self.plan, binaries=binaries
                )

            with self.seconds.phase("verify"):
                for number, result in run_each(self.lanes, variants, judged):
                    found[number] = result
                    self._verified += 1
                    keep(variants[number], result.checks)
        if self._remark:
            self.output.remark(self._remark)
        if gate is not None and gate.failure:
            self.output.remark(
                f"the machine-code path failed, so that all were verified at once: {gate.failure}"
            )
        return known, [(variants[n], found[n]) for n in range(len(variants))]

    def _counts(self, gate: VariantGate | None, total: int) -> str:
        before = "" if gate is None else f"{gate.compiled} compiled, {gate.checked} checked, "
        under_way = f", {self._begun - self._verified} under way" if self._begun > self._verified else ""
        return f"{before}{self._verified} of {total} variants judged{under_way}"

    def _open_gate(self, stack: ExitStack, subject: BaseKernel, count: int) -> VariantGate | None:
        """A gate before so many verifications, where it is wanted, works here and would save more than it takes."""
        few = count <= _ROUNDS_WITHOUT_GATE * self.lanes.most
        if self.path == "host-code" or (self.path == "auto" and (few or self.plan.device == "cpu")):
            return None
        if self.plan.device == "cpu":
            raise UsageError(
                "--path machine-code needs a CUDA device: leave it out, or give --device a number"
            )
        from forecast_harness.machine_code.fit_runner import NoMachineCodePath
        from forecast_harness.machine_code.variant_gate import open_variant_gate

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def tell(stage: str) -> None:
            self._stage = stage

        try:
            return open_variant_gate(stack, subject, self.source_sha256, self.plan, folder, tell)
        except NoMachineCodePath as error:
            if self.path == "machine-code":
                raise CommandError(f"--path machine-code does not work here: {error}") from error
            self._remark = f"variants were verified without a look at their machine code: {error}"
            return None
