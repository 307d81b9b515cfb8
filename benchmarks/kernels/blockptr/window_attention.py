"""Sliding-window attention with grouped heads and a soft cap, persistent over query tiles."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import SMS, load_block, store_block

FAMILY, HAND = "attention", "blockptr"


@triton.jit
def bp_window_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    scale,
    cap,
    batch_heads,
    seqlen,
    window,
    heads,
    heads_per_kv,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tl.assume(stride_qs > 0)
    tl.assume(stride_ks > 0)
    tl.assume(window > 0)
    tiles_m = tl.cdiv(seqlen, BLOCK_M)
    for tile_id in tl.range(tl.program_id(0), tiles_m * batch_heads, PROGRAMS):
        # Neighbouring programs share keys and values either way: heads of one group, or rows of one head.
        if HEADS_FIRST:
            h = tile_id % heads
            off_m = (tile_id // heads % tiles_m) * BLOCK_M
        else:
            off_m = (tile_id % tiles_m) * BLOCK_M
            h = tile_id // tiles_m % heads
        b = (tile_id // (tiles_m * heads)).to(tl.int64)
        q_at = b * stride_qb + h * stride_qh
        kv_at = b * stride_kb + (h // heads_per_kv) * stride_kh
        q = load_block(
            q_ptr + q_at, seqlen, HEAD_DIM, stride_qs, 1, off_m, 0, BLOCK_M, HEAD_DIM, CHECK_1=False
        )
        rows = off_m + tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
        top = tl.full((BLOCK_M,), -1.0e30, dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        first = (tl.maximum(off_m - window + 1, 0) // BLOCK_N) * BLOCK_N
        for off_n in tl.range(first, tl.minimum(off_m + BLOCK_M, seqlen), BLOCK_N):
            k = load_block(
                k_ptr + kv_at, HEAD_DIM, seqlen, 1, stride_ks, 0, off_n, HEAD_DIM, BLOCK_N, CHECK_0=False
            )
            s = tl.dot(q, k) * scale
            # cap * tanh(s / cap), then in powers of two.
            s = cap * (2.0 * tl.sigmoid(2.0 * s / cap) - 1.0) * 1.4426950408889634
            back = rows[:, None] - (off_n + tl.arange(0, BLOCK_N))[None, :]
            seen = (back >= 0) & (back < window)
            s = tl.where(seen, s, -1.0e30)
            new_top = tl.maximum(top, tl.max(s, 1))
            # A row that has seen no key yet would otherwise count masked ones.
            p = tl.where(seen, tl.exp2(s - new_top[:, None]), 0.0)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(p, 1)
            v = load_block(
                v_ptr + kv_at, seqlen, HEAD_DIM, stride_ks, 1, off_n, 0, BLOCK_N, HEAD_DIM, CHECK_1=False
            )
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
            top = new_top
        # Rows past the end may have seen nothing; they are not stored.
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        store_block(o_ptr + q_at, acc, seqlen, HEAD_DIM, stride_qs, 1, off_m, 0, BLOCK_M, HEAD_DIM)


SPACE: Space = {
    "kwargs": {
        "BLOCK_M": [32, 64, 128],
        "BLOCK_N": [16, 32, 64, 128],
        "HEADS_FIRST": [False, True],
        "PROGRAMS": [SMS, 4 * SMS],
    },
    "num_warps": [4, 8],
    "num_stages": [2, 3],
    "where": lambda p: (
        (p["num_warps"] == 8) == (p["BLOCK_M"] == 128) and (p["num_stages"] == 2 or not p["HEADS_FIRST"])
    ),
}


def _make(shape: tuple[int, ...], device: str, small: bool = False) -> Data:
    batch, seqlen, heads, kv_heads, dim, window = (1, 90, 4, 2, 32, 25) if small else shape
    # The interpreter multiplies bf16 blocks as if they were integers.
    dtype = torch.float16 if small else torch.bfloat16
    q = normal((batch, seqlen, heads, dim), device, dtype=dtype, seed=1, scale=2.0)
    k, v = (normal((batch, seqlen, kv_heads, dim), device, dtype=dtype, seed=seed) for seed in (2, 3))
    o = unset((batch, seqlen, heads, dim), device, dtype=dtype)
    sizes = (batch * heads, seqlen, window, heads, heads // kv_heads)
    return {
        "args": (q, k, v, o, dim**-0.5, 30.0, *sizes, *q.stride()[:3], *k.stride()[:3]),
        "kwargs": {"HEAD_DIM": dim},
        "grid": lambda meta: (min(meta["PROGRAMS"], triton.cdiv(seqlen, meta["BLOCK_M"]) * batch * heads),),
        "outputs": (o,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, _, scale, cap, batch_heads, seqlen, window, heads, per_kv = data["args"][:11]
    at = torch.arange(seqlen, device=q.device)
    back = at[:, None] - at
    hidden = (back < 0) | (back >= window)
    o = torch.empty_like(q, dtype=torch.float32)
    for b in range(batch_heads // heads):
        for h in range(heads):
            scores = (q[b, :, h].float() @ k[b, :, h // per_kv].float().T) * scale
            scores = (cap * torch.tanh(scores / cap)).masked_fill_(hidden, float("-inf"))
            o[b, :, h] = scores.softmax(-1) @ v[b, :, h // per_kv].float()
    return (o,)


CASES = [
    Case(
        name=f"bp_window_attention/{batch}x{seqlen}x{heads}x{kv_heads}x{dim}w{window}",
        kernel=bp_window_attention,
        key=("seqlen", "window", "HEAD_DIM"),
        space=SPACE,
        make=partial(_make, (batch, seqlen, heads, kv_heads, dim, window)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        # Every query sees `window` keys but for the first ones.
        flops=4.0 * batch * heads * dim * (seqlen * window - window * (window - 1) / 2),
        bytes=4.0 * batch * seqlen * (heads + kv_heads) * dim,
    )
    for batch, seqlen, heads, kv_heads, dim, window in [
        (1, 8192, 16, 8, 128, 4096),
        (2, 4096, 32, 8, 128, 512),
        (1, 16384, 16, 4, 128, 1024),
        (8, 1024, 16, 8, 128, 128),
        (4, 2048, 16, 8, 128, 64),
        (1, 512, 16, 4, 128, 256),
        (32, 400, 16, 8, 128, 32),
        (2, 8192, 16, 8, 128, 16),
    ]
]
