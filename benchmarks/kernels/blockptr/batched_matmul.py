"""Batched bf16 matmul, one grid axis for the batch, blocks addressed through all strides."""

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
def bp_batched_matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_ab,
    stride_am,
    stride_ak,
    stride_bb,
    stride_bk,
    stride_bn,
    stride_cb,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PIPE: tl.constexpr,
):
    batch = tl.program_id(1).to(tl.int64)
    tiles_n = tl.cdiv(N, BLOCK_N)
    off_m = (tl.program_id(0) // tiles_n) * BLOCK_M
    off_n = (tl.program_id(0) % tiles_n) * BLOCK_N
    a_base = a_ptr + batch * stride_ab
    b_base = b_ptr + batch * stride_bb
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for off_k in tl.range(0, K, BLOCK_K, num_stages=PIPE):
        a = load_block(a_base, M, K, stride_am, stride_ak, off_m, off_k, BLOCK_M, BLOCK_K)
        b = load_block(b_base, K, N, stride_bk, stride_bn, off_k, off_n, BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc)
    c_base = c_ptr + batch * stride_cb
    store_block(c_base, acc, M, N, stride_cm, stride_cn, off_m, off_n, BLOCK_M, BLOCK_N)


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [32, 64, 128],
        "BLOCK_N": [32, 64, 128],
        "BLOCK_K": [32, 64, 128],
        "PIPE": [1, 3],
    },
    "num_warps": [4, 8],
    "num_stages": [2],
    "where": lambda p: p["num_warps"] == 4 or p["BLOCK_M"] * p["BLOCK_N"] >= 8192,
}


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    batch, m, n, k = tiny if small else shape
    # The interpreter multiplies bf16 blocks as if they were integers.
    dtype = torch.float16 if small else torch.bfloat16
    a = normal((batch, m, k), device, dtype=dtype, seed=1)
    b = normal((batch, k, n), device, dtype=dtype, seed=2, scale=k**-0.5)
    c = unset((batch, m, n), device, dtype=dtype)
    return {
        "args": (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride()),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]), batch),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][:2]
    return (a.float() @ b.float(),)


CASES = [
    Case(
        name=f"bp_batched_matmul/{batch}x{m}x{n}x{k}",
        kernel=bp_batched_matmul,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (batch, m, n, k), (2, 70, 40, 90)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        flops=2.0 * batch * m * n * k,
        bytes=2.0 * batch * (m * k + k * n + m * n),
    )
    for batch, m, n, k in [
        (96, 512, 512, 64),
        (32, 1024, 1024, 128),
        (16, 4096, 64, 4096),
        (256, 256, 64, 256),
        (1024, 64, 64, 64),
        (8, 2048, 2048, 2048),
        (128, 16, 512, 128),
        (64, 16, 128, 4096),
        (12, 784, 784, 96),
    ]
]
