"""The calls of a kernel: which are verified, and their values."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_autotune.records import Config
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.sizes import CallSizes
from forecast_harness.trials import kernel_cell as call_values
from forecast_harness.trials.kernel_calls import CallKinds
from forecast_harness.trials.kernel_cell import fill_tensor, relative_error
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
    requests: list[BaseKernel] = []

    def survey(one: BaseKernel) -> KernelSurvey:
        requests.append(one)
        return survey_of(one, frozen=frozen)

    kinds = CallKinds.surveyed([LARGE, SMALL], survey)
    assert requests == ([LARGE, SMALL] if frozen else [LARGE])
    assert [one for one, _ in kinds.verified] == requests
    assert kinds.covering == tuple(
        survey_of(one, frozen=frozen) for one in requests for _ in range(2 // len(requests))
    )


torch = pytest.importorskip("torch")


def test_long_tensors_are_filled_to_the_end_and_no_two_rows_are_alike() -> None:
    flat = torch.full((3, 1 << 22), math.nan)
    fill_tensor(flat.reshape(-1), 2, torch.Generator().manual_seed(0))
    assert bool(flat.isfinite().all())
    assert abs(float(flat.mean())) < 0.01
    assert float(flat.std()) == pytest.approx(1.0, abs=0.01)
    assert not any(torch.equal(flat[a], flat[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_errors_are_told_beyond_what_is_compared_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_values, "_COMPARED_ELEMENTS", 8)
    right = torch.linspace(-4.0, 4.0, 31)
    assert relative_error(right.clone(), right) == 0.0
    late = right.clone()
    late[-1] += 1.0
    assert relative_error(late, right) == pytest.approx(0.25)
    late[20] = math.inf
    assert relative_error(late, right) == math.inf
    both = right.clone()
    both[20] = math.inf
    assert relative_error(both.double(), both) == 0.0
    assert relative_error(right[:0], right[:0]) == 0.0
