"""Batched transpose of strips of blocks, the block turned in registers or read through swapped strides."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import load_block, store_block

if TYPE_CHECKING:
    import torch

FAMILY, HAND = "transpose", "blockptr"


@triton.jit
def bp_transpose(
    x_ptr,
    y_ptr,
    M,
    N,
    stride_xb,
    stride_xm,
    stride_xn,
    stride_yb,
    stride_yn,
    stride_ym,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STRIP: tl.constexpr,
    SWAP_STRIDES: tl.constexpr,
):
    tl.assume(stride_xm > 0)
    tl.assume(stride_yn > 0)
    batch = tl.program_id(2).to(tl.int64)
    x_base = x_ptr + batch * stride_xb
    y_base = y_ptr + batch * stride_yb
    off_m = tl.program_id(0) * BLOCK_M
    first = tl.program_id(1) * (STRIP * BLOCK_N)
    for step in tl.range(0, STRIP):
        off_n = tl.multiple_of(first + step * BLOCK_N, BLOCK_N)
        if SWAP_STRIDES:
            turned = load_block(x_base, N, M, stride_xn, stride_xm, off_n, off_m, BLOCK_N, BLOCK_M)
        else:
            turned = tl.trans(load_block(x_base, M, N, stride_xm, stride_xn, off_m, off_n, BLOCK_M, BLOCK_N))
        store_block(y_base, turned, N, M, stride_yn, stride_ym, off_n, off_m, BLOCK_N, BLOCK_M)


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [32, 64, 128],
        "BLOCK_N": [16, 64, 128],
        "STRIP": [1, 4],
        "SWAP_STRIDES": [False, True],
    },
    "num_warps": [4, 8],
    "num_stages": [2],
    "where": lambda p: p["num_warps"] == 8 or p["BLOCK_M"] * p["BLOCK_N"] <= 8192,
}


def _make(shape: tuple[int, int, int], device: str, small: bool = False) -> Data:
    batch, m, n = (2, 70, 90) if small else shape
    x = normal((batch, m, n), device, seed=1)
    y = unset((batch, n, m), device)
    return {
        "args": (x, y, m, n, *x.stride(), *y.stride()),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(m, meta["BLOCK_M"]),
            triton.cdiv(n, meta["STRIP"] * meta["BLOCK_N"]),
            batch,
        ),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (data["args"][0].mT.float(),)


CASES = [
    Case(
        name=f"bp_transpose/{batch}x{m}x{n}",
        kernel=bp_transpose,
        key=("M", "N"),
        space=SPACE,
        make=partial(_make, (batch, m, n)),
        reference=_reference,
        tolerance=(0.0, 0.0),
        bytes=4.0 * batch * m * n,
    )
    for batch, m, n in [
        (1, 8192, 8192),
        (1, 4096, 11008),
        (32, 4096, 320),
        (64, 64, 3136),
        (256, 512, 512),
        (1, 1024, 1024),
        (16, 128, 16384),
        (2, 65536, 80),
        (1, 131072, 512),
    ]
]
