"""Attention backward, dK and dV: a tile of keys stays, tiles of queries stream past."""

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
def dkdv_over_queries(
    dk,
    dv,
    k,
    v,
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    offs_n,
    lo,
    hi,
    seq_len,
    qk_scale,
    HEAD_DIM: tl.constexpr,
    TILE_M: tl.constexpr,
    MASK: tl.constexpr,
):
    offs_d = tl.arange(0, HEAD_DIM)
    for start in range(lo, hi, TILE_M):
        offs_m = start + tl.arange(0, TILE_M)
        seen = offs_m < seq_len
        at = offs_m[:, None] * HEAD_DIM + offs_d[None, :]
        q = tl.load(q_ptr + at, mask=seen[:, None], other=0.0)
        # A row past the end has an infinite normaliser, so its probabilities are zero.
        lse = tl.load(lse_ptr + offs_m, mask=seen, other=float("inf"))
        p_t = tl.exp2(tl.dot(k, tl.trans(q)) * qk_scale - lse[None, :] * 1.4426950408889634)
        if MASK:
            p_t = tl.where(offs_m[None, :] >= offs_n[:, None], p_t, 0.0)
        do = tl.load(do_ptr + at, mask=seen[:, None], other=0.0)
        dv += tl.dot(p_t.to(do.dtype), do)
        delta = tl.load(delta_ptr + offs_m, mask=seen, other=0.0)
        ds_t = p_t * (tl.dot(v, tl.trans(do)) - delta[None, :])
        dk += tl.dot(ds_t.to(q.dtype), q)
    return dk, dv


@triton.jit
def fn_attn_bwd_dkdv(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    sm_scale,
    seq_len,
    stride_head,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    pid_n = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    offs_n = tile_range(pid_n, TILE_N)
    offs_d = tl.arange(0, HEAD_DIM)
    mask_n = (offs_n < seq_len)[:, None]
    at = head * stride_head + offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    k = tl.load(k_ptr + at, mask=mask_n, other=0.0)
    v = tl.load(v_ptr + at, mask=mask_n, other=0.0)
    dk = tl.zeros([TILE_N, HEAD_DIM], dtype=tl.float32)
    dv = tl.zeros([TILE_N, HEAD_DIM], dtype=tl.float32)
    qk_scale = sm_scale * 1.4426950408889634
    q_head = q_ptr + head * stride_head
    do_head = do_ptr + head * stride_head
    lse_head = lse_ptr + head * seq_len
    delta_head = delta_ptr + head * seq_len
    first_full = 0
    if CAUSAL:
        # Queries on the diagonal see some of these keys, later ones see all of them.
        first = pid_n * TILE_N // TILE_M * TILE_M
        first_full = tl.cdiv((pid_n + 1) * TILE_N, TILE_M) * TILE_M
        dk, dv = dkdv_over_queries(
            dk, dv, k, v, q_head, do_head, lse_head, delta_head, offs_n,
            first, min(first_full, seq_len), seq_len, qk_scale, HEAD_DIM, TILE_M, True,
        )  # fmt: skip
    dk, dv = dkdv_over_queries(
        dk, dv, k, v, q_head, do_head, lse_head, delta_head, offs_n,
        first_full, seq_len, seq_len, qk_scale, HEAD_DIM, TILE_M, False,
    )  # fmt: skip
    tl.store(dk_ptr + at, (dk * sm_scale).to(dk_ptr.dtype.element_ty), mask=mask_n)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=mask_n)


SPACE: Space = {
    "kwargs": {"TILE_M": [16, 32, 64, 128], "TILE_N": [32, 64, 128]},
    "num_warps": [4, 8],
    "num_stages": [1, 2, 3],
    "where": lambda p: p["num_stages"] < 3 or p["TILE_M"] < 128,
}

Shape = tuple[int, int, int]


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    s = q.float() @ k.float().T * q.shape[-1] ** -0.5
    if causal:
        s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu_(1), float("-inf"))
    return s


def _make(shape: Shape, tiny: Shape, causal: bool, device: str, small: bool = False) -> Data:
    heads, length, dim = tiny if small else shape
    dtype = torch.float16 if small else torch.bfloat16  # the interpreter has no dot product of bf16
    q, k, v, do = (normal((heads, length, dim), device, dtype=dtype, seed=seed) for seed in (1, 2, 3, 4))
    lse, delta = torch.empty(2, heads, length, dtype=torch.float32, device=device)
    if device != "meta":
        for head in range(heads):
            s = _scores(q[head], k[head], causal)
            lse[head] = s.logsumexp(-1)
            delta[head] = (s.softmax(-1) @ v[head].float() * do[head].float()).sum(-1)
    dk, dv = (unset((heads, length, dim), device, dtype=dtype) for _ in range(2))
    return {
        "args": (q, k, v, do, lse, delta, dk, dv, dim**-0.5, length, length * dim),
        "kwargs": {"HEAD_DIM": dim, "CAUSAL": causal},
        "grid": lambda meta: (triton.cdiv(length, meta["TILE_N"]), heads),
        "outputs": (dk, dv),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, do, lse, delta = data["args"][:6]
    causal = data["kwargs"]["CAUSAL"]
    dk, dv = torch.empty_like(k, dtype=torch.float32), torch.empty_like(v, dtype=torch.float32)
    for head in range(len(q)):
        p = (_scores(q[head], k[head], causal) - lse[head, :, None]).exp_()
        dv[head] = p.T @ do[head].float()
        ds = p * (do[head].float() @ v[head].float().T - delta[head, :, None])
        dk[head] = ds.T @ q[head].float() * q.shape[-1] ** -0.5
    return dk, dv


CASES = [
    Case(
        name=f"fn_attn_bwd_dkdv/{heads}x{length}x{dim}{'_causal' * causal}",
        kernel=fn_attn_bwd_dkdv,
        key=("seq_len",),
        space=SPACE,
        make=partial(_make, (heads, length, dim), (1, 75, dim), causal),
        reference=_reference,
        tolerance=(4e-2, 3e-2),
        # Four products of length x length x dim.
        flops=8.0 * heads * length * length * dim * (0.5 if causal else 1.0),
        bytes=12.0 * heads * length * dim + 8.0 * heads * length,
    )
    for heads, length, dim, causal in [
        (32, 1024, 64, True),
        (64, 512, 64, True),
        (16, 2048, 64, True),
        (8, 4096, 64, True),
        (4, 8192, 64, True),
        (256, 256, 64, True),
        (16, 1024, 128, False),
        (32, 2048, 128, False),
        (8, 4096, 128, False),
        (96, 256, 128, False),
    ]
]
