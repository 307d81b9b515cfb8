"""Router of a mixture of experts: the best experts of each token and their softmax weights."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.serving._work import moved

FAMILY, HAND = "sort", "serving"


@triton.jit
def srv_moe_topk_softmax(
    gating_ptr,
    topk_weights_ptr,
    topk_ids_ptr,
    num_tokens,
    num_experts,
    stride_gt,
    stride_wt,
    stride_it,
    top_k: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PACK_INDEX: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    expert = tl.arange(0, BLOCK_E)
    mask_t = token < num_tokens
    mask_e = expert < num_experts
    logits = tl.load(
        gating_ptr + token[:, None] * stride_gt + expert[None, :],
        mask=mask_t[:, None] & mask_e[None, :],
        other=-1.0e30,
    ).to(tl.float32)
    row_max = tl.max(logits, axis=1)
    total = tl.sum(tl.where(mask_e[None, :], tl.exp(logits - row_max[:, None]), 0.0), axis=1)
    if PACK_INDEX:
        # One reduction finds value and index: ordered bits of the value above the index.
        bits = logits.to(tl.int32, bitcast=True)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        packed = (bits.to(tl.int64) << 32) | expert[None, :].to(tl.int64)
    chosen_sum = tl.zeros([BLOCK_TOKENS], dtype=tl.float32)
    for k in tl.static_range(top_k):
        if PACK_INDEX:
            best = tl.max(packed, axis=1)
            index = (best & 0xFFFFFFFF).to(tl.int32)
            found = (best >> 32).to(tl.int32)
            value = tl.where(found < 0, found ^ 0x7FFFFFFF, found).to(tl.float32, bitcast=True)
            packed = tl.where(expert[None, :] == index[:, None], -0x7FFFFFFFFFFFFFFF, packed)
        else:
            value, index = tl.max(logits, axis=1, return_indices=True)
            logits = tl.where(expert[None, :] == index[:, None], -2.0e30, logits)
        weight = tl.exp(value - row_max) / total
        chosen_sum += weight
        tl.store(topk_ids_ptr + token * stride_it + k, index.to(tl.int32), mask=mask_t)
        if not RENORMALIZE:
            tl.store(topk_weights_ptr + token * stride_wt + k, weight, mask=mask_t)
        elif k == 0:
            kept = tl.where(tl.arange(0, top_k)[None, :] == 0, weight[:, None], 0.0)
        else:
            kept = tl.where(tl.arange(0, top_k)[None, :] == k, weight[:, None], kept)
    if RENORMALIZE:
        w_ptrs = topk_weights_ptr + token[:, None] * stride_wt + tl.arange(0, top_k)[None, :]
        tl.store(w_ptrs, kept / chosen_sum[:, None], mask=mask_t[:, None])


SPACE: Space = {
    "kwargs": {"BLOCK_TOKENS": [1, 2, 4, 8, 16, 32], "PACK_INDEX": [False, True]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_TOKENS"] <= 16 * c["num_warps"],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    tokens, experts, top_k = tiny if small else shape
    # Ranks instead of the noise itself: no two experts tie.
    noise = normal((tokens, experts), device, dtype=torch.float32, seed=1)
    logits = (noise.argsort(-1) - experts / 2) * 0.05
    ids = unset((tokens, top_k), device, dtype=torch.int32)
    weights = unset((tokens, top_k), device, dtype=torch.float32)
    strides = (logits.stride(0), weights.stride(0), ids.stride(0))
    return {
        "args": (logits, weights, ids, tokens, experts, *strides),
        "kwargs": {"top_k": top_k, "RENORMALIZE": True, "BLOCK_E": triton.next_power_of_2(experts)},
        "grid": lambda meta: (triton.cdiv(tokens, meta["BLOCK_TOKENS"]),),
        "outputs": (ids, weights),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    values, ids = data["args"][0].topk(data["kwargs"]["top_k"], -1)
    return ids.float(), values.softmax(-1)


CASES = [
    Case(
        name=f"srv_moe_topk_softmax/{tokens}x{experts}x{top_k}",
        kernel=srv_moe_topk_softmax,
        key=("num_tokens", "num_experts"),
        space=SPACE,
        make=partial(_make, (tokens, experts, top_k), (9, experts - 4, top_k)),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        bytes=moved(partial(_make, (tokens, experts, top_k), (tokens, experts, top_k))),
    )
    for tokens, experts, top_k in [
        (1024, 128, 8),
        (8192, 128, 8),
        (65536, 128, 8),
        (262144, 128, 8),
        (256, 256, 8),
        (4096, 256, 8),
        (32768, 256, 8),
        (131072, 256, 8),
    ]
]
