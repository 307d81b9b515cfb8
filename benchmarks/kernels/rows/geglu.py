"""GEGLU, forward, with the tanh approximation; gate and up side by side in one row."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "activation", "rows"


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def rows_geglu(
    AB_ptr,
    AB_stride,
    C_ptr,
    C_stride,
    n_rows,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
    CAST_EARLY: tl.constexpr,
):
    first_row = tl.program_id(0).to(tl.int64) * ROWS_PER_PROGRAM
    last_row = tl.minimum(first_row + ROWS_PER_PROGRAM, n_rows)
    for row_idx in range(first_row, last_row):
        A_row = AB_ptr + row_idx * AB_stride
        C_row = C_ptr + row_idx * C_stride
        for i in range(0, n_cols, BLOCK_SIZE):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            mask = offsets < n_cols
            a = tl.load(A_row + offsets, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(A_row + n_cols + offsets, mask=mask, other=0.0)
            inner = 0.7978845608028654 * (a + 0.044715 * a * a * a)
            gate = 0.5 * a * (1.0 + _tanh(inner))
            c = gate.to(b.dtype) * b if CAST_EARLY else gate * b.to(tl.float32)
            tl.store(C_row + offsets, c, mask=mask)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE": [256, 1024, 2048, 4096, 16384],
        "ROWS_PER_PROGRAM": [1, 4, 16],
        "CAST_EARLY": [True, False],
    },
    "num_warps": [4, 8],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    ab = normal((rows, 2 * cols), device, seed=1)
    c = unset((rows, cols), device)
    return {
        "args": (ab, ab.stride(0), c, c.stride(0), rows, cols),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(rows, meta["ROWS_PER_PROGRAM"]),),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][0].chunk(2, dim=-1)
    return (torch.nn.functional.gelu(a.float(), approximate="tanh") * b.float(),)


CASES = [
    Case(
        name=f"rows_geglu/{rows}x{cols}",
        kernel=rows_geglu,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(1e-2, 2e-2),
        flops=12.0 * rows * cols,
        bytes=6.0 * rows * cols,
    )
    for (rows, cols), tiny in [
        ((8192, 14336), (5, 700)),
        ((2048, 16384), (2, 100)),
        ((16384, 5120), (2, 100)),
        ((65536, 1280), (2, 100)),
        ((16, 14336), (2, 100)),
        ((256, 9216), (2, 100)),
        ((4096, 2560), (2, 100)),
        ((131072, 320), (2, 100)),
        ((64, 24576), (2, 100)),
    ]
]
