"""Grouped matmul over experts: rows sorted by expert, runtime offsets, persistent over all tiles."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import SMS, load_block, store_block

FAMILY, HAND = "gemm", "blockptr"


@triton.jit
def bp_grouped_matmul(
    x_ptr,
    w_ptr,
    offsets_ptr,
    y_ptr,
    E,
    N,
    K,
    stride_xm,
    stride_xk,
    stride_we,
    stride_wn,
    stride_wk,
    stride_ym,
    stride_yn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tl.assume(stride_xm > 0)
    tl.assume(stride_wn > 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_id = tl.program_id(0)
    done = 0
    for e in range(E):
        start = tl.load(offsets_ptr + e)
        rows = tl.load(offsets_ptr + e + 1) - start
        tiles_m = tl.cdiv(rows, BLOCK_M)
        # The block's shape is this expert's run of rows: no tile reaches into the next expert.
        x_base = x_ptr + start.to(tl.int64) * stride_xm
        y_base = y_ptr + start.to(tl.int64) * stride_ym
        w_base = w_ptr + tl.cast(e, tl.int64) * stride_we
        while tile_id < done + tiles_m * tiles_n:
            # Rows vary fastest, since all row tiles of an expert share its weights.
            off_m = ((tile_id - done) % tiles_m) * BLOCK_M
            off_n = ((tile_id - done) // tiles_m) * BLOCK_N
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for off_k in tl.range(0, K, BLOCK_K):
                x = load_block(x_base, rows, K, stride_xm, stride_xk, off_m, off_k, BLOCK_M, BLOCK_K)
                w = load_block(w_base, K, N, stride_wk, stride_wn, off_k, off_n, BLOCK_K, BLOCK_N)
                acc = tl.dot(x, w, acc)
            store_block(y_base, acc, rows, N, stride_ym, stride_yn, off_m, off_n, BLOCK_M, BLOCK_N)
            tile_id += PROGRAMS
        done += tiles_m * tiles_n


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [16, 64, 128],
        "BLOCK_N": [64, 128, 256],
        "BLOCK_K": [64, 128],
        "PROGRAMS": [SMS, 2 * SMS],
    },
    "num_warps": [4, 8],
    "num_stages": [2, 4],
    "where": lambda p: (p["num_warps"] == 8) == (p["BLOCK_M"] * p["BLOCK_N"] >= 16384),
}


def _bounds(tokens: int, experts: int) -> list[int]:
    # Popular and unpopular experts: shares fall linearly from 1.75 to 0.25 of the mean, in shuffled order.
    order = sorted(range(experts), key=lambda e: (e * 7919 + 13) % 1009)
    shares = [0.25 + 1.5 * order.index(e) / max(experts - 1, 1) for e in range(experts)]
    ends = [0]
    for share in shares[:-1]:
        ends.append(ends[-1] + int(tokens * share / sum(shares)))
    return [*ends, tokens]


def _make(shape: tuple[int, ...], tiny: tuple[int, ...], device: str, small: bool = False) -> Data:
    tokens, experts, n, k = tiny if small else shape
    # The interpreter multiplies bf16 blocks as if they were integers.
    dtype = torch.float16 if small else torch.bfloat16
    x = normal((tokens, k), device, dtype=dtype, seed=1)
    w = normal((experts, n, k), device, dtype=dtype, seed=2, scale=k**-0.5)
    offsets = torch.tensor(_bounds(tokens, experts), dtype=torch.int32, device=device)
    y = unset((tokens, n), device, dtype=dtype)
    return {
        "args": (x, w, offsets, y, experts, n, k, *x.stride(), *w.stride(), *y.stride()),
        "kwargs": {},
        # How many tiles there are only the offsets say, and those are on the device.
        "grid": lambda meta: (meta["PROGRAMS"],),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, w, offsets = data["args"][:3]
    ends = offsets.tolist()
    parts = [x[ends[e] : ends[e + 1]].float() @ w[e].float().T for e in range(w.shape[0])]
    return (torch.cat(parts),)


CASES = [
    Case(
        name=f"bp_grouped_matmul/{tokens}x{experts}x{n}x{k}",
        kernel=bp_grouped_matmul,
        key=("E", "N", "K"),
        space=SPACE,
        make=partial(_make, (tokens, experts, n, k), (60, 3, 80, 100)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        flops=2.0 * tokens * n * k,
        bytes=2.0 * (tokens * k + experts * n * k + tokens * n) + 4.0 * (experts + 1),
    )
    for tokens, experts, n, k in [
        (8192, 16, 6400, 4096),
        (4096, 64, 1408, 2048),
        (16384, 64, 2048, 1408),
        (256, 64, 1408, 2048),
        (32, 16, 4096, 14336),
        (2048, 128, 768, 2048),
        (1024, 16, 1024, 1024),
        (32768, 32, 512, 1024),
    ]
]
