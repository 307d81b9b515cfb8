"""What a survey most often finds, for those who begin before it has."""

from __future__ import annotations

from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.sizes import CallSizes
from forecast_harness.trials.variants.call_sampling import MAX_ELEMENTS, RecordedCalls
from forecast_harness.trials.variants.kernel_survey import MULTIPLE_EVIDENCE


def expected_survey(subject: BaseKernel, device: str) -> KernelSurvey:
    """What a survey that meets no obstacle finds of sizes: all that look free are. Of writes it tells nothing.

    Raises `RecordError` where nothing can be drawn.
    """
    config = subject.configs[0]
    if subject.inputs:
        return KernelSurvey((), (), config, True)
    recorded = RecordedCalls(subject, device)
    sizes = recorded.sizes
    if sizes.varied:
        sizes = CallSizes.of(subject.calls, evidence=MULTIPLE_EVIDENCE[0])
    words = {s.places[0]: s.size_class for s in sizes.sizes}
    return KernelSurvey(
        (), (), config, True, words=words, evidence=MULTIPLE_EVIDENCE[0], most=MAX_ELEMENTS[device]
    )
