"""What a base kernel is asked, and what of a tensor's memory is whose."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
pytest.importorskip("torch")

from forecast_autotune.records import Argument, Config
from forecast_harness.targets.kernels.base_kernel import KernelSurvey
from forecast_harness.trials.variants.base_runner import BaseKernelRunner, gap_mask
from forecast_harness.trials.variants.call_sampling import _has_gaps
from forecast_harness.trials.variants.problem import VariantProblem
from forecast_harness.verify.problem import DrawSpec, LaunchCase
from tests.harness.base_doubler import BaseDoubler
from tests.harness.variant_kernels import CONFIGS, DOUBLE, subject, vector_call

torch = pytest.importorskip("torch")


OWN, *OTHERS = LISTED = (*CONFIGS, Config.of({"BLOCK": 32}), Config.of({"BLOCK": 256}))


def problem_of(
    reference: BaseDoubler, config: Config, dtype: str = "float32", listed: tuple[Config, ...] = LISTED
) -> VariantProblem:
    calls = vector_call(dtype=dtype), vector_call(100, dtype=dtype)
    request = replace(subject(DOUBLE, *calls), configs=listed)
    known = KernelSurvey(
        ("out",), (), OWN, True, words={"x.0": "any"}, evidence=3, most=1 << 14, signature="{}"
    )
    runner = cast("BaseKernelRunner", reference)
    return VariantProblem(request, known, runner, [config], "cuda", True, ("x", "out", "n", "BLOCK"))


def drawn(
    reference: BaseDoubler,
    config: Config = OWN,
    dtype: str = "float32",
    listed: tuple[Config, ...] = LISTED,
) -> LaunchCase:
    problem = problem_of(reference, config, dtype, listed)
    case = problem.case({"config": 0}, DrawSpec("normal", "contiguous", torch.Generator().manual_seed(7)))
    reference.ran.clear()
    return case


@pytest.mark.parametrize(("dtype", "runs"), [("float32", 1), ("float16", 2)])
def test_the_result_on_what_was_drawn_is_known_already(dtype: str, runs: int) -> None:
    base = BaseDoubler()
    case = drawn(base, dtype=dtype)
    assert case.check([2 * case.tensors["x"]])[0] is None
    assert base.ran == []
    nearly = case.twin(torch.Generator().manual_seed(1))
    assert nearly.check([2 * nearly.tensors["x"]])[0] is None
    assert base.ran == [OWN] * runs, "other values are the base's to work on, in its wider dtype, too"


def test_values_that_changed_in_place_are_given_to_the_base_anew() -> None:
    base = BaseDoubler()
    case = drawn(base)
    case.tensors["x"].add_(1)
    assert case.check([2 * case.tensors["x"]])[0] is None
    assert base.ran == [OWN]


def test_whether_a_case_is_right_already_asks_no_other_config() -> None:
    base = BaseDoubler(*OTHERS)
    case = drawn(base)
    assert not case.already_right
    assert base.ran == []
    assert base.compiled == []


def test_a_wrong_result_asks_the_variants_config_first_and_the_rest_two_at_a_time() -> None:
    own = OTHERS[-2]
    base = BaseDoubler()
    case = drawn(base, own)
    finding, _ = case.check([3 * case.tensors["x"]])
    assert finding is not None
    assert base.ran[0] == own
    assert set(base.ran) == set(OTHERS)
    rest = len(OTHERS) - 1
    assert base.compiled == [2] * (rest // 2), "one that is left alone is compiled by its launch"


DIMENSIONS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=3)


@given(DIMENSIONS)
def test_no_gap_is_overlooked(dimensions: list[tuple[int, int]]) -> None:
    shape, stride = zip(*dimensions, strict=True)
    tensor = Argument("x", "tensor", "float32", shape, stride, True)
    distinct = {0}
    for n, step in dimensions:
        distinct = {at + i * step for at in distinct for i in range(n)}
    if len(distinct) < len(gap_mask(tensor)) and len(distinct) == math.prod(shape):
        assert _has_gaps(tensor)  # of a tensor whose elements do not overlap
