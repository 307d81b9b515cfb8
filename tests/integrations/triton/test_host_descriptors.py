"""Kernels over host-side descriptors, whose blocks a config's `pre_hook` sets before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from forecast_autotune import autotune
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
