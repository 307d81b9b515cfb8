"""Flash attention, forward: whole key blocks without masks first, then the masked rest."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import load_block, store_block

FAMILY, HAND = "attention", "blockptr"


@triton.jit
def attend(
    acc,
    top,
    total,
    q,
    k_base,
    v_base,
    begin,
    end,
    off_m,
    n_ctx,
    stride_kn,
    stride_kd,
    stride_vn,
    stride_vd,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    rows = off_m + tl.arange(0, BLOCK_M)
    for start in tl.range(begin, end, BLOCK_N):
        off_n = tl.multiple_of(start, BLOCK_N)
        k = load_block(
            k_base,
            HEAD_DIM,
            n_ctx,
            stride_kd,
            stride_kn,
            0,
            off_n,
            HEAD_DIM,
            BLOCK_N,
            CHECK_0=False,
            CHECK_1=MASKED,
        )
        s = tl.dot(q, k) * scale
        if MASKED:
            cols = off_n + tl.arange(0, BLOCK_N)
            seen = (cols < n_ctx)[None, :]
            if CAUSAL:
                seen = seen & (rows[:, None] >= cols[None, :])
            s = tl.where(seen, s, -1.0e30)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        v = load_block(
            v_base,
            n_ctx,
            HEAD_DIM,
            stride_vn,
            stride_vd,
            off_n,
            0,
            BLOCK_N,
            HEAD_DIM,
            CHECK_0=MASKED,
            CHECK_1=False,
        )
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        top = new_top
    return acc, top, total


@triton.jit
def bp_flash_fwd(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    scale,
    heads,
    n_ctx,
    stride_qz,
    stride_qh,
    stride_qm,
    stride_qd,
    stride_kz,
    stride_kh,
    stride_kn,
    stride_kd,
    stride_vz,
    stride_vh,
    stride_vn,
    stride_vd,
    HEAD_DIM: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tl.assume(stride_qm > 0)
    tl.assume(stride_kn > 0)
    tl.assume(stride_vn > 0)
    off_m = tl.program_id(0) * BLOCK_M
    z = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    q_at = z * stride_qz + h * stride_qh
    k_base = k_ptr + z * stride_kz + h * stride_kh
    v_base = v_ptr + z * stride_vz + h * stride_vh
    q = load_block(
        q_ptr + q_at, n_ctx, HEAD_DIM, stride_qm, stride_qd, off_m, 0, BLOCK_M, HEAD_DIM, CHECK_1=False
    )
    acc = tl.zeros((BLOCK_M, HEAD_DIM), dtype=tl.float32)
    top = tl.full((BLOCK_M,), -1.0e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if CAUSAL:
        whole = (off_m // BLOCK_N) * BLOCK_N
        end = tl.minimum(off_m + BLOCK_M, n_ctx)
    else:
        whole = (n_ctx // BLOCK_N) * BLOCK_N
        end = n_ctx
    scale *= 1.4426950408889634
    acc, top, total = attend(
        acc, top, total, q, k_base, v_base, 0, whole, off_m, n_ctx,
        stride_kn, stride_kd, stride_vn, stride_vd, scale,
        HEAD_DIM, BLOCK_M, BLOCK_N, CAUSAL, False,
    )  # fmt: skip
    acc, top, total = attend(
        acc, top, total, q, k_base, v_base, whole, end, off_m, n_ctx,
        stride_kn, stride_kd, stride_vn, stride_vd, scale,
        HEAD_DIM, BLOCK_M, BLOCK_N, CAUSAL, True,
    )  # fmt: skip
    acc = acc / total[:, None]
    store_block(o_ptr + q_at, acc, n_ctx, HEAD_DIM, stride_qm, stride_qd, off_m, 0, BLOCK_M, HEAD_DIM)
    rows = off_m + tl.arange(0, BLOCK_M)
    lse = (top + tl.log2(total)) * 0.6931471805599453
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * n_ctx + rows, lse, mask=rows < n_ctx)


SPACE: Space = {
    "kwargs": {"BLOCK_M": [32, 64, 128], "BLOCK_N": [32, 64, 128]},
    "num_warps": [4, 8],
    "num_stages": [1, 2, 3, 4],
    "where": lambda p: p["num_warps"] == 4 or p["BLOCK_M"] > 32,
}


def _make(shape: tuple[int, ...], causal: bool, device: str, small: bool = False) -> Data:
    batch, heads, n_ctx, dim = (1, 2, 75, 32) if small else shape
    q, k, v = (normal((batch, heads, n_ctx, dim), device, seed=seed) for seed in (1, 2, 3))
    o = unset((batch, heads, n_ctx, dim), device)
    lse = unset((batch, heads, n_ctx), device, dtype=torch.float32)
    return {
        "args": (q, k, v, o, lse, dim**-0.5, heads, n_ctx, *q.stride(), *k.stride(), *v.stride()),
        "kwargs": {"HEAD_DIM": dim, "CAUSAL": causal},
        "grid": lambda meta: (triton.cdiv(n_ctx, meta["BLOCK_M"]), batch * heads),
        "outputs": (o, lse),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, _, _, scale = data["args"][:6]
    n_ctx = q.shape[2]
    o, lse = torch.empty_like(q, dtype=torch.float32), torch.empty(q.shape[:3], device=q.device)
    later = torch.ones(n_ctx, n_ctx, dtype=torch.bool, device=q.device).triu(1)
    for z in range(q.shape[0]):
        for h in range(q.shape[1]):
            scores = (q[z, h].float() @ k[z, h].float().T) * scale
            if data["kwargs"]["CAUSAL"]:
                scores.masked_fill_(later, float("-inf"))
            lse[z, h] = scores.logsumexp(-1)
            o[z, h] = scores.softmax(-1) @ v[z, h].float()
    return o, lse


CASES = [
    Case(
        name=f"bp_flash_fwd/{batch}x{heads}x{n_ctx}x{dim}{'_causal' if causal else ''}",
        kernel=bp_flash_fwd,
        key=("n_ctx", "HEAD_DIM", "CAUSAL"),
        space=SPACE,
        make=partial(_make, (batch, heads, n_ctx, dim), causal),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=4.0 * batch * heads * n_ctx * (n_ctx + 1 if causal else 2 * n_ctx) * dim / 2,
        bytes=8.0 * batch * heads * n_ctx * dim + 4.0 * batch * heads * n_ctx,
    )
    for batch, heads, n_ctx, dim, causal in [
        (4, 16, 4096, 64, True),
        (1, 32, 8192, 64, True),
        (16, 16, 512, 64, True),
        (64, 16, 208, 64, True),
        (2, 32, 2048, 128, False),
        (1, 32, 4608, 128, False),
        (8, 16, 1024, 128, False),
        (1, 16, 256, 128, False),
    ]
]
