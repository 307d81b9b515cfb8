"""Kernels over host-side descriptors, whose blocks a config's `pre_hook` sets before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from forecast_autotune import autotune
from forecast_autotune.records import Argument, Device, Kernel, Problem
from forecast_integrations.triton.problem.describe import call_arguments, call_kind, problem_identity
from forecast_integrations.triton.problem.rebuilt_call import RebuildError, rebuilt_value
from tests.integrations.null import fresh


@triton.jit
def copy_tile(into, source, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = source.load([tl.program_id(0) * ROWS, 0])
    # A block of another shape than the config's cannot be added to a tensor of the config's shape.
    into.store([tl.program_id(0) * ROWS, 0], tile + tl.zeros([ROWS, COLUMNS], dtype=tl.float16))


def set_blocks(named: dict[str, Any]) -> None:
    for name in ("into", "source"):
        named[name].block_shape = [named["ROWS"], named["COLUMNS"]]


def tile_configs() -> list[triton.Config]:
    return [
        triton.Config({"ROWS": rows, "COLUMNS": 64}, num_warps=warps, pre_hook=set_blocks)
        for rows in (16, 32, 64)
        for warps in (2, 4)
    ]


@pytest.mark.parametrize("compiler", ["fork", "threads"])
def test_every_config_compiles_with_its_own_blocks(
    device: Any, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_COMPILER", compiler)
    monkeypatch.setenv("FORECAST_AUTOTUNE_MODE", "exhaustive")
    tuner = autotune(configs=tile_configs(), key=[], store=False)(fresh(copy_tile))
    x = TensorDescriptor.from_tensor(torch.empty(128, 64, dtype=torch.float16), [1, 64])
    y = TensorDescriptor.from_tensor(torch.empty(128, 64, dtype=torch.float16), [1, 64])
    tuner[lambda meta: (128 // meta["ROWS"],)](y, x)
    assert tuner.decision.measured == 6
    assert all(time > 0 for time in map(min, tuner.configs_timings.values()))


def described(descriptor: TensorDescriptor) -> Problem:
    arguments = call_arguments(copy_tile, {"into": descriptor, "source": descriptor})
    identity = problem_identity(arguments, [])
    return Problem.of(Kernel("copy_tile", "triton"), arguments, Device("nowhere"), identity=identity)


def test_a_descriptor_is_made_again_from_its_record() -> None:
    tensor = torch.empty(128, 96, dtype=torch.float16)[:, :64]
    problem = described(TensorDescriptor(tensor, [100, 64], [96, 1], [32, 64]))
    record = Problem.from_json(problem.to_json()).arguments[0]
    made = rebuilt_value(record)
    assert isinstance(made, TensorDescriptor)
    assert (made.shape, made.strides, made.block_shape) == ([100, 64], [96, 1], [32, 64])
    assert (tuple(made.base.shape), made.base.stride(), made.base.dtype) == (
        (128, 64),
        (96, 1),
        torch.float16,
    )


def test_calls_are_of_one_kind_whatever_block_a_hook_has_set() -> None:
    tensor = torch.empty(128, 64, dtype=torch.float16)
    one, other = (described(TensorDescriptor.from_tensor(tensor, [n, 64])) for n in (1, 32))
    assert one.id == other.id
    assert call_kind(one, copy_tile) == call_kind(other, copy_tile)


@pytest.mark.parametrize(
    "extra",
    [{}, {"block": [3, 64]}, {"block": ["a", 64]}, {"block": 7}, {"block": [16]}, {"strides": [63, 1]}],
)
def test_descriptors_that_cannot_be_made_are_refused(extra: dict[str, Any]) -> None:
    sound = {"shape": [128, 64], "strides": [64, 1], "block": [16, 64]}
    given = {"descriptor": {**sound, **extra} if extra else True}
    with pytest.raises(RebuildError, match="TMA descriptor"):
        rebuilt_value(Argument("a", "tensor", "float16", (128, 64), (64, 1), True, extra=given))
