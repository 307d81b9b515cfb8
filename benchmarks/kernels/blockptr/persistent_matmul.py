"""Persistent fp16 matmul: programs walk over output tiles, the epilogue optionally in halves."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import SMS, grouped_tile, halves, load_block, store_block

if TYPE_CHECKING:
    import torch

FAMILY, HAND = "gemm", "blockptr"


@triton.jit
def bp_persistent_matmul(
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
    FLATTEN: tl.constexpr,
    EPILOGUE_SUBTILE: tl.constexpr,
    GROUP_M: tl.constexpr,
    NUM_SMS: tl.constexpr,
):
    tl.assume(stride_am > 0)
    tl.assume(stride_bk > 0)
    tl.assume(stride_cm > 0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_tiles = tl.cdiv(K, BLOCK_K)
    for tile_id in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_SMS, flatten=FLATTEN):
        pid_m, pid_n = grouped_tile(tile_id, tiles_m, tiles_n, GROUP_M)
        off_m = tl.multiple_of(pid_m * BLOCK_M, BLOCK_M)
        off_n = tl.multiple_of(pid_n * BLOCK_N, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for ki in range(k_tiles):
            off_k = ki * BLOCK_K
            a = load_block(a_ptr, M, K, stride_am, stride_ak, off_m, off_k, BLOCK_M, BLOCK_K)
            b = load_block(b_ptr, K, N, stride_bk, stride_bn, off_k, off_n, BLOCK_K, BLOCK_N)
            acc = tl.dot(a, b, acc)
        if EPILOGUE_SUBTILE:
            left, right = halves(acc, BLOCK_M, BLOCK_N)
            HALF: tl.constexpr = BLOCK_N // 2
            store_block(c_ptr, left, M, N, stride_cm, stride_cn, off_m, off_n, BLOCK_M, HALF)
            store_block(c_ptr, right, M, N, stride_cm, stride_cn, off_m, off_n + HALF, BLOCK_M, HALF)
        else:
            store_block(c_ptr, acc, M, N, stride_cm, stride_cn, off_m, off_n, BLOCK_M, BLOCK_N)


def _sensible(p: dict[str, int]) -> bool:
    tile = p["BLOCK_M"] * p["BLOCK_N"]
    # Small tiles keep one warp group, large ones need two; only large epilogues gain from halves.
    return (p["num_warps"] == 8) == (tile >= 16384) and (tile >= 16384 or not p["EPILOGUE_SUBTILE"])


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [64, 128],
        "BLOCK_N": [64, 128, 256],
        "BLOCK_K": [32, 64, 128],
        "FLATTEN": [False, True],
        "EPILOGUE_SUBTILE": [False, True],
    },
    "num_warps": [4, 8],
    "num_stages": [3, 4],
    "where": lambda p: (
        _sensible(p)
        and not (p["BLOCK_K"] == 32 and p["num_stages"] == 3)
        and not (p["BLOCK_K"] == 128 and p["num_stages"] == 4)
    ),
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    a, b = normal((m, k), device, seed=1), normal((k, n), device, seed=2, scale=k**-0.5)
    c = unset((m, n), device)
    return {
        "args": (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride()),
        "kwargs": {"GROUP_M": 8, "NUM_SMS": SMS},
        "grid": lambda meta: (min(SMS, triton.cdiv(m, meta["BLOCK_M"]) * triton.cdiv(n, meta["BLOCK_N"])),),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][:2]
    return (a.float() @ b.float(),)


CASES = [
    Case(
        name=f"bp_persistent_matmul/{m}x{n}x{k}",
        kernel=bp_persistent_matmul,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (150, 200, 100)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=2.0 * m * n * k,
        bytes=2.0 * (m * k + k * n + m * n),
    )
    for m, n, k in [
        (4096, 4096, 4096),
        (8192, 8192, 4096),
        (2048, 6144, 4096),
        (128, 28672, 4096),
        (512, 5120, 13824),
        (1024, 1024, 1024),
        (16384, 768, 768),
        (4096, 1280, 320),
        (3104, 2080, 2576),
    ]
]
