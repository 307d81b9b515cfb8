"""Attention backward, dQ, token-major and with grouped key heads: a tile of queries stays."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import tile_range

FAMILY, HAND = "attention_backward", "functional"


@triton.jit
def dq_step(dq, q, do, lse2, delta, k, v, qk_scale, visible):
    p = tl.exp2(tl.dot(q, tl.trans(k)) * qk_scale - lse2[:, None])
    p = tl.where(visible, p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return dq + tl.dot(ds.to(k.dtype), k)


@triton.jit
def fn_attn_bwd_dq(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    sm_scale,
    seq_len,
    heads,
    group,
    stride_qt,
    stride_kt,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LATEST_FIRST: tl.constexpr,
):
    pid_m = tl.program_id(0)
    if LATEST_FIRST:
        # The last tile of queries sees most keys, so it starts before the short ones.
        pid_m = tl.num_programs(0) - 1 - pid_m
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    offs_m = tile_range(pid_m, TILE_M)
    offs_d = tl.arange(0, HEAD_DIM)
    mask_m = offs_m < seq_len
    q_at = batch * seq_len * stride_qt + head * HEAD_DIM + offs_m[:, None] * stride_qt + offs_d[None, :]
    q = tl.load(q_ptr + q_at, mask=mask_m[:, None], other=0.0)
    do = tl.load(do_ptr + q_at, mask=mask_m[:, None], other=0.0)
    row_at = (batch * heads + head) * seq_len + offs_m
    lse2 = tl.load(lse_ptr + row_at, mask=mask_m, other=float("inf")) * 1.4426950408889634
    delta = tl.load(delta_ptr + row_at, mask=mask_m, other=0.0)
    kv_at = batch * seq_len * stride_kt + head // group * HEAD_DIM
    dq = tl.zeros([TILE_M, HEAD_DIM], dtype=tl.float32)
    hi = min((pid_m + 1) * TILE_M, seq_len)
    for start in range(0, hi, TILE_N):
        offs_n = start + tl.arange(0, TILE_N)
        mask_n = (offs_n < seq_len)[:, None]
        at = kv_at + offs_n[:, None] * stride_kt + offs_d[None, :]
        k = tl.load(k_ptr + at, mask=mask_n, other=0.0)
        v = tl.load(v_ptr + at, mask=mask_n, other=0.0)
        visible = offs_m[:, None] >= offs_n[None, :]
        dq = dq_step(dq, q, do, lse2, delta, k, v, sm_scale * 1.4426950408889634, visible)
    tl.store(dq_ptr + q_at, (dq * sm_scale).to(dq_ptr.dtype.element_ty), mask=mask_m[:, None])


SPACE: Space = {
    "kwargs": {"TILE_M": [32, 64, 128], "TILE_N": [32, 64, 128], "LATEST_FIRST": [False, True]},
    "num_warps": [4, 8],
    "num_stages": [2, 3],
}

Shape = tuple[int, int, int, int, int]


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    s = q.float() @ k.float().T * q.shape[-1] ** -0.5
    return s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu_(1), float("-inf"))


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    batch, length, heads, kv_heads, dim = tiny if small else shape
    dtype = torch.float16 if small else torch.bfloat16  # the interpreter has no dot product of bf16
    q, do = (normal((batch, length, heads, dim), device, dtype=dtype, seed=n) for n in (1, 4))
    k, v = (normal((batch, length, kv_heads, dim), device, dtype=dtype, seed=n) for n in (2, 3))
    lse, delta = torch.empty(2, batch, heads, length, dtype=torch.float32, device=device)
    group = heads // kv_heads
    if device != "meta":
        for b in range(batch):
            for h in range(heads):
                s = _scores(q[b, :, h], k[b, :, h // group])
                lse[b, h] = s.logsumexp(-1)
                delta[b, h] = (s.softmax(-1) @ v[b, :, h // group].float() * do[b, :, h].float()).sum(-1)
    dq = unset((batch, length, heads, dim), device, dtype=dtype)
    return {
        "args": (
            q, k, v, do, lse, delta, dq, dim**-0.5, length, heads, group, heads * dim, kv_heads * dim
        ),
        "kwargs": {"HEAD_DIM": dim},
        "grid": lambda meta: (triton.cdiv(length, meta["TILE_M"]), batch * heads),
        "outputs": (dq,),
    }  # fmt: skip


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, do, lse, delta = data["args"][:6]
    group = data["args"][10]
    dq = torch.empty_like(q, dtype=torch.float32)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            p = (_scores(q[b, :, h], k[b, :, h // group]) - lse[b, h, :, None]).exp_()
            dp = do[b, :, h].float() @ v[b, :, h // group].float().T
            dq[b, :, h] = p * (dp - delta[b, h, :, None]) @ k[b, :, h // group].float()
    return (dq * q.shape[-1] ** -0.5,)


CASES = [
    Case(
        name=f"fn_attn_bwd_dq/{batch}x{length}x{heads}g{kv_heads}x{dim}",
        kernel=fn_attn_bwd_dq,
        key=("seq_len", "heads"),
        space=SPACE,
        make=partial(_make, (batch, length, heads, kv_heads, dim), (1, 70, 2, 1, dim)),
        reference=_reference,
        tolerance=(4e-2, 3e-2),
        # Three products of length x length x dim, half of it masked away.
        flops=3.0 * batch * heads * length * length * dim,
        bytes=6.0 * batch * length * heads * dim
        + 4.0 * batch * length * kv_heads * dim
        + 8.0 * batch * heads * length,
    )
    for batch, length, heads, kv_heads, dim in [
        (1, 2048, 32, 16, 128),
        (2, 1024, 32, 16, 128),
        (1, 4096, 32, 16, 128),
        (16, 256, 32, 16, 128),
        (1, 8192, 16, 8, 128),
        (8, 512, 16, 8, 128),
        (1, 1024, 16, 8, 64),
        (4, 2048, 16, 8, 64),
        (1, 4096, 32, 16, 64),
    ]
]
