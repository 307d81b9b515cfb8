"""Causal attention, forward, with linear position biases (ALiBi): full tiles first, then the diagonal."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import tile_range

FAMILY, HAND = "attention", "functional"


@triton.jit
def online_step(acc, m, z, s, v):
    """One step of the streaming softmax over scores in base 2."""
    m_new = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp2(s - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v)
    return acc, m_new, z * rescale + tl.sum(p, axis=1)


@triton.jit
def load_rows(ptrs, rows, limit, CHECK: tl.constexpr):
    if CHECK:
        return tl.load(ptrs, mask=rows[:, None] < limit, other=0.0)
    return tl.load(ptrs)


@triton.jit
def over_keys(
    acc,
    m,
    z,
    q,
    k_ptr,
    v_ptr,
    offs_m,
    lo,
    hi,
    kv_len,
    slope,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    TILE_N: tl.constexpr,
    DIAGONAL: tl.constexpr,
):
    offs_d = tl.arange(0, HEAD_DIM)
    for start in range(lo, hi, TILE_N):
        offs_n = start + tl.arange(0, TILE_N)
        at = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        k = load_rows(k_ptr + at, offs_n, kv_len, DIAGONAL)
        distance = offs_n[None, :] - offs_m[:, None]
        s = tl.dot(q, tl.trans(k)) * qk_scale + slope * distance.to(tl.float32)
        if DIAGONAL:
            s = tl.where(distance <= 0, s, float("-inf"))
        v = load_rows(v_ptr + at, offs_n, kv_len, DIAGONAL)
        acc, m, z = online_step(acc, m, z, s, v)
    return acc, m, z


@triton.jit
def fn_alibi_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    slope_ptr,
    o_ptr,
    lse_ptr,
    sm_scale,
    q_len,
    kv_len,
    heads,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    pid_m = tl.program_id(1)
    pid_h = tl.program_id(0).to(tl.int64)
    past = kv_len - q_len
    rows = tile_range(pid_m, TILE_M)
    offs_d = tl.arange(0, HEAD_DIM)
    at = pid_h * q_len * HEAD_DIM + rows[:, None] * HEAD_DIM + offs_d[None, :]
    mask = rows < q_len
    q = tl.load(q_ptr + at, mask=mask[:, None], other=0.0)
    slope = tl.load(slope_ptr + pid_h % heads) * 1.4426950408889634
    k_head = k_ptr + pid_h * kv_len * HEAD_DIM
    v_head = v_ptr + pid_h * kv_len * HEAD_DIM
    m = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    z = tl.zeros([TILE_M], dtype=tl.float32)
    acc = tl.zeros([TILE_M, HEAD_DIM], dtype=tl.float32)
    first = past + pid_m * TILE_M
    full = first // TILE_N * TILE_N
    end = min(first + TILE_M, kv_len)
    scale = sm_scale * 1.4426950408889634
    acc, m, z = over_keys(
        acc, m, z, q, k_head, v_head, rows + past, 0, full, kv_len, slope, scale, HEAD_DIM, TILE_N, False
    )
    acc, m, z = over_keys(
        acc, m, z, q, k_head, v_head, rows + past, full, end, kv_len, slope, scale, HEAD_DIM, TILE_N, True
    )
    tl.store(o_ptr + at, (acc / z[:, None]).to(o_ptr.dtype.element_ty), mask=mask[:, None])
    tl.store(lse_ptr + pid_h * q_len + rows, (m + tl.log2(z)) * 0.6931471805599453, mask=mask)


SPACE: Space = {
    "kwargs": {"TILE_M": [32, 64, 128], "TILE_N": [16, 32, 64, 128]},
    "num_warps": [4, 8],
    "num_stages": [2, 3],
}

Shape = tuple[int, int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    batch, heads, q_len, kv_len, dim = tiny if small else shape
    dtype = torch.float16 if small else torch.bfloat16  # the interpreter has no dot product of bf16
    q = normal((batch, heads, q_len, dim), device, dtype=dtype, seed=1)
    k, v = (normal((batch, heads, kv_len, dim), device, dtype=dtype, seed=n) for n in (2, 3))
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float32, device=device) / heads)
    o = unset((batch, heads, q_len, dim), device, dtype=dtype)
    lse = unset((batch, heads, q_len), device, dtype=torch.float32)
    return {
        "args": (q, k, v, slopes, o, lse, dim**-0.5, q_len, kv_len, heads),
        "kwargs": {"HEAD_DIM": dim},
        "grid": lambda meta: (batch * heads, triton.cdiv(q_len, meta["TILE_M"])),
        "outputs": (o, lse),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, slopes = data["args"][:4]
    q_len, kv_len = q.shape[2], k.shape[2]
    o, lse = (torch.empty_like(data["args"][n], dtype=torch.float32) for n in (4, 5))
    row = torch.arange(kv_len - q_len, kv_len, device=q.device)[:, None]
    distance = torch.arange(kv_len, device=q.device)[None, :] - row
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            s = q[b, h].float() @ k[b, h].float().T * q.shape[-1] ** -0.5 + slopes[h] * distance
            s.masked_fill_(distance > 0, float("-inf"))
            lse[b, h] = s.logsumexp(-1)
            o[b, h] = s.softmax(-1) @ v[b, h].float()
    return o, lse


CASES = [
    Case(
        name=f"fn_alibi_attention/{batch}x{heads}x{q_len}x{kv_len}x{dim}",
        kernel=fn_alibi_attention,
        key=("q_len", "kv_len"),
        space=SPACE,
        make=partial(_make, (batch, heads, q_len, kv_len, dim), (1, 2, 37, 90, dim)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        # Two products over the visible part of the scores.
        flops=4.0 * batch * heads * dim * (q_len * kv_len - q_len * (q_len - 1) / 2),
        bytes=4.0 * batch * heads * dim * (q_len + kv_len) + 4.0 * heads + 4.0 * batch * heads * q_len,
    )
    for batch, heads, q_len, kv_len, dim in [
        (1, 32, 2048, 2048, 128),
        (1, 64, 512, 4096, 128),
        (8, 32, 512, 512, 128),
        (2, 16, 4096, 4096, 128),
        (1, 32, 16, 8192, 128),
        (32, 16, 128, 1024, 128),
        (1, 16, 4096, 4096, 64),
        (16, 16, 1024, 1024, 64),
        (64, 16, 256, 256, 64),
    ]
]
