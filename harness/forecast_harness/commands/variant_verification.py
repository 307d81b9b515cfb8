"""The verification of many sources by `variants`: in several lanes at once, with counts while it lasts."""

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
    survey: KernelSurvey
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
    """By the work they were spent on; a survey's own begin with `survey_`."""
    _kinds: list[_CallKind] = field(default_factory=list)
    _stage: str = ""
    _starts: int = 0
    _ends: int = 0

    def verify(
        self,
        subjects: Sequence[BaseKernel],
        missing: Callable[[BaseKernel, Sequence[str]], Sequence[Variant]],
        keep: Callable[[Variant, Sequence[Check]], object],
    ) -> list[tuple[Variant, VariantVerification]]:
        """A verdict on every variant for every kind of call, in their order.

        `missing`: the variants to verify for a kind, given the signatures of those before it. `keep` is called with
        each verdict as soon as it is there. Raises `VariantError` where nothing can be verified against the base
        kernel, once what was begun is done.
        """
        failure: ForecastAutotuneError | None = None
        with ExitStack() as stack:
            stack.enter_context(CountLine(self.output.errors, self._counts))
            jobs: _Jobs = LaneJobs(self.lanes, self._verdict)
            stack.callback(jobs.close)
            try:
                self._begin_kinds(subjects, missing, jobs)
            except ForecastAutotuneError as error:
                failure = error
            with self.seconds.phase("verify"):
                for (kind, number), result in jobs.results():
                    kind.results[number] = result
                    self._ends += 1
                    keep(kind.variants[number], result.checks)
        if failure is not None:
            raise failure
        return [(v, kind.results[n]) for kind in self._kinds for n, v in enumerate(kind.variants)]

    def _begin_kinds(
        self,
        subjects: Sequence[BaseKernel],
        missing: Callable[[BaseKernel, Sequence[str]], Sequence[Variant]],
        jobs: _Jobs,
    ) -> None:
        """Look at the base kernel's kinds of call in one lane, while variants are verified for the first in others."""
        with ExitStack() as stack:
            lane: SandboxLane | None = None
            for subject in subjects:
                variants = missing(subject, [kind.survey.signature for kind in self._kinds])
                if not variants:
                    continue
                self._stage = "" if self._kinds else "looking at the base kernel"
                self.lanes.open_ahead(len(variants))
                with self.seconds.phase("lane"):
                    lane = lane or stack.enter_context(self.lanes.borrowed())
                binaries = BaseBinaries()
                with self.seconds.phase("survey"):
                    facts = survey(subject, lane, plan=self.plan, binaries=binaries)
                for name, seconds in binaries.steps.items():
                    self.seconds.add(f"survey_{name}", seconds)
                self._kinds.append(kind := _CallKind(subject, variants, facts, binaries))
                self._stage = ""
                jobs.add((kind, number) for number in range(len(variants)))

    def _verdict(self, job: tuple[_CallKind, int], lane: SandboxLane) -> VariantVerification:
        """The verdict on a variant for a kind of call."""
        kind, number = job
        self._starts += 1
        return verify_variant(
            kind.variants[number],
            kind.subject,
            kind.survey,
            lane,
            device=self.device,
            plan=self.plan,
            binaries=kind.binaries,
        )

    def _counts(self) -> str:
        if self._stage:
            return self._stage
        under_way = f", {self._starts - self._ends} under way" if self._starts > self._ends else ""
        return f"{self._ends} of {sum(len(kind.variants) for kind in self._kinds)} variants judged{under_way}"
