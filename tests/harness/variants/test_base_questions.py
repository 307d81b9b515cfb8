"""How often the base kernel is launched for a verdict, and under which configs: each of them has to be compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from forecast_autotune.records import Config
from forecast_harness.targets.kernels.base_kernel import KernelSurvey
from forecast_harness.trials.variants.base_runner import BaseKernelRun, BaseKernelRunner
from forecast_harness.trials.variants.compilation.compile_ahead import call_without_values
from forecast_harness.trials.variants.problem import VariantProblem
from forecast_harness.verify.problems.problem import OUTSIDE_DOMAIN, DrawSpec, LaunchCase
from tests.harness.base_doubler import BaseDoubler
from tests.harness.variant_kernels import CONFIGS, DOUBLE, subject, vector_call

OWN, *OTHERS = LISTED = (*CONFIGS, Config.of({"BLOCK": 32}), Config.of({"BLOCK": 256}))


def problem_of(
    reference: BaseDoubler, config: Config, dtype: str = "float32", listed: tuple[Config, ...] = LISTED
) -> VariantProblem:
    calls = vector_call(dtype=dtype), vector_call(100, dtype=dtype)
    asked = replace(subject(DOUBLE, *calls), configs=listed)
    known = KernelSurvey(
        ("out",), (), OWN, True, words={"x.0": "any"}, evidence=3, most=1 << 14, signature="{}"
    )
    runner = cast("BaseKernelRunner", reference)
    return VariantProblem(asked, known, runner, [config], "cuda", True, ("x", "out", "n", "BLOCK"))


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


def test_what_takes_long_to_compile_is_asked_last() -> None:
    """A tile that spills takes the assembler a minute, and any config that differs is enough."""
    large = Config.of({"BLOCK": 1 << 15}, num_warps=1)
    listed = (*LISTED, large)
    base = BaseDoubler(OTHERS[0])
    case = drawn(base, large, listed=listed)
    assert case.check([3 * case.tensors["x"]]) == (None, OUTSIDE_DOMAIN)
    assert large not in base.ran
    nothing_differs = BaseDoubler()
    case = drawn(nothing_differs, large, listed=listed)
    assert case.check([3 * case.tensors["x"]])[0] is not None
    assert nothing_differs.ran[-1] == large


def test_where_the_base_differs_under_the_variants_config_nothing_else_is_compiled() -> None:
    base = BaseDoubler(OTHERS[-1])
    case = drawn(base, OTHERS[-1])
    assert case.check([3 * case.tensors["x"]]) == (None, OUTSIDE_DOMAIN)
    assert base.ran == [OTHERS[-1]]
    assert base.compiled == []


def test_what_differed_before_is_asked_first_the_next_time() -> None:
    base = BaseDoubler(OTHERS[0])
    case = drawn(base, OTHERS[-1])
    assert case.check([3 * case.tensors["x"]]) == (None, OUTSIDE_DOMAIN)
    base.ran.clear()
    base.compiled.clear()
    nearly = case.twin(torch.Generator().manual_seed(1))
    assert nearly.check([3 * nearly.tensors["x"]]) == (None, OUTSIDE_DOMAIN)
    assert base.ran == [OWN, OTHERS[0]], "the base's result on the new values, and what differed"
    assert base.compiled == []


class OverflowingBase(BaseDoubler):
    """Cannot handle large values."""

    def run(self, *asked: Any) -> BaseKernelRun:
        found = super().run(*asked)
        out = found.memory["out"]
        return replace(found, memory={**found.memory, "out": out.where(out.abs() < 1000, torch.inf)})


def test_what_is_compiled_for_values_that_the_base_cannot_handle_serves_others() -> None:
    """Only the values are drawn anew: sizes and alignment, which a binary is for, stay."""
    problem = problem_of(OverflowingBase(), OTHERS[0])
    for seed in range(20):
        how = DrawSpec("huge", "contiguous", torch.Generator().manual_seed(seed))
        proposed = problem.propose({"config": 0}, how)
        case = problem.case({"config": 0}, how)
        assert call_without_values(case) == proposed.call
        assert case.tensors["x"].abs().max() < 1000
