"""Matrix times vector: a tile of rows walks along the columns, the lanes are added up at the end."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import grid_2d, inside, tile_range

FAMILY, HAND = "gemv", "functional"


@triton.jit
def add(a, b):
    return a + b


@triton.jit
def partial_products(a_ptr, x_ptr, rows, cols, M, N):
    a = tl.load(
        a_ptr + grid_2d(rows, cols, N),
        mask=inside(rows, cols, M, N),
        other=0.0,
        eviction_policy="evict_first",
    )
    x = tl.load(x_ptr + cols, mask=cols < N, other=0.0)
    return a.to(tl.float32) * x.to(tl.float32)[None, :]


@triton.jit
def fn_mv(a_ptr, x_ptr, y_ptr, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, UNROLL: tl.constexpr):
    rows = tile_range(tl.program_id(0), TILE_M)
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for start in range(0, N, TILE_N * UNROLL):
        for step in tl.static_range(UNROLL):
            cols = start + step * TILE_N + tl.arange(0, TILE_N)
            acc += partial_products(a_ptr, x_ptr, rows, cols, M, N)
    y = tl.reduce(acc, axis=1, combine_fn=add)
    tl.store(y_ptr + rows, y.to(y_ptr.dtype.element_ty), mask=rows < M)


SPACE: Space = {
    "kwargs": {"TILE_M": [1, 4, 16, 64], "TILE_N": [64, 256, 1024], "UNROLL": [1, 2, 4]},
    "num_warps": [2, 4, 8],
    "num_stages": [2],
    "where": lambda p: 64 * p["num_warps"] <= p["TILE_M"] * p["TILE_N"] <= 8192,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    m, n = tiny if small else shape
    a = normal((m, n), device, dtype=torch.bfloat16, seed=1)
    x = normal((n,), device, dtype=torch.bfloat16, seed=2, scale=n**-0.5)
    y = unset((m,), device, dtype=torch.bfloat16)
    return {
        "args": (a, x, y, m, n),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["TILE_M"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, x = data["args"][:2]
    return (a.float() @ x.float(),)


CASES = [
    Case(
        name=f"fn_mv/{m}x{n}",
        kernel=fn_mv,
        key=("M", "N"),
        space=SPACE,
        make=partial(_make, (m, n), (19, 300)),
        reference=_reference,
        tolerance=(2e-2, 1e-2),
        flops=2.0 * m * n,
        bytes=2.0 * (m * n + n + m),
    )
    for m, n in [
        (4096, 4096),
        (14336, 4096),
        (4096, 14336),
        (128256, 4096),
        (1024, 8192),
        (65536, 256),
        (256, 65536),
        (1048576, 64),
        (16384, 16384),
        (32768, 1024),
    ]
]
