"""Variants in Triton's interpreter, where launches really calculate: own grids, zeroing, falling back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
import triton

from forecast_autotune import autotune
from forecast_autotune.variants import Check, Origin, Provenance, Variant
from forecast_autotune.variants.signature import INTERPRETER
from forecast_harness.targets.kernels.sizes import CallSizes
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.variants.loading import load_variant
from tests.integrations.interpreted.kernels import double
from tests.integrations.interpreted.support import Vector, blocks, grid

if TYPE_CHECKING:
    import torch

HEAD = """import triton
import triton.language as tl

CONFIGS = [{"kwargs": {"BLOCK": 128}}]
"""
PERSISTENT = (
    HEAD
    + """

def grid(meta, arguments, base):
    return (min(2, base[0]),)


@triton.jit
def double(x, out, tag, n, BASE_GRID_0, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), BASE_GRID_0, tl.num_programs(0)):
        i = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)
    tl.store(tag, BLOCK)
    tl.store(tag + 1, tl.num_programs(0))
"""
)
ADDED = (
    HEAD
    + """RESET_TO_ZERO = ["out"]


def grid(meta, arguments):
    return (triton.cdiv(arguments["n"], meta["BLOCK"]), 2)


@triton.jit
def double(x, out, tag, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out + i, tl.load(x + i, mask=i < n), mask=i < n)
    tl.store(tag, BLOCK)
    tl.store(tag + 1, tl.num_programs(1))
"""
)
SHARED = (
    HEAD
    + """

def grid(meta, arguments):
    return (triton.cdiv(arguments["n"], meta["BLOCK"]), 2)


def workspace(meta, arguments, base, grid):
    return grid[0] * grid[1] * meta["BLOCK"], grid[0]


@triton.jit
def double(x, out, tag, n, WORKSPACE, COUNTERS, BLOCK: tl.constexpr):
    tile, at = tl.program_id(0), tl.arange(0, BLOCK)
    i, part = tile * BLOCK + at, WORKSPACE + tile * 2 * BLOCK + at
    tl.store(part + tl.program_id(1) * BLOCK, tl.load(x + i, mask=i < n))
    if tl.atomic_add(COUNTERS + tile, 1) == 1:
        tl.store(out + i, tl.load(part) + tl.load(part + BLOCK), mask=i < n)
        tl.store(tag, BLOCK)
        tl.store(tag + 1, tl.num_programs(1))
"""
)


class Timed:
    """A `do_bench` that launches `times` times and finds the variant, whose BLOCK is 128, the fastest."""

    def __init__(self, tag: torch.Tensor, times: int = 3) -> None:
        self.tag, self.times, self.seen = tag, times, set[int]()

    def __call__(self, kernel_call: Any, quantiles: Any) -> list[float]:
        for _ in range(self.times):
            kernel_call()
        self.seen.add(int(self.tag[0]))
        return [1.0 if int(self.tag[0]) == 128 else 2.0] * 3


def record(source: str, vector: Vector, device: str = INTERPRETER) -> Variant:
    base = describe.kernel_record(double)
    named: Mapping[str, Any] = dict(zip(double.arg_names, vector.args, strict=False))
    signature = CallSizes.of([describe.call_arguments(double, named)]).signature(["out", "tag"])
    made = Variant.of(base.name, base.source_sha256, source, Provenance(Origin.LLM))
    return Variant(**{**vars(made), "checks": (Check(device, signature, True),)})


def tuned(vector: Vector, source: str, device: str = INTERPRETER) -> Any:
    given = {"do_bench": Timed(vector.tag), "store": False, "mode": "exhaustive"}
    variants = [record(source, vector, device)]
    return autotune(configs=blocks(16, 32), key=["n"], variants=variants, **given)(double)


@pytest.mark.parametrize(
    ("source", "n"),
    [
        pytest.param(
            PERSISTENT, 700, id="own grid"
        ),  # two programs do the work of as many as the call asks for
        pytest.param(ADDED, 300, id="zeroed"),  # the result is that of one launch, however often it is timed
        pytest.param(SHARED, 300, id="counters"),  # with a count left over, no program would be the last
    ],
)
def test_every_launch_is_right_timed_and_untimed(source: str, n: int) -> None:
    """With a grid of its own, with what it adds into zeroed, and with counters that begin at zero."""
    vector = Vector(n)
    vector.out[:n] = 7.0
    tuner = tuned(vector, source)
    for _ in range(3):
        tuner[grid](*vector.args)
        assert vector.doubled()
        assert vector.tag.tolist() == [128, 2]
        if source is not ADDED:
            vector.out.zero_()
    assert tuner.do_bench.seen == {16, 32, 128}


def test_a_check_of_a_gpu_is_none_of_the_interpreters() -> None:
    """Devices are told apart in both directions."""
    vector = Vector(300)
    tuner = tuned(vector, ADDED, device="nvidia-h200-cuda90")
    tuner[grid](*vector.args)
    assert vector.doubled()
    assert int(vector.tag[0]) in (16, 32)


def test_a_variant_under_heuristics_of_the_base() -> None:
    """Parameters that heuristics of the base fill are filled for the variant, too."""
    vector = Vector(300)
    under = triton.heuristics({"HALF": lambda args: args["BLOCK"] // 2})(double)
    source = ADDED.replace("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, HALF: tl.constexpr").replace(
        "tl.store(tag, BLOCK)", "tl.store(tag, 2 * HALF)"
    )
    assert describe.kernel_record(under).source_sha256 == describe.kernel_record(double).source_sha256
    loaded = load_variant(record(source, vector), under, None)
    loaded.run(*vector.args, grid=grid, warmup=False, BLOCK=128)
    assert vector.doubled()
    assert vector.tag.tolist() == [128, 2]
