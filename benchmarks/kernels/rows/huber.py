"""Huber loss: one total by an atomic per program, and the gradient of the prediction."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "loss", "rows"


@triton.jit
def rows_huber(
    X_ptr,
    T_ptr,
    total_ptr,
    dX_ptr,
    numel,
    delta,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
    STRIDED: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    if STRIDED:
        start = pid * BLOCK_SIZE
        step = tl.num_programs(0).to(tl.int64) * BLOCK_SIZE
    else:
        start = pid * BLOCK_SIZE * BLOCKS_PER_PROGRAM
        step = tl.full((), BLOCK_SIZE, dtype=tl.int64)
    loss = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
    for block in range(BLOCKS_PER_PROGRAM):
        offsets = start + block * step + tl.arange(0, BLOCK_SIZE)
        mask = offsets < numel
        x = tl.load(X_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        t = tl.load(T_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        diff = x - t
        far = tl.abs(diff)
        loss += tl.where(far < delta, 0.5 * diff * diff, delta * (far - 0.5 * delta))
        tl.store(dX_ptr + offsets, tl.minimum(tl.maximum(diff, -delta), delta), mask=mask)
    tl.atomic_add(total_ptr, tl.sum(loss), sem="relaxed")


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE": [256, 1024, 4096, 16384],
        "BLOCKS_PER_PROGRAM": [1, 4, 32],
        "STRIDED": [False, True],
    },
    "num_warps": [2, 4, 16],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_SIZE"] <= 4096 * c["num_warps"],
}


def _make(shape: int, tiny: int, device: str, small: bool = False) -> Data:
    count = tiny if small else shape
    x, t = normal((count,), device, seed=1), normal((count,), device, seed=2)
    total = torch.zeros(1, dtype=torch.float32, device=device)
    dx = unset((count,), device)
    return {
        "args": (x, t, total, dx, count, 0.75),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(count, meta["BLOCK_SIZE"] * meta["BLOCKS_PER_PROGRAM"]),),
        "outputs": (total, dx),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, t, _, _, _, delta = data["args"]
    diff = x.float() - t.float()
    far = diff.abs()
    loss = torch.where(far < delta, 0.5 * diff.square(), delta * (far - 0.5 * delta))
    return loss.sum(dtype=torch.float64).float()[None], diff.clamp(-delta, delta)


CASES = [
    Case(
        name=f"rows_huber/{count}",
        kernel=rows_huber,
        key=("numel",),
        space=SPACE,
        make=partial(_make, count, tiny),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        reset_to_zero=("total_ptr",),
        flops=6.0 * count,
        bytes=6.0 * count + 4.0,
    )
    for count, tiny in [
        (8192 * 4096, 5003),
        (16384 * 8192, 300),
        (1024 * 1024, 300),
        (65536, 300),
        (4 * 320 * 64 * 64, 300),
        (256 * 1024, 300),
        (4096 * 4096, 300),
        (16 * 3 * 224 * 224, 300),
    ]
]
