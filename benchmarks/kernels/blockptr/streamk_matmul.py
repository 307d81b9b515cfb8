"""Stream-K matmul: programs take equal runs of K steps over all tiles and add what they have."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal
from benchmarks.kernels.blockptr.tiles import SMS, load_block

FAMILY, HAND = "gemm", "blockptr"


@triton.jit
def bp_streamk_matmul(
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
    PROGRAMS: tl.constexpr,
):
    tl.assume(stride_am > 0)
    tl.assume(stride_bk > 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    total = tl.cdiv(M, BLOCK_M) * tiles_n * steps
    share = tl.cdiv(total, PROGRAMS)
    at = tl.program_id(0) * share
    end = tl.minimum(at + share, total)
    while at < end:
        tile = at // steps
        first = at % steps
        last = tl.minimum(steps, first + end - at)
        off_m = (tile // tiles_n) * BLOCK_M
        off_n = (tile % tiles_n) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in tl.range(first, last):
            off_k = step * BLOCK_K
            a = load_block(a_ptr, M, K, stride_am, stride_ak, off_m, off_k, BLOCK_M, BLOCK_K)
            b = load_block(b_ptr, K, N, stride_bk, stride_bn, off_k, off_n, BLOCK_K, BLOCK_N)
            acc = tl.dot(a, b, acc)
        rows = off_m + tl.arange(0, BLOCK_M)
        cols = off_n + tl.arange(0, BLOCK_N)
        c_ptrs = c_ptr + rows.to(tl.int64)[:, None] * stride_cm + cols[None, :] * stride_cn
        tl.atomic_add(c_ptrs, acc, mask=(rows[:, None] < M) & (cols[None, :] < N), sem="relaxed")
        at += last - first


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [16, 64, 128],
        "BLOCK_N": [64, 128],
        "BLOCK_K": [32, 64, 128],
        "PROGRAMS": [SMS, 2 * SMS, 4 * SMS],
    },
    "num_warps": [4, 8],
    "num_stages": [3],
    "where": lambda p: p["num_warps"] == 4 or p["BLOCK_M"] == 128,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    a, b = normal((m, k), device, seed=1), normal((k, n), device, seed=2, scale=k**-0.5)
    c = torch.zeros(m, n, dtype=torch.float32, device=device)
    return {
        "args": (a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride()),
        "kwargs": {},
        "grid": lambda meta: (meta["PROGRAMS"],),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b = data["args"][:2]
    return (a.float() @ b.float(),)


CASES = [
    Case(
        name=f"bp_streamk_matmul/{m}x{n}x{k}",
        kernel=bp_streamk_matmul,
        key=("M", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (40, 90, 300)),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        reset_to_zero=("c_ptr",),
        flops=2.0 * m * n * k,
        bytes=2.0 * (m * k + k * n) + 4.0 * m * n,
    )
    for m, n, k in [
        (16, 4096, 14336),
        (64, 2048, 16384),
        (512, 512, 32768),
        (128, 128, 131072),
        (1024, 1536, 4096),
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (256, 5120, 1280),
    ]
]
