"""PolyNorm, forward: a weighted sum of the first three powers of a row, each RMS-normalised."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

if TYPE_CHECKING:
    import torch

FAMILY, HAND = "norm", "rows"


@triton.jit
def rows_poly_norm(
    Y_ptr,
    Y_row_stride,
    X_ptr,
    X_row_stride,
    W_ptr,
    B_ptr,
    n_cols,
    eps,
    BLOCK_SIZE: tl.constexpr,
    SCALAR_SUMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_idx = tl.program_id(0).to(tl.int64)
    X_ptr += row_idx * X_row_stride
    Y_ptr += row_idx * Y_row_stride
    if SCALAR_SUMS:
        s1, s2, s3 = 0.0, 0.0, 0.0
        for i in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            x = tl.load(X_ptr + offsets, mask=offsets < n_cols, other=0.0).to(tl.float32)
            x2 = x * x
            s1 += tl.sum(x2)
            s2 += tl.sum(x2 * x2)
            s3 += tl.sum(x2 * x2 * x2)
    else:
        a1 = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
        a2 = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
        a3 = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
        for i in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            x = tl.load(X_ptr + offsets, mask=offsets < n_cols, other=0.0).to(tl.float32)
            x2 = x * x
            a1 += x2
            a2 += x2 * x2
            a3 += x2 * x2 * x2
        s1, s2, s3 = tl.sum(a1), tl.sum(a2), tl.sum(a3)
    # The weights run from the cube down to the row itself.
    k3 = tl.load(W_ptr).to(tl.float32) * tl.rsqrt(s3 / n_cols + eps)
    k2 = tl.load(W_ptr + 1).to(tl.float32) * tl.rsqrt(s2 / n_cols + eps)
    k1 = tl.load(W_ptr + 2).to(tl.float32) * tl.rsqrt(s1 / n_cols + eps)
    b = tl.load(B_ptr).to(tl.float32)
    for i in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
        offsets = i + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X_ptr + offsets, mask=offsets < n_cols, other=0.0).to(tl.float32)
        tl.store(Y_ptr + offsets, ((k3 * x + k2) * x + k1) * x + b, mask=offsets < n_cols)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE": [256, 512, 1024, 2048, 4096, 8192],
        "SCALAR_SUMS": [True, False],
        "STAGES": [1, 3],
    },
    "num_warps": [2, 4, 16],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_SIZE"] <= 2048 * c["num_warps"],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    x = normal((rows, cols), device, seed=1)
    w, b = normal((3,), device, seed=2), normal((1,), device, seed=3)
    y = unset((rows, cols), device)
    return {
        "args": (y, y.stride(0), x, x.stride(0), w, b, cols, 1e-6),
        "kwargs": {},
        "grid": lambda _: (rows,),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    _, _, x, _, w, b, _, eps = data["args"]
    x, y = x.float(), b.float().expand(x.shape)
    for power, weight in zip((3, 2, 1), w.float(), strict=True):
        raised = x.pow(power)
        y = y + weight * raised * (raised.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (y,)


CASES = [
    Case(
        name=f"rows_poly_norm/{rows}x{cols}",
        kernel=rows_poly_norm,
        key=("n_cols",),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(1e-2, 5e-3),
        flops=12.0 * rows * cols,
        bytes=4.0 * rows * cols + 8.0,
    )
    for (rows, cols), tiny in [
        ((8192, 14336), (3, 700)),
        ((16384, 4096), (2, 100)),
        ((65536, 1024), (2, 100)),
        ((131072, 512), (2, 100)),
        ((2048, 28672), (2, 100)),
        ((64, 14336), (2, 100)),
        ((512, 2048), (2, 100)),
        ((128, 65536), (2, 100)),
    ]
]
