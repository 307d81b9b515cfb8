"""Sparse matrix (CSR, uneven rows) times a vector: several rows per program, lanes along each row."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset

FAMILY, HAND = "gemv", "vision"


@triton.jit
def vis_csr_spmv(start_ptr, col_ptr, val_ptr, x_ptr, y_ptr, rows, ROWS: tl.constexpr, LANES: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = tl.load(start_ptr + row, mask=row < rows, other=0)
    end = tl.load(start_ptr + row + 1, mask=row < rows, other=0)
    lane = tl.arange(0, LANES)
    longest = tl.max(end - start, axis=0)
    acc = tl.zeros((ROWS, LANES), dtype=tl.float32)
    for step in range(0, longest, LANES):
        i = start[:, None] + (step + lane)[None, :]
        live = i < end[:, None]
        col = tl.load(col_ptr + i, mask=live, other=0)
        val = tl.load(val_ptr + i, mask=live, other=0.0)
        acc += val * tl.load(x_ptr + col, mask=live, other=0.0)
    tl.store(y_ptr + row, tl.sum(acc, axis=1), mask=row < rows)


SPACE: Space = {
    "kwargs": {"ROWS": [1, 4, 16, 64], "LANES": [4, 16, 32, 128]},
    "num_warps": [1, 2, 4],
    "num_stages": [2],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, each = tiny if small else shape
    nonzero = rows * each
    # Cuts at random places: lengths are about exponential.
    start = integers(0, nonzero, (rows + 1,), device, dtype=torch.int32, seed=1)
    start[:1], start[1:2] = 0, nonzero
    start = start.sort().values
    col = integers(0, rows, (nonzero,), device, dtype=torch.int32, seed=2)
    val = normal((nonzero,), device, dtype=torch.float32, seed=3, scale=each**-0.5)
    x = normal((rows,), device, dtype=torch.float32, seed=4)
    y = unset((rows,), device, dtype=torch.float32)
    return {
        "args": (start, col, val, x, y, rows),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(rows, meta["ROWS"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    start, col, val, x, y = data["args"][:5]
    owner = torch.repeat_interleave(start.diff().long())
    product = val.double() * x.double()[col.long()]
    return (torch.zeros_like(y, dtype=torch.float64).index_add_(0, owner, product),)


CASES = [
    Case(
        name=f"vis_csr_spmv/{rows}x{each}",
        kernel=vis_csr_spmv,
        key=("rows",),
        space=SPACE,
        make=partial(_make, (rows, each), (37, 6)),
        reference=_reference,
        tolerance=(1e-4, 1e-4),
        flops=2.0 * rows * each,
        bytes=8.0 * rows * each + 4.0 * (rows + 1) + 8.0 * rows,
    )
    for rows, each in [
        (16384, 16),
        (65536, 32),
        (262144, 8),
        (1 << 20, 6),
        (1 << 20, 64),
        (4096, 1024),
        (32768, 256),
        (131072, 128),
        (2048, 64),
        (2048, 2048),
    ]
]
