"""Layer norm and its statistics, persistent over rows, the weights loaded once per program."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import SMS, load_block, load_line, store_block

FAMILY, HAND = "norm", "blockptr"


@triton.jit
def bp_layer_norm_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    n_rows,
    n_cols,
    eps,
    stride_xm,
    stride_xn,
    stride_ym,
    stride_yn,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PIPE: tl.constexpr,
    KEEP_WEIGHTS: tl.constexpr,
):
    tl.assume(stride_xm > 0)
    tl.assume(stride_ym > 0)
    inside = (tl.arange(0, BLOCK_N) < n_cols)[None, :]
    if KEEP_WEIGHTS:
        weight = load_line(weight_ptr, n_cols, 0, BLOCK_N).to(tl.float32)[None, :]
        bias = load_line(bias_ptr, n_cols, 0, BLOCK_N).to(tl.float32)[None, :]
    for band in tl.range(tl.program_id(0), tl.cdiv(n_rows, ROWS), PROGRAMS, num_stages=PIPE):
        off_m = band * ROWS
        x = load_block(x_ptr, n_rows, n_cols, stride_xm, stride_xn, off_m, 0, ROWS, BLOCK_N).to(tl.float32)
        mean = tl.sum(x, 1) / n_cols
        centred = tl.where(inside, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 1) / n_cols + eps)
        if not KEEP_WEIGHTS:
            weight = load_line(weight_ptr, n_cols, 0, BLOCK_N).to(tl.float32)[None, :]
            bias = load_line(bias_ptr, n_cols, 0, BLOCK_N).to(tl.float32)[None, :]
        y = centred * rstd[:, None] * weight + bias
        store_block(y_ptr, y, n_rows, n_cols, stride_ym, stride_yn, off_m, 0, ROWS, BLOCK_N)
        rows = off_m + tl.arange(0, ROWS)
        tl.store(mean_ptr + rows, mean, mask=rows < n_rows)
        tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)


SPACE: Space = {
    "kwargs": {
        "ROWS": [1, 2, 4],
        "PROGRAMS": [SMS, 4 * SMS, 16 * SMS],
        "PIPE": [1, 3],
        "KEEP_WEIGHTS": [False, True],
    },
    "num_warps": [2, 4, 8, 16],
    "num_stages": [1],
    "where": lambda p: p["KEEP_WEIGHTS"] == (p["PROGRAMS"] < 16 * SMS),
}


def _make(shape: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = (11, 200) if small else shape
    x = normal((rows, cols), device, seed=1, scale=2.0)
    weight, bias = normal((cols,), device, seed=2), normal((cols,), device, seed=3)
    y = unset((rows, cols), device)
    mean, rstd = (unset((rows,), device, dtype=torch.float32) for _ in range(2))
    return {
        "args": (x, weight, bias, y, mean, rstd, rows, cols, 1e-5, *x.stride(), *y.stride()),
        "kwargs": {"BLOCK_N": triton.next_power_of_2(cols)},
        "grid": lambda meta: (min(meta["PROGRAMS"], triton.cdiv(rows, meta["ROWS"])),),
        "outputs": (y, mean, rstd),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, weight, bias = (t.float() for t in data["args"][:3])
    mean = x.mean(-1)
    rstd = (x.var(-1, unbiased=False) + data["args"][8]).rsqrt()
    return (x - mean[:, None]) * rstd[:, None] * weight + bias, mean, rstd


CASES = [
    Case(
        name=f"bp_layer_norm_rows/{rows}x{cols}",
        kernel=bp_layer_norm_rows,
        key=("n_rows", "n_cols"),
        space=SPACE,
        make=partial(_make, (rows, cols)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        # Add; subtract, square and add; scale, weight, bias.
        flops=7.0 * rows * cols,
        bytes=2.0 * (2 * rows * cols + 2 * cols) + 8.0 * rows,
    )
    for rows, cols in [
        (16384, 4096),
        (65536, 4096),
        (4096, 3072),
        (64, 4096),
        (50432, 768),
        (131072, 1024),
        (2048, 1024),
        (512, 640),
    ]
]
