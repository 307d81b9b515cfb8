"""Which calls of a target are surveyed and verified, and which are covered by another one."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_autotune.records import Config
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.sizes import CallSizes
from forecast_harness.trials.judging.kernels.call_kinds import CallKinds
from tests.harness.variant_kernels import SOFTMAX, rows, softmax_call, subject

LARGE, SMALL = (
    subject(SOFTMAX, softmax_call(*first), softmax_call(*second), grid=rows)
    for first, second in (((9, 70), (4, 33)), ((4, 33), (9, 70)))
)


def survey_of(one: BaseKernel, *, frozen: bool) -> KernelSurvey:
    sizes = CallSizes.of(one.calls)
    sizes = sizes.frozen() if frozen else sizes
    return KernelSurvey(("y",), (), Config.of({"BLOCK": 64}), True, signature=sizes.signature({"y"}))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_call_is_surveyed_unless_another_ones_drawn_sizes_cover_it(frozen: bool) -> None:
    asked: list[BaseKernel] = []

    def survey(one: BaseKernel) -> KernelSurvey:
        asked.append(one)
        return survey_of(one, frozen=frozen)

    kinds = CallKinds.surveyed([LARGE, SMALL], survey)
    assert asked == ([LARGE, SMALL] if frozen else [LARGE])
    assert [one for one, _ in kinds.verified] == asked
    assert kinds.covering == tuple(
        survey_of(one, frozen=frozen) for one in asked for _ in range(2 // len(asked))
    )
