"""Persistent fp8 matmul: e4m3 operands, both contiguous along K, scaled per row and per column."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import SMS, grouped_tile, load_block, load_line, store_block

FAMILY, HAND = "gemm", "blockptr"


@triton.jit
def bp_fp8_matmul(
    a_ptr,
    b_ptr,
    row_scale_ptr,
    col_scale_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bn,
    stride_bk,
    stride_cm,
    stride_cn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tl.assume(stride_am > 0)
    tl.assume(stride_bn > 0)
    tl.assume(M > 0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile_id in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        pid_m, pid_n = grouped_tile(tile_id, tiles_m, tiles_n, GROUP_M)
        off_m = pid_m * BLOCK_M
        off_n = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for off_k in tl.range(0, K, BLOCK_K):
            a = load_block(a_ptr, M, K, stride_am, stride_ak, off_m, off_k, BLOCK_M, BLOCK_K)
            # A [K, N] view of weights stored [N, K]: only the strides change places.
            b = load_block(b_ptr, K, N, stride_bk, stride_bn, off_k, off_n, BLOCK_K, BLOCK_N)
            acc = tl.dot(a, b, acc)
        acc *= load_line(row_scale_ptr, M, off_m, BLOCK_M)[:, None]
        acc *= load_line(col_scale_ptr, N, off_n, BLOCK_N)[None, :]
        store_block(c_ptr, acc, M, N, stride_cm, stride_cn, off_m, off_n, BLOCK_M, BLOCK_N)


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [64, 128],
        "BLOCK_N": [64, 128, 256],
        "BLOCK_K": [64, 128, 256],
        "GROUP_M": [1, 8],
        "PROGRAMS": [SMS, 2 * SMS],
    },
    "num_warps": [4, 8],
    "num_stages": [3, 4],
    "where": lambda p: (
        (p["num_warps"] == 8) == (p["BLOCK_M"] * p["BLOCK_N"] >= 16384)
        and (p["num_stages"] == 4) == (p["BLOCK_K"] < 256)
    ),
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    a = normal((m, k), device, dtype=torch.float8_e4m3fn, seed=1)
    b = normal((n, k), device, dtype=torch.float8_e4m3fn, seed=2)
    row_scale = (normal((m,), device, dtype=torch.float32, seed=3).abs() + 0.1) * k**-0.5
    col_scale = normal((n,), device, dtype=torch.float32, seed=4).abs() + 0.1
    c = unset((m, n), device, dtype=torch.bfloat16)
    return {
        "args": (a, b, row_scale, col_scale, c, m, n, k, *a.stride(), *b.stride(), *c.stride()),
        "kwargs": {},
        "grid": lambda meta: (
            min(meta["PROGRAMS"], triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"])),
        ),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b, row_scale, col_scale = data["args"][:4]
    return ((a.float() @ b.float().T) * row_scale[:, None] * col_scale,)


CASES = [
    Case(
        name=f"bp_fp8_matmul/{m}x{n}x{k}",
        kernel=bp_fp8_matmul,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (90, 150, 144)),
        reference=_reference,
        # The tensor cores of this format add with about 14 bits.
        tolerance=(4e-2, 3e-2),
        flops=2.0 * m * n * k,
        bytes=1.0 * (m * k + n * k) + 4.0 * (m + n) + 2.0 * m * n,
    )
    for m, n, k in [
        (8192, 8192, 8192),
        (4096, 4096, 4096),
        (2048, 18944, 3584),
        (64, 14336, 4096),
        (256, 8192, 8192),
        (1024, 2048, 512),
        (32768, 1024, 1024),
        (512, 4096, 16384),
    ]
]
