"""Flash attention, forward: grouped-query, causal or not, keys in two phases (whole tiles, then masked)."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "attention", "tutorial"


@triton.jit
def _attend(
    acc,
    l_i,
    m_i,
    q,
    k_ptrs,
    v_ptrs,
    stride_kn,
    offs_m,
    offs_n,
    lo,
    hi,
    n_ctx,
    qk_scale,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRELOAD_V: tl.constexpr,
):
    for start_n in range(lo, hi, BLOCK_N):
        cols = start_n + offs_n
        if MASKED:
            k = tl.load(k_ptrs + start_n * stride_kn, mask=cols[None, :] < n_ctx, other=0.0)
        else:
            k = tl.load(k_ptrs + start_n * stride_kn)
        if PRELOAD_V:
            if MASKED:
                v = tl.load(v_ptrs + start_n * stride_kn, mask=cols[:, None] < n_ctx, other=0.0)
            else:
                v = tl.load(v_ptrs + start_n * stride_kn)
        qk = tl.dot(q, k) * qk_scale
        if MASKED:
            keep = cols[None, :] < n_ctx
            if CAUSAL:
                keep = keep & (offs_m[:, None] >= cols[None, :])
            qk = tl.where(keep, qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.exp2(qk - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if not PRELOAD_V:
            if MASKED:
                v = tl.load(v_ptrs + start_n * stride_kn, mask=cols[:, None] < n_ctx, other=0.0)
            else:
                v = tl.load(v_ptrs + start_n * stride_kn)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def attention_fwd(
    Q,
    K,
    V,
    Out,
    Lse,
    sm_scale,
    stride_qz,
    stride_qh,
    stride_qm,
    stride_kz,
    stride_kh,
    stride_kn,
    H,
    KV_GROUP,
    N_CTX,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRELOAD_V: tl.constexpr,
):
    start_m = tl.program_id(0)
    off_z = tl.program_id(1) // H
    off_h = tl.program_id(1) % H
    offs_m = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)

    q_offset = off_z.to(tl.int64) * stride_qz + off_h.to(tl.int64) * stride_qh
    kv_offset = off_z.to(tl.int64) * stride_kz + (off_h // KV_GROUP).to(tl.int64) * stride_kh
    q_ptrs = Q + q_offset + offs_m[:, None] * stride_qm + offs_d[None, :]
    k_ptrs = K + kv_offset + offs_n[None, :] * stride_kn + offs_d[:, None]
    v_ptrs = V + kv_offset + offs_n[:, None] * stride_kn + offs_d[None, :]

    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.4426950408889634  # exp2(x * log2(e)) is cheaper than exp(x)
    q = tl.load(q_ptrs, mask=offs_m[:, None] < N_CTX, other=0.0)

    if CAUSAL:
        whole = (start_m * BLOCK_M) // BLOCK_N * BLOCK_N
        end = tl.minimum((start_m + 1) * BLOCK_M, N_CTX)
    else:
        whole = N_CTX // BLOCK_N * BLOCK_N
        end = N_CTX
    # fmt: off
    acc, l_i, m_i = _attend(acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_kn, offs_m, offs_n, 0, whole, N_CTX,
                            qk_scale, CAUSAL, False, BLOCK_N, PRELOAD_V)
    acc, l_i, m_i = _attend(acc, l_i, m_i, q, k_ptrs, v_ptrs, stride_kn, offs_m, offs_n, whole, end, N_CTX,
                            qk_scale, CAUSAL, True, BLOCK_N, PRELOAD_V)
    # fmt: on

    acc = acc / l_i[:, None]
    o_ptrs = Out + q_offset + offs_m[:, None] * stride_qm + offs_d[None, :]
    tl.store(o_ptrs, acc.to(Out.dtype.element_ty), mask=offs_m[:, None] < N_CTX)
    lse = (m_i + tl.log2(l_i)) * 0.6931471805599453
    tl.store(Lse + tl.program_id(1) * N_CTX + offs_m, lse, mask=offs_m < N_CTX)


SPACE: Space = {
    "kwargs": {"BLOCK_M": [64, 128, 256], "BLOCK_N": [32, 64, 128], "PRELOAD_V": [False]},
    "num_warps": [4, 8],
    "num_stages": [1, 2, 3, 4],
}


def _sane(p: dict[str, int]) -> bool:
    """No score tile that leaves warps idle or that overflows the registers by itself."""
    return 4 <= p["BLOCK_M"] * p["BLOCK_N"] / (32 * p["num_warps"]) <= 256


WIDE: Space = {
    "kwargs": {
        "BLOCK_M": [16, 32, 64, 128, 256],
        "BLOCK_N": [16, 32, 64, 128, 256],
        "PRELOAD_V": [False, True],
    },
    "num_warps": [1, 2, 4, 8, 16],
    "num_stages": [1, 2, 3, 4, 5, 6, 7],
    "where": _sane,
}

Shape = tuple[int, int, int, int, int]
"""Batch, query heads, key-value heads, sequence length, head dimension."""


def _make(shape: Shape, tiny: Shape, causal: bool, device: str, small: bool = False) -> Data:
    z, h, h_kv, n, d = tiny if small else shape
    q = normal((z, h, n, d), device, seed=1)
    k = normal((z, h_kv, n, d), device, seed=2)
    v = normal((z, h_kv, n, d), device, seed=3)
    out, lse = unset(q.shape, device), unset((z, h, n), device, dtype=torch.float32)
    return {
        "args": (q, k, v, out, lse, d**-0.5, *q.stride()[:3], *k.stride()[:3], h, h // h_kv, n),
        "kwargs": {"CAUSAL": causal, "HEAD_DIM": d},
        "grid": lambda meta: (triton.cdiv(n, meta["BLOCK_M"]), z * h),
        "outputs": (out, lse),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, out, lse, scale = data["args"][:6]
    group = q.shape[1] // k.shape[1]
    expected, logsum = torch.empty_like(out, dtype=torch.float32), torch.empty_like(lse)
    n = q.shape[2]
    future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    # One head at a time: the scores of all heads would be larger than all other tensors together.
    for z in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = q[z, h].float() @ k[z, h // group].float().T * scale
            if data["kwargs"]["CAUSAL"]:
                scores.masked_fill_(future, -math.inf)
            logsum[z, h] = scores.logsumexp(-1)
            expected[z, h] = scores.softmax(-1) @ v[z, h // group].float()
    return expected, logsum


CASES = [
    Case(
        name=f"attention/{z}x{h}x{h_kv}x{n}x{d}{'-causal' if causal else ''}",
        kernel=attention_fwd,
        key=("H", "N_CTX", "CAUSAL", "HEAD_DIM"),
        space=SPACE,
        wide=WIDE,
        make=partial(_make, (z, h, h_kv, n, d), tiny, causal),
        reference=_reference,
        tolerance=(2e-3, 2e-3),
        flops=4.0 * z * h * n * n * d * (0.5 if causal else 1.0),
        bytes=2.0 * z * n * d * (2 * h + 2 * h_kv) + 4.0 * z * h * n,
    )
    for (z, h, h_kv, n, d), tiny, causal in [
        ((4, 32, 8, 4096, 128), (1, 2, 1, 150, 32), True),
        ((1, 32, 32, 2048, 128), (1, 1, 1, 128, 16), True),
        ((32, 12, 12, 577, 64), (2, 2, 2, 37, 16), False),
    ]
]
