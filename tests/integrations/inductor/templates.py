"""Flex attention as Inductor renders it, sizes and strides as constants.

Only what TTIR depends on is kept: the body of the template with its loads, dots, masks and stores, and
the suffix that writes the output.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def flex_attention(
    Q,
    K,
    V,
    KV_NUM_BLKS,
    KV_IDX,
    out,
    HQ: tl.constexpr,
    Q_LEN: tl.constexpr,
    KV_LEN: tl.constexpr,
    QK_HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    GQA_SHARED_HEADS: tl.constexpr,
    SM_SCALE: tl.constexpr,
    SPARSE_Q_BLOCK_SIZE: tl.constexpr,
    SPARSE_KV_BLOCK_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    q_start = tl.program_id(0).to(tl.int32)
    off_zq = tl.program_id(1).to(tl.int32)
    off_hq = tl.program_id(2).to(tl.int32)
    off_hkv = off_hq // GQA_SHARED_HEADS
    Q = Q + off_zq * HQ * Q_LEN * QK_HEAD_DIM + off_hq * Q_LEN * QK_HEAD_DIM
    K = K + off_zq * (HQ // GQA_SHARED_HEADS) * KV_LEN * QK_HEAD_DIM + off_hkv * KV_LEN * QK_HEAD_DIM
    V = V + off_zq * (HQ // GQA_SHARED_HEADS) * KV_LEN * V_HEAD_DIM + off_hkv * KV_LEN * V_HEAD_DIM
    SPARSE_KV_MULTIPLE: tl.constexpr = SPARSE_KV_BLOCK_SIZE // BLOCK_N
    m_i = tl.zeros([BLOCK_M], dtype=tl.float32) - float("inf")
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, V_HEAD_DIM], dtype=tl.float32)
    offs_m = q_start * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, QK_HEAD_DIM)
    offs_v = tl.arange(0, V_HEAD_DIM)
    q = tl.load(Q + offs_m[:, None] * QK_HEAD_DIM + offs_k[None, :])
    kv_start = tl.load(KV_IDX) * SPARSE_KV_BLOCK_SIZE
    kv_num_blocks = tl.load(KV_NUM_BLKS + q_start)
    block_n_end = tl.minimum(kv_num_blocks * SPARSE_KV_MULTIPLE, tl.maximum(tl.cdiv(KV_LEN, BLOCK_N), 1))
    offs_n = kv_start + tl.arange(0, BLOCK_N)
    kv_offset = 0
    for start_n in range(0, block_n_end):
        kv_base_offset = kv_start + kv_offset
        offs_n_load = kv_base_offset + tl.arange(0, BLOCK_N)
        k = tl.load(K + offs_n_load[:, None] * QK_HEAD_DIM + offs_k[None, :])
        k = tl.trans(k)
        qk = tl.dot(q, k)
        qk *= SM_SCALE
        if MASKED:
            qk = tl.where(offs_m[:, None] >= offs_n[None, :], qk, float("-inf"))
        qk *= 1.44269504
        m_ij = tl.maximum(m_i, tl.max(qk, 1))
        masked_out_rows = m_ij == float("-inf")
        m_ij_masked = tl.where(masked_out_rows, 0, m_ij)
        alpha = tl.math.exp2(m_i - m_ij_masked)
        p = tl.math.exp2(qk - m_ij_masked[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(V + offs_n_load[:, None] * V_HEAD_DIM + offs_v[None, :])
        acc = tl.dot(p.to(Q.dtype.element_ty), v, acc)
        m_i = m_ij
        cur_block_idx = start_n // SPARSE_KV_MULTIPLE
        cur_block = tl.load(KV_IDX + cur_block_idx, eviction_policy="evict_last")
        next_block = tl.load(
            KV_IDX + cur_block_idx + 1, eviction_policy="evict_last", mask=cur_block_idx + 1 < kv_num_blocks
        )
        needs_jump = (start_n + 1) % SPARSE_KV_MULTIPLE == 0
        jump_to_block = (next_block - cur_block) * SPARSE_KV_BLOCK_SIZE - (SPARSE_KV_MULTIPLE - 1) * BLOCK_N
        offset = jump_to_block * needs_jump + (1 - needs_jump) * BLOCK_N
        offs_n = offs_n + offset
        kv_offset += offset
    l_i = tl.where(l_i == 0.0, 1, l_i)
    acc = acc / l_i[:, None]
    idx_m = offs_m[:, None]
    idx_d = offs_v[None, :]
    mask = (idx_m < Q_LEN) & (idx_d < V_HEAD_DIM)
    xindex = idx_d + V_HEAD_DIM * idx_m + Q_LEN * V_HEAD_DIM * (off_hq + HQ * off_zq)
    tl.store(out + tl.broadcast_to(xindex, [BLOCK_M, V_HEAD_DIM]), acc, mask)
