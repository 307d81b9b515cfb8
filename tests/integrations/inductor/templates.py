"""Templates as Inductor renders them, sizes and strides as constants: a product of mixed dtypes, flex attention.

Only what TTIR depends on is kept: the body of each template with its loads, dots, masks and stores, and
the suffix that writes the output.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(pid, M, N, GROUP_M, BLOCK_M, BLOCK_N):
    grid_m = (M + BLOCK_M - 1) // BLOCK_M
    grid_n = (N + BLOCK_N - 1) // BLOCK_N
    width = GROUP_M * grid_n
    group_id = pid // width
    group_size = tl.minimum(grid_m - group_id * GROUP_M, GROUP_M)
    pid_m = group_id * GROUP_M + (pid % group_size)
    pid_n = (pid % width) // group_size
    return pid_m, pid_n


@triton.jit
def mixed_mm(
    A,
    B,
    C,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int32)
    pid_m, pid_n = _tile(pid, M, N, GROUP_M, BLOCK_M, BLOCK_N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_a_m = rm % M
    offs_b_n = rn % N
    offs_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k_idx in range(0, tl.cdiv(K, BLOCK_K)):
        a_k_idx_vals = offs_k[None, :] + (k_idx * BLOCK_K)
        b_k_idx_vals = offs_k[:, None] + (k_idx * BLOCK_K)
        a = tl.load(A + (a_k_idx_vals + K * offs_a_m[:, None]))
        b = tl.load(B + (offs_b_n[None, :] + N * b_k_idx_vals))
        acc += tl.dot(a, b.to(a.dtype), out_dtype=tl.float32)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    mask = (idx_m < M) & (idx_n < N)
    tl.store(C + tl.broadcast_to(idx_n + N * idx_m, [BLOCK_M, BLOCK_N]), acc, mask)


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
