"""Gradient of a bias: column sums of a bf16 matrix, added up in fp32 by atomics."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal

FAMILY, HAND = "reduction", "rows"


@triton.jit
def rows_bias_grad(
    dY_ptr,
    dY_row_stride,
    dB_ptr,
    n_rows,
    n_cols,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    STEPS_PER_PROGRAM: tl.constexpr,
    STAGES: tl.constexpr,
):
    cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    col_mask = cols < n_cols
    first_row = tl.program_id(1).to(tl.int64) * BLOCK_ROWS * STEPS_PER_PROGRAM
    last_row = tl.minimum(first_row + BLOCK_ROWS * STEPS_PER_PROGRAM, n_rows)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLS), dtype=tl.float32)
    for row in tl.range(first_row, last_row, BLOCK_ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, BLOCK_ROWS)
        mask = (rows < last_row)[:, None] & col_mask[None, :]
        acc += tl.load(dY_ptr + rows[:, None] * dY_row_stride + cols[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    tl.atomic_add(dB_ptr + cols, tl.sum(acc, axis=0), mask=col_mask, sem="relaxed")


SPACE: Space = {
    "kwargs": {
        "BLOCK_ROWS": [4, 16, 64],
        "BLOCK_COLS": [32, 64, 128, 256],
        "STEPS_PER_PROGRAM": [1, 8, 64],
        "STAGES": [1, 3],
    },
    "num_warps": [4],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    dy = normal((rows, cols), device, dtype=torch.bfloat16, seed=1)
    db = torch.zeros(cols, dtype=torch.float32, device=device)
    return {
        "args": (dy, dy.stride(0), db, rows, cols),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(cols, meta["BLOCK_COLS"]),
            triton.cdiv(rows, meta["BLOCK_ROWS"] * meta["STEPS_PER_PROGRAM"]),
        ),
        "outputs": (db,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (data["args"][0].sum(0, dtype=torch.float32),)


CASES = [
    Case(
        name=f"rows_bias_grad/{rows}x{cols}",
        kernel=rows_bias_grad,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(1e-2, 1e-3),
        reset_to_zero=("dB_ptr",),
        flops=1.0 * rows * cols,
        bytes=2.0 * rows * cols + 4.0 * cols,
    )
    for (rows, cols), tiny in [
        ((8192, 4096), (70, 150)),
        ((16384, 14336), (2, 100)),
        ((65536, 768), (2, 100)),
        ((4096, 12288), (2, 100)),
        ((512, 4096), (2, 100)),
        ((131072, 64), (2, 100)),
        ((2048, 1024), (2, 100)),
        ((131072, 320), (2, 100)),
    ]
]
