"""Softmax over a middle dimension: columns of a tile are reduced, neighbours share the cache line."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import (
    grid_2d,
    inside,
    lse_merge,
    prev_multiple_of,
    safe_exp_shift,
    tile_range,
)

if TYPE_CHECKING:
    import torch

FAMILY, HAND = "softmax", "functional"


@triton.jit
def column_stats(x):
    m = tl.max(x, axis=0)
    return m, tl.sum(tl.exp(x - safe_exp_shift(m)[None, :]), axis=0)


@triton.jit
def normalise(x, m, z):
    return tl.exp(x - safe_exp_shift(m)[None, :]) / z[None, :]


@triton.heuristics({"ONE_TILE": lambda args: args["N"] <= args["TILE_N"]})
@triton.jit
def fn_softmax_inner(x_ptr, y_ptr, N, K, TILE_N: tl.constexpr, TILE_K: tl.constexpr, ONE_TILE: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * N * K
    inner = tile_range(tl.program_id(0), TILE_K)
    if ONE_TILE:
        rows = tl.arange(0, TILE_N)
        mask = inside(rows, inner, N, K)
        at = base + grid_2d(rows, inner, K)
        x = tl.load(x_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
        m, z = column_stats(x)
        tl.store(y_ptr + at, normalise(x, m, z).to(y_ptr.dtype.element_ty), mask=mask)
    else:
        m = tl.full([TILE_K], float("-inf"), dtype=tl.float32)
        z = tl.zeros([TILE_K], dtype=tl.float32)
        for start in range(0, N, TILE_N):
            rows = start + tl.arange(0, TILE_N)
            at = base + grid_2d(rows, inner, K)
            x = tl.load(x_ptr + at, mask=inside(rows, inner, N, K), other=float("-inf")).to(tl.float32)
            m_tile, z_tile = column_stats(x)
            m, z = lse_merge(m, z, m_tile, z_tile)
        last = prev_multiple_of(N, TILE_N)
        for back in range(0, N, TILE_N):
            rows = last - back + tl.arange(0, TILE_N)
            mask = inside(rows, inner, N, K)
            at = base + grid_2d(rows, inner, K)
            x = tl.load(x_ptr + at, mask=mask, other=float("-inf"), eviction_policy="evict_first")
            tl.store(y_ptr + at, normalise(x.to(tl.float32), m, z).to(y_ptr.dtype.element_ty), mask=mask)


SPACE: Space = {
    "kwargs": {"TILE_N": [4, 16, 32, 128, 512], "TILE_K": [16, 32, 64, 128, 512]},
    "num_warps": [2, 4, 8],
    "num_stages": [2],
    "where": lambda p: 64 * p["num_warps"] <= p["TILE_N"] * p["TILE_K"] <= 16384,
}

Shape = tuple[int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    x = normal((m, n, k), device, seed=1, scale=2.0)
    y = unset((m, n, k), device)
    return {
        "args": (x, y, n, k),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(k, meta["TILE_K"]), m),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (data["args"][0].float().softmax(1),)


CASES = [
    Case(
        name=f"fn_softmax_inner/{m}x{n}x{k}",
        kernel=fn_softmax_inner,
        key=("N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (2, 50, 37)),
        reference=_reference,
        tolerance=(2e-3, 5e-3),
        flops=5.0 * m * n * k,
        bytes=4.0 * m * n * k,
    )
    for m, n, k in [
        (8, 32, 65536),
        (16, 160, 16384),
        (2, 4096, 4096),
        (64, 512, 256),
        (1, 65536, 64),
        (256, 1024, 64),
        (1, 1024, 16384),
        (1024, 96, 784),
        (4, 16384, 128),
    ]
]
