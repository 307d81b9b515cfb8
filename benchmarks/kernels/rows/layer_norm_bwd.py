"""Layer norm, backward, over a tile of rows; weight and bias gradients by fp32 atomics."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "norm", "rows"


@triton.jit
def rows_layer_norm_bwd(
    dY_ptr,
    X_ptr,
    W_ptr,
    Mean_ptr,
    RSTD_ptr,
    dX_ptr,
    dW_ptr,
    dB_ptr,
    stride_row,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < n_rows
    mean = tl.load(Mean_ptr + rows, mask=row_mask, other=0.0)[:, None]
    rstd = tl.load(RSTD_ptr + rows, mask=row_mask, other=0.0)[:, None]
    dY_ptrs = dY_ptr + rows[:, None] * stride_row
    X_ptrs = X_ptr + rows[:, None] * stride_row
    dX_ptrs = dX_ptr + rows[:, None] * stride_row

    c1 = tl.zeros((ROWS, BLOCK_SIZE), dtype=tl.float32)
    c2 = tl.zeros((ROWS, BLOCK_SIZE), dtype=tl.float32)
    for i in range(0, n_cols, BLOCK_SIZE):
        cols = i + tl.arange(0, BLOCK_SIZE)
        mask = row_mask[:, None] & (cols < n_cols)[None, :]
        dy = tl.load(dY_ptrs + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X_ptrs + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(W_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        wdy = dy * w[None, :]
        c1 += wdy * (x - mean) * rstd
        c2 += wdy
    mean_c1 = tl.sum(c1, axis=1)[:, None] / n_cols
    mean_c2 = tl.sum(c2, axis=1)[:, None] / n_cols

    last = (tl.cdiv(n_cols, BLOCK_SIZE) - 1) * BLOCK_SIZE
    for i in range(0, n_cols, BLOCK_SIZE):
        cols = last - i + tl.arange(0, BLOCK_SIZE) if REVERSE else i + tl.arange(0, BLOCK_SIZE)
        mask = row_mask[:, None] & (cols < n_cols)[None, :]
        dy = tl.load(dY_ptrs + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X_ptrs + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        w = tl.load(W_ptr + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        x_hat = (x - mean) * rstd
        dx = (dy * w[None, :] - (x_hat * mean_c1 + mean_c2)) * rstd
        tl.store(dX_ptrs + cols[None, :], dx, mask=mask)
        tl.atomic_add(dW_ptr + cols, tl.sum(dy * x_hat, axis=0), mask=cols < n_cols, sem="relaxed")
        tl.atomic_add(dB_ptr + cols, tl.sum(dy, axis=0), mask=cols < n_cols, sem="relaxed")


SPACE: Space = {
    "kwargs": {"ROWS": [1, 4, 16, 64], "BLOCK_SIZE": [64, 128, 256, 512, 1024], "REVERSE": [False, True]},
    "num_warps": [4, 8],
    "num_stages": [1],
    "where": lambda c: 256 <= c["ROWS"] * c["BLOCK_SIZE"] <= 16384,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    dy, x = normal((rows, cols), device, seed=1), normal((rows, cols), device, seed=2)
    w = normal((cols,), device, seed=3)
    mean = normal((rows,), device, dtype=torch.float32, seed=4, scale=0.1)
    rstd = normal((rows,), device, dtype=torch.float32, seed=5, scale=0.1).abs() + 0.9
    dx = unset((rows, cols), device)
    dw = torch.zeros(cols, dtype=torch.float32, device=device)
    db = torch.zeros(cols, dtype=torch.float32, device=device)
    return {
        "args": (dy, x, w, mean, rstd, dx, dw, db, x.stride(0), rows, cols),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(rows, meta["ROWS"]),),
        "outputs": (dx, dw, db),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    dy, x, w, mean, rstd = data["args"][:5]
    dy, rstd = dy.float(), rstd[:, None]
    x_hat = (x.float() - mean[:, None]) * rstd
    wdy = dy * w.float()
    c1, c2 = (wdy * x_hat).mean(-1, keepdim=True), wdy.mean(-1, keepdim=True)
    return (wdy - x_hat * c1 - c2) * rstd, (dy * x_hat).sum(0), dy.sum(0)


CASES = [
    Case(
        name=f"rows_layer_norm_bwd/{rows}x{cols}",
        kernel=rows_layer_norm_bwd,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(1e-2, 5e-3),
        reset_to_zero=("dW_ptr", "dB_ptr"),
        flops=14.0 * rows * cols,
        bytes=6.0 * rows * cols + 10.0 * cols + 8.0 * rows,
    )
    for (rows, cols), tiny in [
        ((8192, 4096), (21, 150)),
        ((65536, 1024), (2, 100)),
        ((12608, 768), (2, 100)),
        ((2048, 8192), (2, 100)),
        ((256, 4096), (2, 100)),
        ((1024, 1280), (2, 100)),
        ((32768, 320), (2, 100)),
        ((4096, 5120), (2, 100)),
    ]
]
