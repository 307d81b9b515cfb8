"""Matmul of fp32 matrices in TF32, in halves of the output tile if asked."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import grouped_tile, halves, load_block, store_block

FAMILY, HAND = "gemm", "blockptr"


@triton.jit
def bp_tf32_matmul(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
):
    tl.assume(stride_am > 0)
    tl.assume(stride_bk > 0)
    pid_m, pid_n = grouped_tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    off_m = tl.multiple_of(pid_m * BLOCK_M, BLOCK_M)
    off_n = tl.multiple_of(pid_n * BLOCK_N, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for off_k in tl.range(0, K, BLOCK_K):
        a = load_block(a_ptr, M, K, stride_am, stride_ak, off_m, off_k, BLOCK_M, BLOCK_K)
        b = load_block(b_ptr, K, N, stride_bk, stride_bn, off_k, off_n, BLOCK_K, BLOCK_N)
        acc = tl.dot(a, b, acc, input_precision="tf32")
    if EPILOGUE_SUBTILE:
        left, right = halves(acc, BLOCK_M, BLOCK_N)
        HALF: tl.constexpr = BLOCK_N // 2
        store_block(c_ptr, left, M, N, stride_cm, stride_cn, off_m, off_n, BLOCK_M, HALF)
        store_block(c_ptr, right, M, N, stride_cm, stride_cn, off_m, off_n + HALF, BLOCK_M, HALF)
    else:
        store_block(c_ptr, acc, M, N, stride_cm, stride_cn, off_m, off_n, BLOCK_M, BLOCK_N)


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [32, 64, 128],
        "BLOCK_N": [32, 64, 128],
        "BLOCK_K": [16, 32, 64],
        "GROUP_M": [8],
        "EPILOGUE_SUBTILE": [False, True],
    },
    "num_warps": [4, 8],
    "num_stages": [3, 4],
    "where": lambda p: (
        (p["num_warps"] == 4 or p["BLOCK_M"] * p["BLOCK_N"] >= 16384)
        and p["EPILOGUE_SUBTILE"] == (p["BLOCK_N"] == 128)
        and (p["num_stages"] == 4 or p["BLOCK_K"] > 16)
    ),
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    a = normal((m, k), device, dtype=torch.float32, seed=1)
    b = normal((k, n), device, dtype=torch.float32, seed=2, scale=k**-0.5)
    c = unset((m, n), device, dtype=torch.float32)
    return {
        "args": (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride()),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"]),),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][:2]
    return (a.double() @ b.double(),)


CASES = [
    Case(
        name=f"bp_tf32_matmul/{m}x{n}x{k}",
        kernel=bp_tf32_matmul,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (90, 100, 50)),
        reference=_reference,
        # TF32 keeps ten bits of each factor.
        tolerance=(1e-2, 5e-3),
        flops=2.0 * m * n * k,
        bytes=4.0 * (m * k + k * n + m * n),
    )
    for m, n, k in [
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (512, 512, 512),
        (65536, 256, 256),
        (128, 8192, 1024),
        (1024, 64, 16384),
        (10240, 1024, 512),
        (1552, 3088, 784),
    ]
]
