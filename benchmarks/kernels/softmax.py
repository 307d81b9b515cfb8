"""Row softmax over rows of any length: one online pass for maximum and sum, one to write."""

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

FAMILY, HAND = "softmax", "tutorial"


@triton.jit
def online_softmax(
    output_ptr,
    input_ptr,
    input_row_stride,
    output_row_stride,
    n_rows,
    n_cols,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows past the end repeat the last one: no row is ever empty, so no maximum is ever -inf.
    read = tl.minimum(rows, n_rows - 1)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(
            input_ptr + read[:, None] * input_row_stride + cols[None, :],
            mask=cols[None, :] < n_cols,
            other=float("-inf"),
        ).to(tl.float32)
        new_max = tl.maximum(row_max, tl.max(x, axis=1))
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(x - new_max[:, None]), axis=1)
        row_max = new_max
    for start in range(0, n_cols, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        x = tl.load(
            input_ptr + read[:, None] * input_row_stride + cols[None, :],
            mask=cols[None, :] < n_cols,
            other=float("-inf"),
        ).to(tl.float32)
        y = tl.exp(x - row_max[:, None]) / row_sum[:, None]
        tl.store(
            output_ptr + rows[:, None] * output_row_stride + cols[None, :],
            y.to(output_ptr.dtype.element_ty),
            mask=(rows[:, None] < n_rows) & (cols[None, :] < n_cols),
        )


SPACE: Space = {
    "kwargs": {"ROWS": [1, 2, 4, 8], "BLOCK_N": [128, 512, 1024, 2048, 4096]},
    "num_warps": [2, 4, 8, 16],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    x = normal((rows, cols), device, seed=1, scale=3.0)
    y = unset((rows, cols), device)
    return {
        "args": (y, x, x.stride(0), y.stride(0), rows, cols),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(rows, meta["ROWS"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (data["args"][1].float().softmax(-1),)


CASES = [
    Case(
        name=f"softmax/{rows}x{cols}",
        kernel=online_softmax,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(1e-5, 5e-3),
        # Subtract, exponentiate and add in the first pass; subtract, exponentiate, divide in the second.
        flops=6.0 * rows * cols,
        bytes=2.0 * 2 * rows * cols,
    )
    for (rows, cols), tiny in [((8192, 32768), (3, 700)), ((16384, 4096), (9, 128)), ((4096, 1000), (2, 50))]
]
