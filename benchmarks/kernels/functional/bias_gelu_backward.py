"""Backward of bias + GELU: input gradient tile by tile, bias gradient summed on the way down."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import gelu_tanh_grad, inside, tile_range

FAMILY, HAND = "activation", "functional"


@triton.jit
def load_tile(ptr, rows, cols, M, N):
    at = rows[:, None].to(tl.int64) * N + cols[None, :]
    return tl.load(ptr + at, mask=inside(rows, cols, M, N), other=0.0).to(tl.float32)


@triton.jit
def fn_bias_gelu_backward(
    dy_ptr,
    x_ptr,
    bias_ptr,
    dx_ptr,
    dbias_ptr,
    M,
    N,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEPS: tl.constexpr,
):
    cols = tile_range(tl.program_id(1), TILE_N)
    bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    acc = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for step in range(STEPS):
        rows = tile_range(tl.program_id(0) * STEPS + step, TILE_M)
        x = load_tile(x_ptr, rows, cols, M, N)
        dx = load_tile(dy_ptr, rows, cols, M, N) * gelu_tanh_grad(x + bias[None, :])
        at = rows[:, None].to(tl.int64) * N + cols[None, :]
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside(rows, cols, M, N))
        acc += dx
    tl.atomic_add(dbias_ptr + cols, tl.sum(acc, axis=0), mask=cols < N, sem="relaxed")


SPACE: Space = {
    "kwargs": {"TILE_M": [1, 8, 32], "TILE_N": [64, 128, 512, 2048], "STEPS": [1, 4, 16]},
    "num_warps": [2, 4, 8],
    "num_stages": [2],
    "where": lambda p: 64 <= p["TILE_M"] * p["TILE_N"] // p["num_warps"] <= 2048,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    m, n = tiny if small else shape
    dy = normal((m, n), device, dtype=torch.bfloat16, seed=1, scale=0.25)
    x = normal((m, n), device, dtype=torch.bfloat16, seed=2)
    bias = normal((n,), device, dtype=torch.bfloat16, seed=3)
    dx = unset((m, n), device, dtype=torch.bfloat16)
    dbias = torch.zeros(n, dtype=torch.float32, device=device)
    return {
        "args": (dy, x, bias, dx, dbias, m, n),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(m, meta["TILE_M"] * meta["STEPS"]),
            triton.cdiv(n, meta["TILE_N"]),
        ),
        "outputs": (dx, dbias),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    dy, x, bias = (t.float() for t in data["args"][:3])
    s = x + bias
    t = torch.tanh(0.7978845608028654 * (s + 0.044715 * s**3))
    slope = 0.5 * (1 + t) + 0.5 * s * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * s * s)
    dx = dy * slope
    return dx, dx.sum(0)


CASES = [
    Case(
        name=f"fn_bias_gelu_backward/{m}x{n}",
        kernel=fn_bias_gelu_backward,
        key=("M", "N"),
        space=SPACE,
        make=partial(_make, (m, n), (37, 150)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        reset_to_zero=("dbias_ptr",),
        # tanh (4), its argument (5), the slope (10), product and sum (3).
        flops=22.0 * m * n,
        bytes=6.0 * m * n + 2.0 * n + 4.0 * n,
    )
    for m, n in [
        (8192, 4096),
        (16384, 3072),
        (4096, 14336),
        (1024, 1024),
        (49152, 512),
        (256, 16384),
        (2048, 5120),
        (65520, 320),
        (64, 4096),
    ]
]
