"""Softmax, backward: two passes over each row, several rows a program."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "softmax", "rows"


@triton.jit
def rows_softmax_bwd(
    dY_ptr,
    dY_stride,
    Y_ptr,
    Y_stride,
    dX_ptr,
    dX_stride,
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    STAGES: tl.constexpr,
):
    first_row = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM
    last_row = tl.minimum(first_row + ROWS_PER_PROGRAM, n_rows)
    for row_idx in range(first_row, last_row):
        dY_row = dY_ptr + row_idx * dY_stride
        Y_row = Y_ptr + row_idx * Y_stride
        dX_row = dX_ptr + row_idx * dX_stride
        dot = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
        for i in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            mask = offsets < n_cols
            dy = tl.load(dY_row + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
            y = tl.load(Y_row + offsets, mask=mask, other=0.0, eviction_policy="evict_last")
            dot += dy.to(tl.float32) * y.to(tl.float32)
        total = tl.sum(dot, axis=0)
        for i in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            mask = offsets < n_cols
            dy = tl.load(dY_row + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
            y = tl.load(Y_row + offsets, mask=mask, other=0.0, eviction_policy="evict_first")
            dx = y.to(tl.float32) * (dy.to(tl.float32) - total)
            tl.store(dX_row + offsets, dx, mask=mask)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE": [256, 1024, 4096, 16384],
        "ROWS_PER_PROGRAM": [1, 2, 8],
        "STAGES": [1, 3],
    },
    "num_warps": [2, 4, 16],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_SIZE"] <= 4096 * c["num_warps"],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    dy = normal((rows, cols), device, dtype=torch.bfloat16, seed=1)
    y = normal((rows, cols), device, dtype=torch.bfloat16, seed=2).softmax(-1)
    dx = unset((rows, cols), device, dtype=torch.bfloat16)
    return {
        "args": (dy, dy.stride(0), y, y.stride(0), dx, dx.stride(0), rows, cols),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(rows, meta["ROWS_PER_PROGRAM"]),),
        "outputs": (dx,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    dy, y = data["args"][0].float(), data["args"][2].float()
    return (y * (dy - (dy * y).sum(-1, keepdim=True)),)


CASES = [
    Case(
        name=f"rows_softmax_bwd/{rows}x{cols}",
        kernel=rows_softmax_bwd,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(1e-5, 1e-2),
        flops=4.0 * rows * cols,
        bytes=6.0 * rows * cols,
    )
    for (rows, cols), tiny in [
        ((65536, 2048), (5, 700)),
        ((32768, 4096), (2, 100)),
        ((8192, 8192), (2, 100)),
        ((131072, 512), (2, 100)),
        ((2048, 32000), (2, 100)),
        ((256, 65536), (2, 100)),
        ((512, 2048), (2, 100)),
        ((4096, 256), (2, 100)),
        ((64, 128256), (2, 100)),
    ]
]
