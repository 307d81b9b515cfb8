"""Generalised Jensen-Shannon divergence of two log-distributions and its gradient, columns split."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "loss", "rows"


@triton.jit
def rows_jsd(
    X_ptr,
    X_stride,
    Y_ptr,
    Y_stride,
    loss_ptr,
    dX_ptr,
    dX_stride,
    beta,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    COL_SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_idx = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    X_ptr += row_idx * X_stride
    Y_ptr += row_idx * Y_stride
    dX_ptr += row_idx * dX_stride
    loss = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
    for i in tl.range(split * BLOCK_SIZE, n_cols, BLOCK_SIZE * COL_SPLITS, num_stages=STAGES):
        offsets = i + tl.arange(0, BLOCK_SIZE)
        mask = offsets < n_cols
        x = tl.load(X_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
        y = tl.load(Y_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32)
        q = tl.exp(x)
        p = tl.exp(y)
        log_m = tl.log(beta * p + (1 - beta) * q)
        grad = (1 - beta) * q * (x - log_m)
        loss += tl.where(mask, beta * p * (y - log_m) + grad, 0.0)
        tl.store(dX_ptr + offsets, grad, mask=mask)
    tl.atomic_add(loss_ptr + row_idx, tl.sum(loss), sem="relaxed")


SPACE: Space = {
    "kwargs": {"BLOCK_SIZE": [512, 1024, 2048, 4096, 8192], "COL_SPLITS": [1, 4, 16], "STAGES": [1, 3]},
    "num_warps": [4, 8],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    tokens, vocab = tiny if small else shape
    x = normal((tokens, vocab), device, dtype=torch.float32, seed=1).sub_(math.log(vocab) + 0.5)
    y = normal((tokens, vocab), device, dtype=torch.float32, seed=2).sub_(math.log(vocab) + 0.5)
    loss = torch.zeros(tokens, dtype=torch.float32, device=device)
    dx = unset((tokens, vocab), device, dtype=torch.float32)
    return {
        "args": (x, x.stride(0), y, y.stride(0), loss, dx, dx.stride(0), 0.3, vocab),
        "kwargs": {},
        "grid": lambda meta: (tokens, meta["COL_SPLITS"]),
        "outputs": (loss, dx),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, _, y, _, _, _, _, beta, _ = data["args"]
    p, q = y.exp(), x.exp()
    log_m = (beta * p + (1 - beta) * q).log_()
    grad = (1 - beta) * q * (x - log_m)
    return (beta * p * (y - log_m) + grad).sum(-1), grad


CASES = [
    Case(
        name=f"rows_jsd/{tokens}x{vocab}",
        kernel=rows_jsd,
        key=("n_cols",),
        space=SPACE,
        make=partial(_make, (tokens, vocab), tiny),
        reference=_reference,
        tolerance=(1e-6, 1e-3),
        reset_to_zero=("loss_ptr",),
        flops=14.0 * tokens * vocab,
        bytes=12.0 * tokens * vocab + 4.0 * tokens,
    )
    for (tokens, vocab), tiny in [
        ((1024, 128256), (3, 1700)),
        ((32, 128256), (2, 600)),
        ((16, 32000), (2, 100)),
        ((2048, 32000), (2, 100)),
        ((512, 151936), (2, 100)),
        ((128, 50272), (2, 100)),
        ((8192, 4096), (2, 100)),
        ((16384, 1024), (2, 100)),
    ]
]
