"""Products as Inductor renders its templates (torch 2.13): sizes and strides are constants in the text.

Only what TTIR depends on is kept: the body of each template with its loads, dots, masks and stores, and
the suffix that writes the output.
"""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

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
def mm(
    A,
    B,
    C,
    bias,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    stride_am: tl.constexpr,
    stride_ak: tl.constexpr,
    stride_bk: tl.constexpr,
    stride_bn: tl.constexpr,
    BIAS: tl.constexpr,
    ACC_TYPE: tl.constexpr,
    EVEN_K: tl.constexpr,
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
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_TYPE)
    for k_idx in range(0, tl.cdiv(K, BLOCK_K)):
        a_k_idx_vals = offs_k[None, :] + (k_idx * BLOCK_K)
        b_k_idx_vals = offs_k[:, None] + (k_idx * BLOCK_K)
        if EVEN_K:
            a = tl.load(A + (stride_ak * a_k_idx_vals + stride_am * offs_a_m[:, None]))
            b = tl.load(B + (stride_bn * offs_b_n[None, :] + stride_bk * b_k_idx_vals))
        else:
            a_mask = offs_k[None, :] < (K - k_idx * BLOCK_K)
            b_mask = offs_k[:, None] < (K - k_idx * BLOCK_K)
            a = tl.load(A + (stride_ak * a_k_idx_vals + stride_am * offs_a_m[:, None]), a_mask, other=0.0)
            b = tl.load(B + (stride_bn * offs_b_n[None, :] + stride_bk * b_k_idx_vals), b_mask, other=0.0)
        acc += tl.dot(a, b.to(a.dtype), out_dtype=ACC_TYPE)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    mask = (idx_m < M) & (idx_n < N)
    xindex = idx_n + N * idx_m
    if BIAS:
        tmp0 = tl.load(
            bias + tl.broadcast_to(idx_n, [BLOCK_M, BLOCK_N]), mask, eviction_policy="evict_last"
        ).to(tl.float32)
        acc = acc + tmp0
    tl.store(C + tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N]), acc, mask)


@triton.jit
def bmm(
    A,
    B,
    C,
    BATCH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    stride_am: tl.constexpr,
    stride_ak: tl.constexpr,
    stride_bk: tl.constexpr,
    stride_bn: tl.constexpr,
    ACC_TYPE: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int32)
    pid_m, pid_n = _tile(pid, M, N, GROUP_M, BLOCK_M, BLOCK_N)
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ram = rm % M
    rbn = rn % N
    rk = tl.arange(0, BLOCK_K)
    idx_q = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)).to(tl.int32)
    idx_q_clamped = tl.minimum(idx_q, BATCH - 1)
    A = A + (ram[:, None] * stride_am + rk[None, :] * stride_ak + idx_q_clamped * M * K)
    B = B + (rk[:, None] * stride_bk + rbn[None, :] * stride_bn + idx_q_clamped * K * N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_TYPE)
    for k in range(K, 0, -BLOCK_K):
        if EVEN_K:
            a = tl.load(A)
            b = tl.load(B)
        else:
            a = tl.load(A, mask=rk[None, :] < k, other=0.0)
            b = tl.load(B, mask=rk[:, None] < k, other=0.0)
        acc += tl.dot(a, b)
        A += BLOCK_K * stride_ak
        B += BLOCK_K * stride_bk
    rm = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    idx_m = rm[:, None]
    idx_n = rn[None, :]
    mask = (idx_m < M) & (idx_n < N) & (idx_q < BATCH)
    xindex = idx_n + N * idx_m + M * N * idx_q
    tl.store(C + tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N]), acc, mask)


