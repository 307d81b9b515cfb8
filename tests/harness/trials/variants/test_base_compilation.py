"""What is compiled before it is launched on a device, and how little of it: judged here without one."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from forecast_autotune.records import Argument, Config
from forecast_harness.sandbox.api import CandidateFault, CellAnswer, Fault, JobContext, ResourceLimits
from forecast_harness.sandbox.jobs import TensorBytes
from forecast_harness.targets.kernels.base_kernel import KernelSurvey
from forecast_harness.trials.variants.base_runner import BaseKernelRunner, gap_mask
from forecast_harness.trials.variants.call_sampling import _has_gaps
from forecast_harness.trials.variants.compilation import CELL_ENTRY
from forecast_harness.trials.variants.files import READ_ENTRY, WRITE_ENTRY
from forecast_harness.trials.variants.jobs import VariantProblem
from forecast_harness.verify.launcher import CELL_ENTRIES
from forecast_harness.verify.problem import DrawSpec, LaunchCase
from tests.harness.base_doubler import BaseDoubler
from tests.harness.variant_kernels import DOUBLE, subject, vector_call

SMALL, LARGE = Config.of({"BLOCK": 64}), Config.of({"BLOCK": 1024})


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class Cell:
    """Notes what it is asked; `fails` at that."""

    age: float | None = None

    def __init__(self, fails: str = "") -> None:
        self.asked: list[str] = []
        self.closed = False
        self._fails = fails

    def ask(
        self, entry: str, payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes] | None = None
    ) -> CellAnswer:
        self.asked.append(entry)
        if entry == self._fails:
            raise CandidateFault(Fault.KILLED, "it died")
        read = {"key/k.cubin": TensorBytes("uint8", (2,), b"ab")}
        return CellAnswer({}, read if entry == READ_ENTRY else {})

    def close(self) -> None:
        self.closed = True


class Work:
    """Gives one cell after the other."""

    limits = ResourceLimits()

    def __init__(self, *cells: Cell) -> None:
        self.cells = list(cells)

    def cell(self, limits: ResourceLimits) -> Cell:
        return self.cells.pop(0)


def runner(*cells: Cell) -> BaseKernelRunner:
    return BaseKernelRunner(cast("JobContext", Work(*cells)), "cuda", random.Random(0), {})


def test_a_cell_that_dies_while_it_compiles_is_replaced() -> None:
    dead, other = Cell(CELL_ENTRY), Cell()
    base = runner(dead, other)
    base.compile_ahead([{"tensors": {}, "call": {}}])
    assert dead.closed
    assert list(base.compiled()) == ["key/k.cubin"]
    assert WRITE_ENTRY not in other.asked, "nothing was known"


def test_a_cell_that_cannot_be_opened_is_asked_again_later() -> None:
    broken, other = Cell(f"{CELL_ENTRIES}:prepare"), Cell()
    base = runner(broken, other)
    base.open()
    assert broken.closed
    assert list(base.compiled()) == ["key/k.cubin"]


def problem_of(reference: BaseDoubler, configs: Sequence[Config], device: str) -> VariantProblem:
    request = subject(DOUBLE, vector_call(), vector_call(100))
    known = KernelSurvey(
        ("out",), (), SMALL, True, words={"x.0": "any"}, evidence=3, most=1 << 14, signature="{}"
    )
    runner, takes = cast("BaseKernelRunner", reference), ("x", "out", "n", "BLOCK")
    return VariantProblem(request, known, runner, configs, device, True, takes)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_calls_are_launched_with_configs_that_were_compiled_for_such(device: str) -> None:
    problem = problem_of(BaseDoubler(), [SMALL, LARGE], device)
    how = DrawSpec("normal", "contiguous", generator())

    def told(case: LaunchCase) -> tuple[int, int]:
        given = case.call["kwargs"]
        return given["_meta"]["v"]["BLOCK"], given["n"]["v"]

    first = [told(problem.case({"config": 0}, how)) for _ in range(12)]
    assert {block for block, _ in first} == {64}
    assert {n % 16 == 0 for _, n in first if n > 1} == {True, False}
    later = [told(problem.case(None, how)) for _ in range(16)]
    assert {block for block, n in later if n > 1} == ({64} if device == "cuda" else {64, 1024})
    assert max(n for _, n in later) > 1024, "sizes are those of the larger tile all the same"


def test_values_that_changed_in_place_are_given_to_the_base_anew() -> None:
    base = BaseDoubler()
    how = DrawSpec("normal", "contiguous", generator())
    case = problem_of(base, [SMALL], "cuda").case({"config": 0}, how)
    base.ran.clear()
    case.tensors["x"].add_(1)
    assert case.check([2 * case.tensors["x"]])[0] is None
    assert base.ran == [SMALL]


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
