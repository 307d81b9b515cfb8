"""Which calls of a target need a survey and a verification of their own: most are covered by another one's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.user_kernel import is_covered


@dataclass(frozen=True)
class CallKinds:
    """The calls of a target by what is known of the base kernel."""

    verified: tuple[tuple[BaseKernel, KernelSurvey], ...]
    """What a variant is verified for: each covers what its survey's signature says."""
    covering: tuple[KernelSurvey, ...]
    """Of every call of the target, in order, the survey that covers it."""

    @classmethod
    def surveyed(
        cls, subjects: Sequence[BaseKernel], survey: Callable[[BaseKernel], KernelSurvey]
    ) -> CallKinds:
        """Survey one call after the other, but for those that an earlier survey covers.

        A verification draws its own sizes: two calls that differ only by sizes which the base kernel takes freely
        would be verified at the same ones. Raises what `survey` raises.
        """
        verified: list[tuple[BaseKernel, KernelSurvey]] = []
        covering: list[KernelSurvey] = []
        for subject in subjects:
            found = next((k for _, k in verified if is_covered(subject, [k.signature])), None)
            if found is None:
                found = survey(subject)
                verified.append((subject, found))
            covering.append(found)
        return cls(tuple(verified), tuple(covering))