@triton.jit
def mm_plus_mm(
    A,
    B,
    C,
    D,
    out,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    stride_am: tl.constexpr,
    stride_ak: tl.constexpr,
    stride_bk: tl.constexpr,
    stride_bn: tl.constexpr,
    ACC_TYPE: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int32)
    pid_m, pid_n = _tile(pid, M, N, GROUP_M, BLOCK_M, BLOCK_N)
    ram = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    rbn = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    rk = tl.arange(0, BLOCK_K)
    A = A + (ram[:, None] * stride_am + rk[None, :] * stride_ak)
    B = B + (rk[:, None] * stride_bk + rbn[None, :] * stride_bn)
    C = C + (ram[:, None] * stride_am + rk[None, :] * stride_ak)
    D = D + (rk[:, None] * stride_bk + rbn[None, :] * stride_bn)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_TYPE)
    for k1 in range(K, 0, -BLOCK_K):
        if EVEN_K:
            a = tl.load(A)
            b = tl.load(B)
        else:
            a = tl.load(A, mask=rk[None, :] < k1, other=0.0)
            b = tl.load(B, mask=rk[:, None] < k1, other=0.0)
        acc += tl.dot(a, b)
        A += BLOCK_K * stride_ak
        B += BLOCK_K * stride_bk
    for k2 in range(K, 0, -BLOCK_K):
        if EVEN_K:
            c = tl.load(C)
            d = tl.load(D)
        else:
            c = tl.load(C, mask=rk[None, :] < k2, other=0.0)
            d = tl.load(D, mask=rk[:, None] < k2, other=0.0)
        acc += tl.dot(c, d)
        C += BLOCK_K * stride_ak
        D += BLOCK_K * stride_bk
    idx_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    idx_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (idx_m < M) & (idx_n < N)
    tl.store(out + tl.broadcast_to(idx_n + N * idx_m, [BLOCK_M, BLOCK_N]), acc, mask)


@triton.jit
def mm_persistent_tma(
    A,
    B,
    C,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    A_ROW_MAJOR: tl.constexpr,
    B_ROW_MAJOR: tl.constexpr,
    ACC_TYPE: tl.constexpr,
    NUM_SMS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    start_pid = tl.program_id(0).to(tl.int32)
    grid_m = tl.cdiv(M, BLOCK_M)
    grid_n = tl.cdiv(N, BLOCK_N)
    num_tiles = grid_m * grid_n
    width = GROUP_M * grid_n
    a_desc = tl.make_tensor_descriptor(
        base=A,
        shape=[M, K] if A_ROW_MAJOR else [K, M],
        strides=[K, 1] if A_ROW_MAJOR else [M, 1],
        block_shape=[BLOCK_M, BLOCK_K] if A_ROW_MAJOR else [BLOCK_K, BLOCK_M],
    )
    b_desc = tl.make_tensor_descriptor(
        base=B,
        shape=[K, N] if B_ROW_MAJOR else [N, K],
        strides=[N, 1] if B_ROW_MAJOR else [K, 1],
        block_shape=[BLOCK_K, BLOCK_N] if B_ROW_MAJOR else [BLOCK_N, BLOCK_K],
    )
    for tile_id in tl.range(start_pid, num_tiles, NUM_SMS):
        group_id = tile_id // width
        group_size = tl.minimum(grid_m - group_id * GROUP_M, GROUP_M)
        pid_m = group_id * GROUP_M + (tile_id % group_size)
        pid_n = (tile_id % width) // group_size
        rm = pid_m * BLOCK_M
        rn = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=ACC_TYPE)
        for rk in tl.range(0, K, BLOCK_K):
            a = tl.load_tensor_descriptor(a_desc, [rm, rk] if A_ROW_MAJOR else [rk, rm])
            b = tl.load_tensor_descriptor(b_desc, [rk, rn] if B_ROW_MAJOR else [rn, rk])
            acc += tl.dot(a if A_ROW_MAJOR else a.T, b if B_ROW_MAJOR else b.T)
        xindex_m = rm + tl.arange(0, BLOCK_M)
        xindex_n = rn + tl.arange(0, BLOCK_N)
        idx_m = xindex_m[:, None]
        idx_n = xindex_n[None, :]
        mask = (idx_m < M) & (idx_n < N)
        tl.store(C + tl.broadcast_to(idx_n + N * idx_m, [BLOCK_M, BLOCK_N]), acc, mask)
