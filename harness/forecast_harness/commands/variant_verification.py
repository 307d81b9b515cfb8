"""How `variants` verifies many sources: several lanes at once, counts while it lasts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forecast_autotune.commands.count_line import CountLine
from forecast_autotune.commands.output import Output
from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.variants import Check, Variant
from forecast_harness.trials.variants.files import BaseBinaries
from forecast_harness.trials.variants.verify import (
    LaneJobs,
    VariantVerification,
    survey,
    verify_variant,
)
from forecast_harness.verify.cost_control import PhaseTimer

if TYPE_CHECKING:
    from forecast_harness.sandbox.api import SandboxLane
    from forecast_harness.sandbox.lane_pools import LanePool
    from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
    from forecast_harness.verify.plan import VerificationPlan


@dataclass
class _CallKind:
    """One kind of call, and what is verified for it."""

    subject: BaseKernel
    variants: Sequence[Variant]
    known: KernelSurvey
    binaries: BaseBinaries
    results: dict[int, VariantVerification] = field(default_factory=dict)
    """By the number of the variant."""


_Jobs = LaneJobs[tuple[_CallKind, int], VariantVerification]


@dataclass
class VariantWork:
    """Verifies variants for all kinds of call."""

    output: Output
    lanes: LanePool
    plan: VerificationPlan
    device: str
    """The slug that checks name."""
    seconds: PhaseTimer = field(default_factory=PhaseTimer)
    """By what they were spent on; a survey's own begin with `survey_`."""
    _kinds: list[_CallKind] = field(default_factory=list)
    _stage: str = ""
    _begun: int = 0
    _verified: int = 0

    def verify(
        self,
        subjects: Sequence[BaseKernel],
        left: Callable[[BaseKernel, Sequence[str]], Sequence[Variant]],
        keep: Callable[[Variant, Sequence[Check]], object],
    ) -> list[tuple[Variant, VariantVerification]]:
        """A verdict on every variant for every kind of call, in their order.

        `left`: which variants one has to be verified for, given the signatures of those before it. `keep` is told of
        each verdict as soon as it is there. Raises `VariantError` where nothing can be verified against the base
        kernel, once what was begun is done.
        """
        failure: ForecastAutotuneError | None = None
        with ExitStack() as stack:
            stack.enter_context(CountLine(self.output.errors, self._counts))
            jobs: _Jobs = LaneJobs(self.lanes, self._judged)
            stack.callback(jobs.close)
            try:
                self._begin_kinds(subjects, left, jobs)
            except ForecastAutotuneError as error:
                failure = error
            with self.seconds.phase("verify"):
                for (kind, number), result in jobs.results():
                    kind.results[number] = result
                    self._verified += 1
                    keep(kind.variants[number], result.checks)
        if failure is not None:
            raise failure
        return [(v, kind.results[n]) for kind in self._kinds for n, v in enumerate(kind.variants)]

    def _begin_kinds(
        self,
        subjects: Sequence[BaseKernel],
        left: Callable[[BaseKernel, Sequence[str]], Sequence[Variant]],
        jobs: _Jobs,
    ) -> None:
        """Look at the base kernel's kinds of call in one lane, while variants are verified for the first in others."""
        with ExitStack() as held:
            lane: SandboxLane | None = None
            for subject in subjects:
                variants = left(subject, [kind.known.signature for kind in self._kinds])
                if not variants:
                    continue
                self._stage = "" if self._kinds else "looking at the base kernel"
                self.lanes.open_ahead(len(variants))
                with self.seconds.phase("lane"):
                    lane = lane or held.enter_context(self.lanes.borrowed())
                binaries = BaseBinaries()
                with self.seconds.phase("survey"):
                    known = survey(subject, lane, plan=self.plan, binaries=binaries)
                for name, spent in binaries.steps.items():
                    self.seconds.add(f"survey_{name}", spent)
                self._kinds.append(kind := _CallKind(subject, variants, known, binaries))
                self._stage = ""
                jobs.add((kind, number) for number in range(len(variants)))

    def _judged(self, job: tuple[_CallKind, int], lane: SandboxLane) -> VariantVerification:
        """The verdict on a variant for a kind of call."""
        kind, number = job
        self._begun += 1
        return verify_variant(
            kind.variants[number],
            kind.subject,
            kind.known,
            lane,
            device=self.device,
            plan=self.plan,
            binaries=kind.binaries,
        )

    def _counts(self) -> str:
        if self._stage:
            return self._stage
        under_way = f", {self._begun - self._verified} under way" if self._begun > self._verified else ""
        return f"{self._verified} of {sum(len(kind.variants) for kind in self._kinds)} variants judged{under_way}"
