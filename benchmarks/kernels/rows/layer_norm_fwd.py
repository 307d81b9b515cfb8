"""Layer norm, forward: a whole row in one block, several rows a program."""

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
def rows_layer_norm_fwd(
    Y_ptr,
    Y_row_stride,
    X_ptr,
    X_row_stride,
    W_ptr,
    B_ptr,
    Mean_ptr,
    RSTD_ptr,
    n_rows,
    n_cols,
    eps,
    ROWS_PER_PROGRAM: tl.constexpr,
    W_ONCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    first_row = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM
    cols = tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    if W_ONCE:
        W_row = tl.load(W_ptr + cols, mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            B_row = tl.load(B_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    for r in range(ROWS_PER_PROGRAM):
        row_idx = first_row + r
        if row_idx < n_rows:
            x = tl.load(X_ptr + row_idx * X_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(x, axis=0) / n_cols
            centered = tl.where(mask, x - mean, 0.0)
            rstd = tl.rsqrt(tl.sum(centered * centered, axis=0) / n_cols + eps)
            tl.store(Mean_ptr + row_idx, mean)
            tl.store(RSTD_ptr + row_idx, rstd)
            y = centered * rstd
            if W_ONCE:
                y = y * W_row
                if HAS_BIAS:
                    y = y + B_row
            else:
                y = y * tl.load(W_ptr + cols, mask=mask, other=0.0).to(tl.float32)
                if HAS_BIAS:
                    y = y + tl.load(B_ptr + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(Y_ptr + row_idx * Y_row_stride + cols, y, mask=mask)


SPACE: Space = {
    "kwargs": {"ROWS_PER_PROGRAM": [1, 2, 4, 8, 16], "W_ONCE": [True, False]},
    "num_warps": [1, 2, 4, 8, 16, 32],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    x = normal((rows, cols), device, seed=1)
    w, b = normal((cols,), device, seed=2), normal((cols,), device, seed=3)
    y = unset((rows, cols), device)
    mean, rstd = unset((rows,), device, dtype=torch.float32), unset((rows,), device, dtype=torch.float32)
    return {
        "args": (y, y.stride(0), x, x.stride(0), w, b, mean, rstd, rows, cols, 1e-5),
        "kwargs": {"HAS_BIAS": True},
        "grid": lambda meta: (triton.cdiv(rows, meta["ROWS_PER_PROGRAM"]),),
        "outputs": (y, mean, rstd),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    _, _, x, _, w, b, *_, eps = data["args"]
    x = x.float()
    mean = x.mean(-1)
    rstd = (x.var(-1, correction=0) + eps).rsqrt()
    return (x - mean[:, None]) * rstd[:, None] * w.float() + b.float(), mean, rstd


CASES = [
    Case(
        name=f"rows_layer_norm_fwd/{rows}x{cols}",
        kernel=rows_layer_norm_fwd,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        flops=8.0 * rows * cols,
        bytes=4.0 * rows * cols + 4.0 * cols + 8.0 * rows,
    )
    for (rows, cols), tiny in [
        ((65536, 1024), (19, 300)),
        ((12608, 768), (2, 100)),
        ((1024, 1024), (2, 100)),
        ((256, 640), (2, 100)),
        ((16384, 4096), (2, 100)),
        ((8192, 3072), (2, 100)),
        ((512, 2560), (2, 100)),
        ((8192, 8192), (2, 100)),
        ((64, 5120), (2, 100)),
        ((32768, 5120), (2, 100)),
    ]
]
