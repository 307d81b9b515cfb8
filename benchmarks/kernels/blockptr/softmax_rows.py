"""Row softmax with a temperature, persistent over bands of rows, columns in pipelined blocks."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import SMS, load_block, store_block

FAMILY, HAND = "softmax", "blockptr"


@triton.jit
def bp_softmax_rows(
    x_ptr,
    y_ptr,
    n_rows,
    n_cols,
    inverse_temperature,
    stride_xm,
    stride_xn,
    stride_ym,
    stride_yn,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PIPE: tl.constexpr,
):
    tl.assume(stride_xm > 0)
    tl.assume(stride_ym > 0)
    scale = inverse_temperature * 1.4426950408889634
    for band in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), PROGRAMS):
        off_m = band * ROWS
        top = tl.full((ROWS, COLS), -1.0e30, dtype=tl.float32)
        total = tl.zeros((ROWS, COLS), dtype=tl.float32)
        # Each lane keeps its own maximum and sum; they are joined once, after the row.
        for off_n in tl.range(0, n_cols, COLS, num_stages=PIPE):
            x = load_block(x_ptr, n_rows, n_cols, stride_xm, stride_xn, off_m, off_n, ROWS, COLS)
            inside = (off_n + tl.arange(0, COLS))[None, :] < n_cols
            x = tl.where(inside, x.to(tl.float32) * scale, -1.0e30)
            new_top = tl.maximum(top, x)
            total = total * tl.exp2(top - new_top) + tl.where(inside, tl.exp2(x - new_top), 0.0)
            top = new_top
        row_top = tl.max(top, 1)[:, None]
        row_total = tl.sum(total * tl.exp2(top - row_top), 1)[:, None]
        for off_n in tl.range(0, n_cols, COLS, num_stages=PIPE):
            x = load_block(x_ptr, n_rows, n_cols, stride_xm, stride_xn, off_m, off_n, ROWS, COLS)
            y = tl.exp2(x.to(tl.float32) * scale - row_top) / row_total
            store_block(y_ptr, y, n_rows, n_cols, stride_ym, stride_yn, off_m, off_n, ROWS, COLS)


SPACE: Space = {
    "kwargs": {
        "ROWS": [1, 4, 16],
        "COLS": [128, 512, 2048],
        "PROGRAMS": [SMS, 4 * SMS, 16 * SMS],
        "PIPE": [1, 3],
    },
    "num_warps": [4, 8],
    "num_stages": [2],
    "where": lambda p: (
        p["ROWS"] * p["COLS"] <= 8192
        and (p["num_warps"] == 4 or p["ROWS"] * p["COLS"] >= 2048)
        and (p["PIPE"] == 3 or p["PROGRAMS"] > SMS)
    ),
}


def _make(shape: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = (9, 300) if small else shape
    x = normal((rows, cols), device, dtype=torch.bfloat16, seed=1, scale=2.0)
    y = unset((rows, cols), device, dtype=torch.bfloat16)
    return {
        "args": (x, y, rows, cols, 0.7, *x.stride(), *y.stride()),
        "kwargs": {},
        "grid": lambda meta: (min(meta["PROGRAMS"], triton.cdiv(rows, meta["ROWS"])),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, scale = data["args"][0], data["args"][4]
    return ((x.float() * scale).softmax(-1),)


CASES = [
    Case(
        name=f"bp_softmax_rows/{rows}x{cols}",
        kernel=bp_softmax_rows,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols)),
        reference=_reference,
        tolerance=(1e-3, 1e-2),
        # Scale, compare, subtract, exponentiate, add, divide.
        flops=6.0 * rows * cols,
        bytes=4.0 * rows * cols,
    )
    for rows, cols in [
        (8192, 8192),
        (65536, 1024),
        (131072, 256),
        (1024, 32768),
        (64, 131072),
        (512, 2048),
        (16384, 4096),
        (4096, 400),
        (400000, 80),
    ]
]
