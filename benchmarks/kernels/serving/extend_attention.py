"""Attention of new tokens over cached ones, found through an index list, and causally over themselves."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset
from benchmarks.kernels.serving._work import moved, permutation

FAMILY, HAND = "attention", "serving"


@triton.jit
def _update(q, k, v, valid, sm_scale, acc, deno, e_max):
    qk = tl.dot(q, k) * sm_scale
    qk = tl.where(valid, qk, -1.0e30)
    n_e_max = tl.maximum(tl.max(qk, 1), e_max)
    re_scale = tl.exp(e_max - n_e_max)
    p = tl.exp(qk - n_e_max[:, None])
    deno = deno * re_scale + tl.sum(p, 1)
    acc = acc * re_scale[:, None] + tl.dot(p.to(v.dtype), v)
    return acc, deno, n_e_max


@triton.jit
def srv_extend_attention(
    Q_Extend,
    K_Extend,
    V_Extend,
    O_Extend,
    K_Buffer,
    V_Buffer,
    qo_indptr,
    kv_indptr,
    kv_indices,
    sm_scale,
    max_extend,
    stride_qbs,
    stride_qh,
    stride_kbs,
    stride_kh,
    stride_obs,
    stride_oh,
    stride_buf_bs,
    stride_buf_h,
    kv_group_num: tl.constexpr,
    BLOCK_DMODEL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    cur_seq = tl.program_id(0)
    cur_head = tl.program_id(1)
    cur_block_m = tl.program_id(2)
    cur_kv_head = cur_head // kv_group_num
    extend_start = tl.load(qo_indptr + cur_seq)
    extend_len = tl.load(qo_indptr + cur_seq + 1) - extend_start
    kv_start = tl.load(kv_indptr + cur_seq)
    prefix_len = tl.load(kv_indptr + cur_seq + 1) - kv_start
    if cur_block_m * BLOCK_M >= extend_len:
        return
    offs_d = tl.arange(0, BLOCK_DMODEL)
    offs_m = cur_block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < extend_len
    offs_q = (extend_start + offs_m[:, None]) * stride_qbs + cur_head * stride_qh + offs_d[None, :]
    q = tl.load(Q_Extend + offs_q, mask=mask_m[:, None], other=0.0)

    acc = tl.zeros([BLOCK_M, BLOCK_DMODEL], dtype=tl.float32)
    deno = tl.zeros([BLOCK_M], dtype=tl.float32)
    e_max = tl.full([BLOCK_M], -1.0e30, dtype=tl.float32)
    for start_n in range(0, prefix_len, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < prefix_len
        loc = tl.load(kv_indices + kv_start + offs_n, mask=mask_n, other=0).to(tl.int64)
        offs_buf_k = loc[None, :] * stride_buf_bs + cur_kv_head * stride_buf_h + offs_d[:, None]
        k = tl.load(K_Buffer + offs_buf_k, mask=mask_n[None, :], other=0.0)
        offs_buf_v = loc[:, None] * stride_buf_bs + cur_kv_head * stride_buf_h + offs_d[None, :]
        v = tl.load(V_Buffer + offs_buf_v, mask=mask_n[:, None], other=0.0)
        acc, deno, e_max = _update(q, k, v, mask_n[None, :], sm_scale, acc, deno, e_max)

    for start_n in range(0, tl.minimum(extend_len, (cur_block_m + 1) * BLOCK_M), BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < extend_len
        base = (extend_start + offs_n) * stride_kbs + cur_kv_head * stride_kh
        k = tl.load(K_Extend + base[None, :] + offs_d[:, None], mask=mask_n[None, :], other=0.0)
        v = tl.load(V_Extend + base[:, None] + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        causal = (offs_m[:, None] >= offs_n[None, :]) & mask_n[None, :]
        acc, deno, e_max = _update(q, k, v, causal, sm_scale, acc, deno, e_max)

    offs_o = (extend_start + offs_m[:, None]) * stride_obs + cur_head * stride_oh + offs_d[None, :]
    o = (acc / deno[:, None]).to(O_Extend.dtype.element_ty)
    tl.store(O_Extend + offs_o, o, mask=mask_m[:, None])


SPACE: Space = {
    "kwargs": {"BLOCK_M": [16, 32, 64, 128], "BLOCK_N": [16, 64, 128]},
    "num_warps": [4, 8],
    "num_stages": [1, 2, 3],
}

Shape = tuple[int, int, int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    batch, q_heads, kv_heads, extend, prefix, dim = tiny if small else shape
    q, k, v, buffer_k, buffer_v = (
        normal((batch * n, heads, dim), device, seed=seed)
        for seed, (n, heads) in enumerate(
            [
                (extend, q_heads),
                (extend, kv_heads),
                (extend, kv_heads),
                (prefix, kv_heads),
                (prefix, kv_heads),
            ]
        )
    )
    out = unset((batch * extend, q_heads, dim), device)
    # Lengths differ between requests; the totals are what the shape says.
    cuts = torch.arange(batch + 1, device=device)
    shifts = integers(0, 5, (batch + 1,), device, dtype=torch.int64, seed=6) - 2
    inner = (cuts > 0) & (cuts < batch)
    indptrs = [(cuts * n + inner * shifts * (n // 8)).int() for n in (extend, prefix)]
    indices = permutation(batch * prefix, device, seed=7).int()
    longest = extend + extend // 8 * 4
    strides = (*q.stride()[:2], *k.stride()[:2], *out.stride()[:2], *buffer_k.stride()[:2])
    return {
        "args": (q, k, v, out, buffer_k, buffer_v, *indptrs, indices, dim**-0.5, longest, *strides),
        "kwargs": {"kv_group_num": q_heads // kv_heads, "BLOCK_DMODEL": dim},
        "grid": lambda meta: (batch, q_heads, triton.cdiv(longest, meta["BLOCK_M"])),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, out, buffer_k, buffer_v, qo_indptr, kv_indptr, indices, scale = data["args"][:10]
    group = data["kwargs"]["kv_group_num"]
    expected = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    for b in range(len(qo_indptr) - 1):
        mine = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        cached = indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])].long()
        keys = torch.cat([buffer_k[cached], k[mine]]).float()
        values = torch.cat([buffer_v[cached], v[mine]]).float()
        new = mine.stop - mine.start
        hidden = torch.ones(new, len(keys), dtype=torch.bool, device=out.device).triu(len(cached) + 1)
        for head in range(q.shape[1]):
            scores = q[mine, head].float() @ keys[:, head // group].T * scale
            expected[mine, head] = scores.masked_fill(hidden, -1e30).softmax(-1) @ values[:, head // group]
    return (expected,)


CASES = [
    Case(
        name="srv_extend_attention/" + "x".join(map(str, shape)),
        kernel=srv_extend_attention,
        key=("max_extend", "stride_qbs", "stride_buf_bs"),
        space=SPACE,
        make=partial(_make, shape, (2, 2 * shape[1] // shape[2], 2, 18, 24, shape[5])),
        reference=_reference,
        tolerance=(1e-2, 2e-2),
        flops=4.0 * shape[0] * shape[1] * shape[3] * (shape[4] + shape[3] / 2) * shape[5],
        bytes=moved(partial(_make, shape, shape)),
    )
    for shape in [
        (16, 32, 8, 32, 4096, 128),
        (8, 32, 8, 128, 4096, 128),
        (4, 32, 8, 1024, 2048, 128),
        (2, 32, 8, 4096, 1024, 128),
        (32, 16, 4, 64, 1024, 128),
        (1, 64, 16, 2048, 8192, 128),
        (8, 64, 16, 256, 512, 128),
        (16, 16, 4, 512, 256, 128),
    ]
]
