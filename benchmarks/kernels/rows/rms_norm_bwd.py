"""RMS norm, backward: a block of rows per program, the weight gradient as one partial a program."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "norm", "rows"


@triton.heuristics({"BLOCK_SIZE": lambda args: triton.next_power_of_2(args["n_cols"])})
@triton.jit
def rows_rms_norm_bwd(
    dY_ptr,
    dY_row_stride,
    X_ptr,
    X_row_stride,
    W_ptr,
    RSTD_ptr,
    dX_ptr,
    dX_row_stride,
    dW_ptr,
    dW_row_stride,
    n_rows,
    n_cols,
    rows_per_program,
    offset,
    ROWS: tl.constexpr,
    W_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row_block_id = tl.program_id(0).to(tl.int64)
    row_start = row_block_id * rows_per_program
    row_end = tl.minimum(row_start + rows_per_program, n_rows)
    cols = tl.arange(0, BLOCK_SIZE)
    col_mask = cols < n_cols

    dW_row = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
    W_row = tl.load(W_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
    for row in tl.range(row_start, row_end, ROWS, num_stages=STAGES):
        rows = row + tl.arange(0, ROWS)
        row_mask = rows < row_end
        mask = row_mask[:, None] & col_mask[None, :]
        dy = tl.load(dY_ptr + rows[:, None] * dY_row_stride + cols[None, :], mask=mask, other=0.0)
        x = tl.load(X_ptr + rows[:, None] * X_row_stride + cols[None, :], mask=mask, other=0.0)
        rstd = tl.load(RSTD_ptr + rows, mask=row_mask, other=0.0)[:, None]
        dy = dy.to(tl.float32)
        x = x.to(tl.float32)
        if not W_ONCE:
            W_row = tl.load(W_ptr + cols, mask=col_mask, other=0.0).to(tl.float32) + offset
        m = dy * W_row[None, :]
        dot = tl.sum(m * x, axis=1)[:, None] / n_cols
        dx = rstd * m - rstd * rstd * rstd * dot * x
        dW_row += tl.sum(dy * x * rstd, axis=0)
        tl.store(dX_ptr + rows[:, None] * dX_row_stride + cols[None, :], dx, mask=mask)

    tl.store(dW_ptr + row_block_id * dW_row_stride + cols, dW_row, mask=col_mask)


SPACE: Space = {
    "kwargs": {"ROWS": [1, 2, 4], "W_ONCE": [True, False], "STAGES": [1, 2, 3]},
    "num_warps": [4, 8, 16, 32],
    "num_stages": [1],
    "where": lambda c: c["ROWS"] < 4 or c["num_warps"] > 4,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    rows, cols, programs = tiny if small else shape
    dy = normal((rows, cols), device, dtype=torch.bfloat16, seed=1)
    x = normal((rows, cols), device, dtype=torch.bfloat16, seed=2)
    w = normal((cols,), device, dtype=torch.bfloat16, seed=3, scale=0.2)
    rstd = normal((rows,), device, dtype=torch.float32, seed=4, scale=0.1).abs() + 0.9
    dx = unset((rows, cols), device, dtype=torch.bfloat16)
    dw = unset((programs, cols), device, dtype=torch.float32)
    strides = (dy.stride(0), x.stride(0), dx.stride(0), dw.stride(0))
    return {
        "args": (
            dy,
            strides[0],
            x,
            strides[1],
            w,
            rstd,
            dx,
            strides[2],
            dw,
            strides[3],
            rows,
            cols,
            triton.cdiv(rows, programs),
            1.0,
        ),
        "kwargs": {},
        "grid": lambda _: (programs,),
        "outputs": (dx, dw),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    dy, _, x, _, w, rstd, _, _, dw, _, rows, cols, chunk, offset = data["args"]
    dy, x, rstd = dy.float(), x.float(), rstd[:, None]
    m = dy * (w.float() + offset)
    dx = rstd * m - rstd.pow(3) * (m * x).mean(-1, keepdim=True) * x
    padded = x.new_zeros(dw.shape[0] * chunk, cols)
    padded[:rows] = dy * x * rstd
    return dx, padded.view(dw.shape[0], chunk, cols).sum(1)


CASES = [
    Case(
        name=f"rows_rms_norm_bwd/{rows}x{cols}",
        kernel=rows_rms_norm_bwd,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols, programs), tiny),
        reference=_reference,
        tolerance=(2e-2, 1e-2),
        flops=11.0 * rows * cols,
        bytes=6.0 * rows * cols + 2.0 * cols + 4.0 * rows + 4.0 * programs * cols,
    )
    for (rows, cols, programs), tiny in [
        ((16384, 4096, 128), (11, 300, 3)),
        ((4096, 4096, 256), (2, 100, 2)),
        ((8192, 3072, 256), (2, 100, 2)),
        ((512, 2560, 32), (2, 100, 2)),
        ((8192, 8192, 256), (2, 100, 2)),
        ((2048, 5120, 128), (2, 100, 2)),
        ((1024, 7168, 64), (2, 100, 2)),
        ((65536, 1024, 512), (2, 100, 2)),
        ((4096, 768, 128), (2, 100, 2)),
    ]
]
