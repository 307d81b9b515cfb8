"""Batched Gram matrices X X^T: tiles of the lower triangle only, mirrored when stored."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import load_block, store_block

FAMILY, HAND = "gemm", "blockptr"


@triton.jit
def bp_gram(
    x_ptr,
    y_ptr,
    M,
    K,
    alpha,
    stride_xb,
    stride_xm,
    stride_xk,
    stride_yb,
    stride_ym,
    stride_yn,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MIRROR_FIRST: tl.constexpr,
    PIPE: tl.constexpr,
):
    tl.assume(stride_xm > 0)
    tl.assume(stride_ym > 0)
    # Tile t of the triangle lies in row i with i * (i + 1) / 2 <= t.
    t = tl.program_id(0)
    i = ((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    off_i = i * BLOCK
    off_j = (t - i * (i + 1) // 2) * BLOCK
    batch = tl.program_id(1).to(tl.int64)
    x_base = x_ptr + batch * stride_xb
    y_base = y_ptr + batch * stride_yb
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for off_k in tl.range(0, K, BLOCK_K, num_stages=PIPE):
        left = load_block(x_base, M, K, stride_xm, stride_xk, off_i, off_k, BLOCK, BLOCK_K)
        right = load_block(x_base, K, M, stride_xk, stride_xm, off_k, off_j, BLOCK_K, BLOCK)
        acc = tl.dot(left, right, acc)
    acc *= alpha
    if MIRROR_FIRST:
        # Through the same registers, but the store is not contiguous along a warp.
        store_block(y_base, acc, M, M, stride_yn, stride_ym, off_i, off_j, BLOCK, BLOCK)
    elif off_i != off_j:
        store_block(y_base, tl.trans(acc), M, M, stride_ym, stride_yn, off_j, off_i, BLOCK, BLOCK)
    store_block(y_base, acc, M, M, stride_ym, stride_yn, off_i, off_j, BLOCK, BLOCK)


SPACE: Space = {
    "kwargs": {
        "BLOCK": [32, 64, 128],
        "BLOCK_K": [32, 64, 128],
        "MIRROR_FIRST": [False, True],
        "PIPE": [2, 4],
    },
    "num_warps": [4, 8],
    "num_stages": [3],
    "where": lambda p: p["num_warps"] == 4 or p["BLOCK"] > 32,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    batch, m, k = tiny if small else shape
    # The interpreter multiplies bf16 blocks as if they were integers.
    dtype = torch.float16 if small else torch.bfloat16
    x = normal((batch, m, k), device, dtype=dtype, seed=1)
    y = unset((batch, m, m), device, dtype=torch.float32)
    return {
        "args": (x, y, m, k, k**-0.5, *x.stride(), *y.stride()),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(m, meta["BLOCK"]) * (triton.cdiv(m, meta["BLOCK"]) + 1) // 2,
            batch,
        ),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, alpha = data["args"][0].float(), data["args"][4]
    return ((x @ x.mT) * alpha,)


CASES = [
    Case(
        name=f"bp_gram/{batch}x{m}x{k}",
        kernel=bp_gram,
        key=("M", "K"),
        space=SPACE,
        make=partial(_make, (batch, m, k), (2, 80, 70)),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        # The matrix is symmetric: half of the products, and one more for alpha.
        flops=1.0 * batch * m * (m + 1) * k + 1.0 * batch * m * m,
        bytes=2.0 * batch * m * k + 4.0 * batch * m * m,
    )
    for batch, m, k in [
        (8, 2048, 2048),
        (1, 4096, 4096),
        (64, 512, 512),
        (256, 128, 1024),
        (1, 1024, 16384),
        (512, 64, 256),
        (16, 1024, 64),
        (24, 784, 192),
    ]
]
