"""Weight normalisation over the first dimension: columns are measured, then scaled by their gain."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import grid_2d, inside, prev_multiple_of, tile_range

FAMILY, HAND = "norm", "functional"


@triton.jit
def squares_of(ptr, rows, cols, M, N):
    x = tl.load(ptr + grid_2d(rows, cols, N), mask=inside(rows, cols, M, N), other=0.0).to(tl.float32)
    return x * x


@triton.jit
def fn_weight_norm(
    v_ptr,
    g_ptr,
    w_ptr,
    norm_ptr,
    M,
    N,
    eps,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    cols = tile_range(tl.program_id(0), TILE_N)
    total = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for start in range(0, M, TILE_M):
        total += squares_of(v_ptr, start + tl.arange(0, TILE_M), cols, M, N)
    norm = tl.sqrt(tl.sum(total, axis=0) + eps)
    tl.store(norm_ptr + cols, norm, mask=cols < N)
    scale = tl.load(g_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) / norm
    last = prev_multiple_of(M, TILE_M)
    for step in range(0, M, TILE_M):
        rows = (last - step if BACKWARDS else step) + tl.arange(0, TILE_M)
        at = grid_2d(rows, cols, N)
        mask = inside(rows, cols, M, N)
        v = tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(w_ptr + at, (v * scale[None, :]).to(w_ptr.dtype.element_ty), mask=mask)


SPACE: Space = {
    "kwargs": {
        "TILE_M": [16, 64, 128, 512],
        "TILE_N": [4, 16, 32, 128],
        "BACKWARDS": [False, True],
    },
    "num_warps": [4, 8, 16],
    "num_stages": [2],
    "where": lambda p: 64 * p["num_warps"] <= p["TILE_M"] * p["TILE_N"] <= 8192,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    m, n = tiny if small else shape
    v = normal((m, n), device, dtype=torch.bfloat16, seed=1)
    g = normal((n,), device, dtype=torch.bfloat16, seed=2)
    w, norm = unset((m, n), device, dtype=torch.bfloat16), unset((n,), device, dtype=torch.float32)
    return {
        "args": (v, g, w, norm, m, n, 1e-12),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(n, meta["TILE_N"]),),
        "outputs": (w, norm),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    v, g = (t.float() for t in data["args"][:2])
    norm = v.norm(dim=0)
    return v * (g / norm), norm


CASES = [
    Case(
        name=f"fn_weight_norm/{m}x{n}",
        kernel=fn_weight_norm,
        key=("M", "N"),
        space=SPACE,
        make=partial(_make, (m, n), (45, 70)),
        reference=_reference,
        tolerance=(1e-3, 1e-2),
        flops=3.0 * m * n,
        bytes=4.0 * m * n + 2.0 * n + 4.0 * n,
    )
    for m, n in [
        (4096, 4096),
        (11008, 4096),
        (1024, 16384),
        (16384, 1024),
        (65536, 256),
        (512, 512),
        (256, 65536),
        (8192, 8192),
        (131072, 1024),
    ]
]
