"""Mixture-of-experts grouped GEMM: token rows are gathered through ids that are sorted by expert."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.serving._work import align_blocks, moved, routing

FAMILY, HAND = "gemm", "serving"


@triton.heuristics({"even_Ks": lambda args: args["K"] % args["BLOCK_SIZE_K"] == 0})
@triton.jit
def srv_fused_moe(
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
    PADDED_TO: tl.constexpr,
    top_k: tl.constexpr,
    MUL_ROUTED_WEIGHT: tl.constexpr,
    BLOCK_SIZE_M: tl.constexpr,
    BLOCK_SIZE_N: tl.constexpr,
    BLOCK_SIZE_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    even_Ks: tl.constexpr,
):
    pid = tl.program_id(axis=0)
    num_pid_m = tl.cdiv(EM, BLOCK_SIZE_M)
    num_pid_n = tl.cdiv(N, BLOCK_SIZE_N)
    num_pid_in_group = GROUP_SIZE_M * num_pid_n
    group_id = pid // num_pid_in_group
    first_pid_m = group_id * GROUP_SIZE_M
    group_size_m = min(num_pid_m - first_pid_m, GROUP_SIZE_M)
    pid_m = first_pid_m + ((pid % num_pid_in_group) % group_size_m)
    pid_n = (pid % num_pid_in_group) // group_size_m

    if pid_m * BLOCK_SIZE_M >= tl.load(num_tokens_post_padded_ptr):
        return
    # Padding follows an expert's rows: a tile that begins with it holds nothing else.
    if tl.load(sorted_token_ids_ptr + pid_m * BLOCK_SIZE_M) >= num_valid_tokens:
        return
    offs_token = tl.load(sorted_token_ids_ptr + pid_m * BLOCK_SIZE_M + tl.arange(0, BLOCK_SIZE_M))
    token_mask = offs_token < num_valid_tokens
    off_expert = tl.load(expert_ids_ptr + pid_m * BLOCK_SIZE_M // PADDED_TO).to(tl.int64)

    offs_bn = (pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)) % N
    offs_k = tl.arange(0, BLOCK_SIZE_K)
    a_ptrs = a_ptr + (offs_token[:, None] // top_k * stride_am + offs_k[None, :] * stride_ak)
    b_ptrs = b_ptr + off_expert * stride_be + (offs_k[:, None] * stride_bk + offs_bn[None, :] * stride_bn)
    accumulator = tl.zeros((BLOCK_SIZE_M, BLOCK_SIZE_N), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BLOCK_SIZE_K)):
        if even_Ks:
            a = tl.load(a_ptrs, mask=token_mask[:, None], other=0.0)
            b = tl.load(b_ptrs)
        else:
            k_mask = offs_k < K - k * BLOCK_SIZE_K
            a = tl.load(a_ptrs, mask=token_mask[:, None] & k_mask[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=k_mask[:, None], other=0.0)
        accumulator += tl.dot(a, b)
        a_ptrs += BLOCK_SIZE_K * stride_ak
        b_ptrs += BLOCK_SIZE_K * stride_bk
    if MUL_ROUTED_WEIGHT:
        moe_weight = tl.load(topk_weights_ptr + offs_token, mask=token_mask, other=0.0)
        accumulator = accumulator * moe_weight[:, None]
    offs_cn = pid_n * BLOCK_SIZE_N + tl.arange(0, BLOCK_SIZE_N)
    c_ptrs = c_ptr + stride_cm * offs_token[:, None] + stride_cn * offs_cn[None, :]
    c_mask = token_mask[:, None] & (offs_cn[None, :] < N)
    tl.store(c_ptrs, accumulator.to(c_ptr.dtype.element_ty), mask=c_mask)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE_M": [16, 32, 64, 128],
        "BLOCK_SIZE_N": [64, 128],
        "BLOCK_SIZE_K": [64, 128],
        "GROUP_SIZE_M": [1, 16],
    },
    "num_warps": [4, 8],
    "num_stages": [3],
}

Shape = tuple[int, int, int, int, int]
PADDED_TO = 128


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    tokens, experts, n, k, top_k = tiny if small else shape
    a = normal((tokens, k), device, seed=1)
    b = normal((experts, n, k), device, seed=2, scale=k**-0.5)
    weights = normal((tokens * top_k,), device, dtype=torch.float32, seed=3).abs()
    chosen = routing(tokens, experts, top_k, device, seed=4)
    ids, expert_ids, padded = align_blocks(chosen, experts, PADDED_TO)
    c = unset((tokens * top_k, n), device)
    strides = (a.stride(0), a.stride(1), b.stride(0), b.stride(2), b.stride(1), c.stride(0), c.stride(1))
    return {
        "args": (a, b, c, weights, ids, expert_ids, padded, n, k, ids.numel(), tokens * top_k, *strides),
        "kwargs": {"PADDED_TO": PADDED_TO, "top_k": top_k, "MUL_ROUTED_WEIGHT": True},
        "grid": lambda meta: (
            triton.cdiv(ids.numel(), meta["BLOCK_SIZE_M"]) * triton.cdiv(n, meta["BLOCK_SIZE_N"]),
        ),
        "outputs": (c,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    a, b, c, weights, ids, expert_ids = data["args"][:6]
    top_k = data["kwargs"]["top_k"]
    expected = torch.empty(c.shape, dtype=torch.float32, device=c.device)
    owner = expert_ids.repeat_interleave(PADDED_TO)
    for expert in range(b.shape[0]):
        rows = ids[(owner == expert) & (ids < c.shape[0])].long()
        expected[rows] = a[rows // top_k].float() @ b[expert].float().T
    return (expected * weights[:, None],)


CASES = [
    Case(
        name="srv_fused_moe/" + "x".join(map(str, shape)),
        kernel=srv_fused_moe,
        key=("N", "K", "EM"),
        space=SPACE,
        make=partial(_make, shape, (9, 4, 70, 90, shape[4])),
        reference=_reference,
        tolerance=(5e-2, 2e-2),
        flops=2.0 * shape[0] * shape[4] * shape[2] * shape[3],
        bytes=moved(partial(_make, shape, shape)),
    )
    for shape in [
        (64, 8, 14336, 4096, 2),
        (1024, 8, 14336, 4096, 2),
        (4096, 8, 4096, 4096, 2),
        (16, 16, 6400, 4096, 2),
        (256, 64, 2816, 2048, 8),
        (2048, 64, 2816, 2048, 8),
        (32, 128, 1536, 2048, 8),
        (512, 128, 1536, 4096, 8),
        (4096, 128, 2048, 768, 8),
    ]
]
