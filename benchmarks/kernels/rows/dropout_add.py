"""Dropout from a seed and the element's index, added to a residual."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "random", "rows"


@triton.jit
def rows_dropout_add(
    X_ptr,
    X_row_stride,
    R_ptr,
    R_row_stride,
    Y_ptr,
    Y_row_stride,
    n_rows,
    n_cols,
    seed,
    p,
    BLOCK_SIZE: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS_PER_PROGRAM
    cols = tl.program_id(1) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = cols < n_cols
    scale = 1.0 / (1.0 - p)
    for r in range(ROWS_PER_PROGRAM):
        row_idx = first_row + r
        if row_idx < n_rows:
            wide = row_idx.to(tl.int64)
            keep = tl.rand(seed, row_idx * n_cols + cols) >= p
            x = tl.load(X_ptr + wide * X_row_stride + cols, mask=mask & keep, other=0.0).to(tl.float32)
            residual = tl.load(R_ptr + wide * R_row_stride + cols, mask=mask, other=0.0).to(tl.float32)
            tl.store(Y_ptr + wide * Y_row_stride + cols, x * scale + residual, mask=mask)


SPACE: Space = {
    "kwargs": {"BLOCK_SIZE": [128, 512, 1024, 2048, 4096], "ROWS_PER_PROGRAM": [1, 2, 8, 32]},
    "num_warps": [2, 4, 8],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    x, residual = normal((rows, cols), device, seed=1), normal((rows, cols), device, seed=2)
    y = unset((rows, cols), device)
    return {
        "args": (x, x.stride(0), residual, residual.stride(0), y, y.stride(0), rows, cols, 1234, 0.2),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(rows, meta["ROWS_PER_PROGRAM"]),
            triton.cdiv(cols, meta["BLOCK_SIZE"]),
        ),
        "outputs": (y,),
    }


def _uniform(count: int, seed: int, device: torch.device) -> torch.Tensor:
    """The first word of Philox 4x32 with ten rounds at the counters below `count`, as in `tl.rand`."""
    low = 0xFFFFFFFF
    c0 = torch.arange(count, device=device)
    c1 = c2 = c3 = torch.zeros(1, dtype=torch.int64, device=device)
    k0, k1 = seed, 0
    for _ in range(10):
        # Products of 32-bit words overflow 63 bits, but their upper half is right modulo 2**64.
        one, two = c2 * 0xCD9E8D57, c0 * 0xD2511F53
        c0, c2 = ((one >> 32) & low) ^ c1 ^ k0, ((two >> 32) & low) ^ c3 ^ k1
        c1, c3 = one & low, two & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return torch.where(c0 > 0x7FFFFFFF, low - c0, c0).float() * 4.6566127342e-10


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, _, residual, *_, seed, p = data["args"]
    keep = (_uniform(x.numel(), seed, x.device) >= p).view_as(x)
    return (x.float() * keep / (1 - p) + residual.float(),)


CASES = [
    Case(
        name=f"rows_dropout_add/{rows}x{cols}",
        kernel=rows_dropout_add,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        flops=3.0 * rows * cols,
        bytes=6.0 * rows * cols,
    )
    for (rows, cols), tiny in [
        ((16384, 4096), (9, 300)),
        ((8192, 1024), (2, 100)),
        ((12608, 768), (2, 100)),
        ((512, 4096), (2, 100)),
        ((64, 5120), (2, 100)),
        ((131072, 256), (2, 100)),
        ((2048, 12288), (2, 100)),
        ((32, 1024), (2, 100)),
    ]
]
