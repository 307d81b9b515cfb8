"""Log-softmax over the last dimension: tiles fold into running pairs, the second pass runs backwards."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
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

FAMILY, HAND = "softmax", "functional"


@triton.jit
def tile_stats(x):
    """(maximum, sum of exponentials) of every row of a tile."""
    m = tl.max(x, axis=1)
    return m, tl.sum(tl.exp(x - safe_exp_shift(m)[:, None]), axis=1)


@triton.heuristics({"ONE_TILE": lambda args: args["N"] <= args["TILE_N"]})
@triton.jit
def fn_log_softmax(x_ptr, y_ptr, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, ONE_TILE: tl.constexpr):
    rows = tile_range(tl.program_id(0), TILE_M)
    if ONE_TILE:
        cols = tl.arange(0, TILE_N)
        mask = inside(rows, cols, M, N)
        x = tl.load(x_ptr + grid_2d(rows, cols, N), mask=mask, other=float("-inf")).to(tl.float32)
        m, z = tile_stats(x)
        y = x - (safe_exp_shift(m) + tl.log(z))[:, None]
        tl.store(y_ptr + grid_2d(rows, cols, N), y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        m = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
        z = tl.zeros([TILE_M], dtype=tl.float32)
        for start in range(0, N, TILE_N):
            cols = start + tl.arange(0, TILE_N)
            mask = inside(rows, cols, M, N)
            x = tl.load(x_ptr + grid_2d(rows, cols, N), mask=mask, other=float("-inf")).to(tl.float32)
            m_tile, z_tile = tile_stats(x)
            m, z = lse_merge(m, z, m_tile, z_tile)
        lse = (safe_exp_shift(m) + tl.log(z))[:, None]
        # What was read last is still in the cache, so it is read again first.
        last = prev_multiple_of(N, TILE_N)
        for back in range(0, N, TILE_N):
            cols = last - back + tl.arange(0, TILE_N)
            mask = inside(rows, cols, M, N)
            x = tl.load(
                x_ptr + grid_2d(rows, cols, N), mask=mask, other=0.0, eviction_policy="evict_first"
            ).to(tl.float32)
            tl.store(y_ptr + grid_2d(rows, cols, N), (x - lse).to(y_ptr.dtype.element_ty), mask=mask)


SPACE: Space = {
    "kwargs": {"TILE_M": [1, 2, 8, 32], "TILE_N": [128, 512, 1024, 4096, 8192, 16384]},
    "num_warps": [2, 4, 8, 16],
    "num_stages": [2],
    "where": lambda p: 64 * p["num_warps"] <= p["TILE_M"] * p["TILE_N"] <= 16384,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    m, n = tiny if small else shape
    x = normal((m, n), device, dtype=torch.bfloat16, seed=1, scale=2.0)
    y = unset((m, n), device, dtype=torch.bfloat16)
    return {
        "args": (x, y, m, n),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["TILE_M"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (data["args"][0].float().log_softmax(-1),)


CASES = [
    Case(
        name=f"fn_log_softmax/{m}x{n}",
        kernel=fn_log_softmax,
        key=("M", "N"),
        space=SPACE,
        make=partial(_make, (m, n), tiny),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        # Compare, subtract, exponentiate, add; subtract.
        flops=5.0 * m * n,
        bytes=4.0 * m * n,
    )
    for (m, n), tiny in [
        ((4096, 32000), (3, 700)),
        ((512, 128256), (3, 700)),
        ((16, 151936), (3, 700)),
        ((1024, 50304), (3, 700)),
        ((16384, 4096), (3, 700)),
        ((8192, 1024), (3, 700)),
        ((65536, 256), (3, 700)),
        ((262144, 80), (3, 700)),
        ((128, 16384), (3, 700)),
    ]
]
