"""Inclusive prefix sum along rows: a scan per chunk, and a carry from chunk to chunk."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "scan", "vision"


@triton.jit
def row_cumsum(x_ptr, y_ptr, rows, cols, stride, ROW_BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    carry = tl.zeros([ROW_BLOCK], dtype=tl.float32)
    for chunk in range(tl.cdiv(cols, CHUNK)):
        col = chunk * CHUNK + tl.arange(0, CHUNK)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        offset = row[:, None] * stride + col[None, :]
        x = tl.load(x_ptr + offset, mask=mask, other=0.0)
        y = tl.cumsum(x, axis=1) + carry[:, None]
        tl.store(y_ptr + offset, y, mask=mask)
        # The last column, read as a reduction; `carry += tl.sum(x)` aborts the compiler of Triton 3.6.
        last = col == (chunk + 1) * CHUNK - 1
        carry = tl.sum(tl.where(last[None, :], y, 0.0), axis=1)


SPACE: Space = {
    "kwargs": {"ROW_BLOCK": [1, 2, 4, 8], "CHUNK": [64, 256, 1024, 2048, 4096]},
    "num_warps": [1, 4, 8, 16],
    "num_stages": [2],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    x = normal((rows, cols), device, dtype=torch.float32, seed=1)
    y = unset((rows, cols), device, dtype=torch.float32)
    return {
        "args": (x, y, rows, cols, x.stride(0)),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(rows, meta["ROW_BLOCK"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (data["args"][0].double().cumsum(-1),)


CASES = [
    Case(
        name=f"cumsum/{rows}x{cols}",
        kernel=row_cumsum,
        key=("rows", "cols"),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(1e-2, 1e-4),
        flops=1.0 * rows * cols,
        bytes=4.0 * 2 * rows * cols,
    )
    for (rows, cols), tiny in [((8192, 8192), (3, 300)), ((512, 65536), (2, 256)), ((16384, 1000), (5, 70))]
]
