"""Cross-attention from image or decoder tokens to padded text: every batch entry has its key length."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset
from benchmarks.kernels.functional.helpers import tile_range

FAMILY, HAND = "attention", "functional"


@triton.jit
def attend_to(acc, m, z, q, k_t, v, scale, visible, CHECK: tl.constexpr):
    s = tl.dot(q, k_t) * scale
    if CHECK:
        s = tl.where(visible[None, :], s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, axis=1))
    p = tl.exp2(s - m_new[:, None])
    rescale = tl.exp2(m - m_new)
    return acc * rescale[:, None] + tl.dot(p.to(v.dtype), v), m_new, z * rescale + tl.sum(p, axis=1)


@triton.jit
def fn_cross_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    length_ptr,
    o_ptr,
    sm_scale,
    q_len,
    kv_len,
    heads,
    stride_token,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    PEEL_TAIL: tl.constexpr,
):
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    keys = tl.load(length_ptr + batch)
    rows = tile_range(tl.program_id(0), TILE_M)
    offs_d = tl.arange(0, HEAD_DIM)
    mask = (rows < q_len)[:, None]
    q_at = (batch * q_len + rows[:, None]) * stride_token + head * HEAD_DIM + offs_d[None, :]
    q = tl.load(q_ptr + q_at, mask=mask, other=0.0)
    scale = sm_scale * 1.4426950408889634
    m = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
    z = tl.zeros([TILE_M], dtype=tl.float32)
    acc = tl.zeros([TILE_M, HEAD_DIM], dtype=tl.float32)
    kv_at = batch * kv_len * stride_token + head * HEAD_DIM
    whole = 0
    if PEEL_TAIL:
        whole = keys // TILE_N * TILE_N
        for start in range(0, whole, TILE_N):
            cols = start + tl.arange(0, TILE_N)
            k_t = tl.load(k_ptr + kv_at + cols[None, :] * stride_token + offs_d[:, None])
            v = tl.load(v_ptr + kv_at + cols[:, None] * stride_token + offs_d[None, :])
            acc, m, z = attend_to(acc, m, z, q, k_t, v, scale, cols < keys, False)
    for start in range(whole, keys, TILE_N):
        cols = start + tl.arange(0, TILE_N)
        seen = cols < keys
        k_t = tl.load(
            k_ptr + kv_at + cols[None, :] * stride_token + offs_d[:, None], mask=seen[None, :], other=0.0
        )
        v = tl.load(
            v_ptr + kv_at + cols[:, None] * stride_token + offs_d[None, :], mask=seen[:, None], other=0.0
        )
        acc, m, z = attend_to(acc, m, z, q, k_t, v, scale, seen, True)
    tl.store(o_ptr + q_at, (acc / z[:, None]).to(o_ptr.dtype.element_ty), mask=mask)


SPACE: Space = {
    "kwargs": {"TILE_M": [32, 64, 128], "TILE_N": [16, 32, 64], "PEEL_TAIL": [False, True]},
    "num_warps": [2, 4, 8],
    "num_stages": [2],
}

Shape = tuple[int, int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    batch, q_len, kv_len, heads, dim = tiny if small else shape
    dtype = torch.float16 if small else torch.bfloat16  # the interpreter has no dot product of bf16
    q = normal((batch, q_len, heads, dim), device, dtype=dtype, seed=1)
    k, v = (normal((batch, kv_len, heads, dim), device, dtype=dtype, seed=n) for n in (2, 3))
    lengths = integers(kv_len // 4 + 1, kv_len + 1, (batch,), device, dtype=torch.int32, seed=4)
    o = unset((batch, q_len, heads, dim), device, dtype=dtype)
    return {
        "args": (q, k, v, lengths, o, dim**-0.5, q_len, kv_len, heads, heads * dim),
        "kwargs": {"HEAD_DIM": dim},
        "grid": lambda meta: (triton.cdiv(q_len, meta["TILE_M"]), batch * heads),
        "outputs": (o,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, lengths = data["args"][:4]
    o = torch.empty_like(q, dtype=torch.float32)
    for b, keys in enumerate(lengths.tolist()):
        for h in range(q.shape[2]):
            s = q[b, :, h].float() @ k[b, :keys, h].float().T * q.shape[-1] ** -0.5
            o[b, :, h] = s.softmax(-1) @ v[b, :keys, h].float()
    return (o,)


CASES = [
    Case(
        name=f"fn_cross_attention/{batch}x{q_len}x{kv_len}x{heads}x{dim}",
        kernel=fn_cross_attention,
        key=("q_len", "kv_len"),
        space=SPACE,
        make=partial(_make, (batch, q_len, kv_len, heads, dim), (2, 45, 40, 2, dim)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        # Up to the padding, which is a matter of the drawn lengths.
        flops=4.0 * batch * heads * q_len * kv_len * dim * 0.625,
        bytes=4.0 * batch * (q_len + kv_len) * heads * dim + 4.0 * batch,
    )
    for batch, q_len, kv_len, heads, dim in [
        (2, 4096, 80, 16, 64),
        (8, 1024, 80, 16, 64),
        (16, 256, 80, 16, 64),
        (4, 4096, 512, 16, 64),
        (16, 448, 1504, 16, 64),
        (2, 9216, 256, 16, 128),
        (1, 32768, 512, 16, 128),
        (32, 64, 2048, 16, 128),
        (64, 16, 1024, 16, 128),
    ]
]
