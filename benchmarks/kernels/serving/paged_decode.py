"""Decode attention over pages, the keys of a sequence split over programs that each leave an LSE."""

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
def srv_paged_decode(
    Q,
    K_Buffer,
    V_Buffer,
    sm_scale,
    Block_Table,
    B_Seqlen,
    Att_Out,
    Att_Lse,
    num_kv_splits,
    q_heads,
    stride_bt,
    stride_qb,
    stride_qh,
    stride_kp,
    stride_ks,
    stride_kh,
    stride_vp,
    stride_vs,
    stride_vh,
    stride_ob,
    stride_oh,
    stride_os,
    stride_lb,
    stride_lh,
    kv_group_num: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    cur_batch = tl.program_id(0)
    cur_head_block = tl.program_id(1)
    split_kv_id = tl.program_id(2)
    VALID_H: tl.constexpr = kv_group_num if kv_group_num < BLOCK_H else BLOCK_H
    cur_kv_head = cur_head_block * VALID_H // kv_group_num
    cur_head = cur_head_block * VALID_H + tl.arange(0, BLOCK_H)
    mask_h = (cur_head < (cur_head_block + 1) * VALID_H) & (cur_head < q_heads)
    offs_d = tl.arange(0, BLOCK_D)
    cur_batch_seq_len = tl.load(B_Seqlen + cur_batch)
    q = tl.load(
        Q + cur_batch * stride_qb + cur_head[:, None] * stride_qh + offs_d[None, :],
        mask=mask_h[:, None],
        other=0.0,
    )
    kv_len_per_split = tl.cdiv(cur_batch_seq_len, num_kv_splits)
    split_start = kv_len_per_split * split_kv_id
    split_end = tl.minimum(split_start + kv_len_per_split, cur_batch_seq_len)

    e_max = tl.full([BLOCK_H], -1.0e30, dtype=tl.float32)
    e_sum = tl.zeros([BLOCK_H], dtype=tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    for start_n in range(split_start, split_end, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < split_end
        page = tl.load(Block_Table + cur_batch * stride_bt + offs_n // PAGE_SIZE, mask=mask_n, other=0)
        page = page.to(tl.int64)
        slot = offs_n % PAGE_SIZE
        offs_k = page[None, :] * stride_kp + slot[None, :] * stride_ks + cur_kv_head * stride_kh
        k = tl.load(K_Buffer + offs_k + offs_d[:, None], mask=mask_n[None, :], other=0.0)
        qk = tl.dot(q, k) * sm_scale
        qk = tl.where(mask_h[:, None] & mask_n[None, :], qk, -1.0e30)
        offs_v = page[:, None] * stride_vp + slot[:, None] * stride_vs + cur_kv_head * stride_vh
        v = tl.load(V_Buffer + offs_v + offs_d[None, :], mask=mask_n[:, None], other=0.0)
        n_e_max = tl.maximum(tl.max(qk, 1), e_max)
        re_scale = tl.exp(e_max - n_e_max)
        p = tl.exp(qk - n_e_max[:, None])
        acc = acc * re_scale[:, None] + tl.dot(p.to(v.dtype), v)
        e_sum = e_sum * re_scale + tl.sum(p, 1)
        e_max = n_e_max

    # A split without keys leaves zeros and a log-sum-exp that no merge will notice.
    empty = e_sum == 0.0
    e_sum = tl.where(empty, 1.0, e_sum)
    out = Att_Out + cur_batch * stride_ob + cur_head[:, None] * stride_oh + split_kv_id * stride_os
    tl.store(out + offs_d[None, :], acc / e_sum[:, None], mask=mask_h[:, None])
    lse = Att_Lse + cur_batch * stride_lb + cur_head * stride_lh + split_kv_id
    tl.store(lse, e_max + tl.log(e_sum), mask=mask_h)


SPACE: Space = {
    "kwargs": {"BLOCK_N": [16, 32, 64, 128], "BLOCK_H": [16, 32]},
    "num_warps": [2, 4, 8],
    "num_stages": [1, 2, 4],
    "where": lambda c: c["BLOCK_H"] == 16 or c["num_warps"] > 2,
}

Shape = tuple[int, int, int, int, int]
PAGE, DIM = 16, 128


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    batch, q_heads, kv_heads, length, splits = tiny if small else shape
    pages = triton.cdiv(length, PAGE)
    q = normal((batch, q_heads, DIM), device, seed=1)
    k = normal((batch * pages, PAGE, kv_heads, DIM), device, seed=2)
    v = normal((batch * pages, PAGE, kv_heads, DIM), device, seed=3)
    table = permutation(batch * pages, device, seed=4).view(batch, pages).int()
    # Requests of one batch are at different points of their answers.
    lengths = integers(length // 2, length + 1, (batch,), device, dtype=torch.int32, seed=5)
    out = unset((batch, q_heads, splits, DIM), device, dtype=torch.float32)
    lse = unset((batch, q_heads, splits), device, dtype=torch.float32)
    strides = (table.stride(0), *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3])
    group = q_heads // kv_heads
    return {
        "args": (q, k, v, DIM**-0.5, table, lengths, out, lse, splits, q_heads, *strides, *lse.stride()[:2]),
        "kwargs": {"kv_group_num": group, "PAGE_SIZE": PAGE, "BLOCK_D": DIM},
        "grid": lambda meta: (batch, triton.cdiv(q_heads, min(meta["BLOCK_H"], group)), splits),
        "outputs": (out, lse),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, scale, table, lengths, out, lse, splits = data["args"][:9]
    group = data["kwargs"]["kv_group_num"]
    want_out, want_lse = torch.zeros_like(out), torch.full_like(lse, -1e30)
    for b in range(q.shape[0]):
        length = int(lengths[b])
        keys = k[table[b].long()].flatten(0, 1)[:length].float()
        values = v[table[b].long()].flatten(0, 1)[:length].float()
        scores = torch.einsum("hgd,nhd->hgn", q[b].float().view(-1, group, DIM), keys) * scale
        size = triton.cdiv(length, splits)
        for s in range(triton.cdiv(length, size)):
            part = scores[..., s * size : (s + 1) * size]
            mixed = torch.einsum("hgn,nhd->hgd", part.softmax(-1), values[s * size : (s + 1) * size])
            want_out[b, :, s], want_lse[b, :, s] = mixed.reshape(-1, DIM), part.logsumexp(-1).flatten()
    return want_out, want_lse


CASES = [
    Case(
        name="srv_paged_decode/" + "x".join(map(str, shape)),
        kernel=srv_paged_decode,
        key=("q_heads", "num_kv_splits", "stride_bt"),
        space=SPACE,
        make=partial(_make, shape, (2, 2 * shape[1] // shape[2], 2, 70, 3)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        # Requests are three quarters of the longest on average.
        flops=4.0 * shape[0] * shape[1] * DIM * shape[3] * 0.75,
        bytes=moved(partial(_make, shape, shape)),
    )
    for shape in [
        (16, 32, 8, 4096, 16),
        (64, 32, 8, 2048, 16),
        (128, 32, 8, 1024, 16),
        (16, 64, 8, 8192, 16),
        (64, 64, 8, 1024, 16),
        (32, 16, 2, 8192, 32),
        (16, 32, 1, 32768, 32),
        (64, 32, 1, 4096, 16),
        (16, 64, 2, 16384, 16),
    ]
]
