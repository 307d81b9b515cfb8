"""A kernel of our own with the parameters that the servers' `fused_moe_kernel` have, as plain as it can be."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fused_moe_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    topk_weights_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_tokens_post_padded_ptr,
    N,
    K,
    EM,
    num_valid_tokens,
    stride_am,
    stride_ak,
    stride_be,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    naive_block_assignment: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    MUL_ROUTED_WEIGHT: tl.constexpr,
    top_k: tl.constexpr,
    compute_type: tl.constexpr,
    even_Ks: tl.constexpr,
    HAS_BIAS: tl.constexpr = False,
):
    """c[pair] = b[expert of pair] a[pair // top_k]; programs go through columns first."""
    blocks_n = tl.cdiv(N, BLOCK_SIZE_N)
    block, column = tl.program_id(0) // blocks_n, tl.program_id(0) % blocks_n
    if block * BLOCK_SIZE_M >= tl.load(num_tokens_post_padded_ptr):
        return
    rows = tl.arange(0, BLOCK_SIZE_M)
    if naive_block_assignment:
        pairs = tl.where(rows == 0, block, num_valid_tokens)
    else:
        pairs = tl.load(sorted_token_ids_ptr + block * BLOCK_SIZE_M + rows)
    is_real = pairs < num_valid_tokens
    columns = column * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    expert = b_ptr + tl.load(expert_ids_ptr + block).to(tl.int64) * stride_be
    total = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_SIZE_K):
        inner = start + tl.arange(0, BLOCK_SIZE_K)
        a_at = a_ptr + (pairs // top_k)[:, None] * stride_am + inner[None, :] * stride_ak
        b_at = expert + inner[:, None] * stride_bk + columns[None, :] * stride_bn
        if even_Ks:
            a = tl.load(a_at, mask=is_real[:, None], other=0.0)
            b = tl.load(b_at, mask=columns[None, :] < N, other=0.0)
        else:
            a = tl.load(a_at, mask=is_real[:, None] & (inner[None, :] < K), other=0.0)
            b = tl.load(b_at, mask=(columns[None, :] < N) & (inner[:, None] < K), other=0.0)
        total += tl.dot(a, b)
    if MUL_ROUTED_WEIGHT:
        total *= tl.load(topk_weights_ptr + pairs, mask=is_real, other=0.0)[:, None]
    at = c_ptr + pairs[:, None] * stride_cm + columns[None, :] * stride_cn
    tl.store(at, total.to(compute_type), mask=is_real[:, None] & (columns[None, :] < N))
