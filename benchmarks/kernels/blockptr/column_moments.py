"""Sums and sums of squares of columns: bands of rows are summed apart and added atomically."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal
from benchmarks.kernels.blockptr.tiles import load_block

FAMILY, HAND = "reduction", "blockptr"


@triton.jit
def bp_column_moments(
    x_ptr,
    sum_ptr,
    square_ptr,
    M,
    N,
    stride_xm,
    stride_xn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BANDS: tl.constexpr,
    REDUCE_LAST: tl.constexpr,
    PIPE: tl.constexpr,
):
    tl.assume(stride_xm > 0)
    off_n = tl.program_id(0) * BLOCK_N
    first = tl.program_id(1) * BLOCK_M
    if REDUCE_LAST:
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        squares = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    else:
        total = tl.zeros((1, BLOCK_N), dtype=tl.float32)
        squares = tl.zeros((1, BLOCK_N), dtype=tl.float32)
    for off_m in tl.range(first, M, BANDS * BLOCK_M, num_stages=PIPE):
        x = load_block(x_ptr, M, N, stride_xm, stride_xn, off_m, off_n, BLOCK_M, BLOCK_N).to(tl.float32)
        if REDUCE_LAST:
            total += x
            squares += x * x
        else:
            total += tl.sum(x, 0)[None, :]
            squares += tl.sum(x * x, 0)[None, :]
    cols = off_n + tl.arange(0, BLOCK_N)
    tl.atomic_add(sum_ptr + cols, tl.sum(total, 0), mask=cols < N, sem="relaxed")
    tl.atomic_add(square_ptr + cols, tl.sum(squares, 0), mask=cols < N, sem="relaxed")


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [8, 32],
        "BLOCK_N": [32, 128, 512],
        "BANDS": [4, 16, 64, 256],
        "REDUCE_LAST": [False, True],
        "PIPE": [1, 3],
    },
    "num_warps": [4, 8],
    "num_stages": [2],
    "where": lambda p: (
        (p["num_warps"] == 8) == (p["BLOCK_N"] * p["BLOCK_M"] >= 4096)
        and (p["PIPE"] == 3 or p["REDUCE_LAST"])
    ),
}


def _make(shape: tuple[int, int], device: str, small: bool = False) -> Data:
    m, n = (90, 70) if small else shape
    x = normal((m, n), device, dtype=torch.bfloat16, seed=1)
    total, squares = (torch.zeros(n, dtype=torch.float32, device=device) for _ in range(2))
    return {
        "args": (x, total, squares, m, n, *x.stride()),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(n, meta["BLOCK_N"]),
            min(meta["BANDS"], triton.cdiv(m, meta["BLOCK_M"])),
        ),
        "outputs": (total, squares),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x = data["args"][0].float()
    return x.sum(0), x.square().sum(0)


CASES = [
    Case(
        name=f"bp_column_moments/{m}x{n}",
        kernel=bp_column_moments,
        key=("M", "N"),
        space=SPACE,
        make=partial(_make, (m, n)),
        reference=_reference,
        # Sums of up to a million numbers of both signs.
        tolerance=(2e-2, 1e-3),
        reset_to_zero=("sum_ptr", "square_ptr"),
        # Two additions and a square.
        flops=3.0 * m * n,
        bytes=2.0 * m * n + 8.0 * n,
    )
    for m, n in [
        (8192, 8192),
        (65536, 1024),
        (1048576, 64),
        (256, 65536),
        (2048, 4096),
        (802816, 256),
        (512, 1024),
        (32768, 11008),
    ]
]
