"""Batched matrix product; heuristics say which sides divide evenly and need no mask."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import grid_2d, inside, tile_range

if TYPE_CHECKING:
    import torch

FAMILY, HAND = "gemm", "functional"


@triton.jit
def maybe_masked(ptrs, mask, DIVISIBLE: tl.constexpr):
    if DIVISIBLE:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.heuristics(
    {
        "DIVISIBLE_MN": lambda args: args["M"] % args["TILE_M"] == 0 and args["N"] % args["TILE_N"] == 0,
        "DIVISIBLE_K": lambda args: args["K"] % args["TILE_K"] == 0,
    }
)
@triton.jit
def fn_bmm(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BATCH_FIRST: tl.constexpr,
    DIVISIBLE_MN: tl.constexpr,
    DIVISIBLE_K: tl.constexpr,
):
    if BATCH_FIRST:
        batch = tl.program_id(0).to(tl.int64)
        tile = tl.program_id(1)
    else:
        batch = tl.program_id(1).to(tl.int64)
        tile = tl.program_id(0)
    tiles_n = tl.cdiv(N, TILE_N)
    rows = tile_range(tile // tiles_n, TILE_M)
    cols = tile_range(tile % tiles_n, TILE_N)
    a_ptr += batch * M * K
    b_ptr += batch * K * N
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for start in range(0, K, TILE_K):
        depth = start + tl.arange(0, TILE_K)
        a = maybe_masked(
            a_ptr + grid_2d(rows, depth, K), inside(rows, depth, M, K), DIVISIBLE_MN and DIVISIBLE_K
        )
        b = maybe_masked(
            b_ptr + grid_2d(depth, cols, N), inside(depth, cols, K, N), DIVISIBLE_MN and DIVISIBLE_K
        )
        acc = tl.dot(a, b, acc)
    c_ptrs = c_ptr + batch * M * N + grid_2d(rows, cols, N)
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=inside(rows, cols, M, N))


SPACE: Space = {
    "kwargs": {
        "TILE_M": [16, 32, 64, 128],
        "TILE_N": [32, 64, 128],
        "TILE_K": [32, 64],
        "BATCH_FIRST": [False, True],
    },
    "num_warps": [2, 4, 8],
    "num_stages": [3],
    "where": lambda p: (
        512 <= p["TILE_M"] * p["TILE_N"] // p["num_warps"] <= 2048
        and not (p["BATCH_FIRST"] and p["TILE_K"] == 32)
    ),
}

Shape = tuple[int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    batch, m, n, k = tiny if small else shape
    a = normal((batch, m, k), device, seed=1)
    b = normal((batch, k, n), device, seed=2, scale=k**-0.5)
    c = unset((batch, m, n), device)

    def grid(meta: dict[str, int]) -> tuple[int, ...]:
        tiles = triton.cdiv(m, meta["TILE_M"]) * triton.cdiv(n, meta["TILE_N"])
        return (batch, tiles) if meta["BATCH_FIRST"] else (tiles, batch)

    return {"args": (a, b, c, m, n, k), "kwargs": {}, "grid": grid, "outputs": (c,)}


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][:2]
    return (a.float() @ b.float(),)


CASES = [
    Case(
        name=f"fn_bmm/{batch}x{m}x{n}x{k}",
        kernel=fn_bmm,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (batch, m, n, k), (2, 40, 50, 72)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=2.0 * batch * m * n * k,
        bytes=2.0 * batch * (m * k + k * n + m * n),
    )
    for batch, m, n, k in [
        (32, 1024, 1024, 128),
        (32, 1024, 128, 1024),
        (64, 512, 512, 64),
        (512, 128, 128, 128),
        (8, 2048, 2048, 512),
        (16, 32, 4096, 4096),
        (256, 16, 128, 2048),
        (4, 4096, 768, 768),
        (96, 208, 208, 64),
        (128, 16, 512, 128),
    ]
]
