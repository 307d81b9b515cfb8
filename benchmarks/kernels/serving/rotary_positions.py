"""Rotary embedding of queries and keys in one launch, cosines and sines found by token position."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset
from benchmarks.kernels.serving._work import moved

FAMILY, HAND = "rope", "serving"


@triton.jit
def _rotate(src, dst, first, second, cos, sin, mask):
    x1 = tl.load(src + first, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(src + second, mask=mask, other=0.0).to(tl.float32)
    tl.store(dst + first, (x1 * cos - x2 * sin).to(dst.dtype.element_ty), mask=mask)
    tl.store(dst + second, (x2 * cos + x1 * sin).to(dst.dtype.element_ty), mask=mask)


@triton.jit
def srv_rotary_positions(
    query_ptr,
    key_ptr,
    query_out_ptr,
    key_out_ptr,
    cos_sin_cache_ptr,
    positions_ptr,
    num_tokens,
    num_q_heads,
    num_kv_heads,
    stride_q_t,
    stride_q_h,
    stride_k_t,
    stride_k_h,
    stride_cache,
    HALF_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    mask_t = token < num_tokens
    offs = tl.arange(0, HALF_DIM)
    position = tl.load(positions_ptr + token, mask=mask_t, other=0)
    cache = cos_sin_cache_ptr + position[:, None] * stride_cache + offs[None, :]
    cos = tl.load(cache, mask=mask_t[:, None], other=0.0).to(tl.float32)[:, None, :]
    sin = tl.load(cache + HALF_DIM, mask=mask_t[:, None], other=0.0).to(tl.float32)[:, None, :]
    if IS_NEOX:
        first, second = offs, offs + HALF_DIM
    else:
        first, second = 2 * offs, 2 * offs + 1
    # Query heads come first in the head axis of the grid, key heads after them.
    q_blocks = tl.cdiv(num_q_heads, BLOCK_HEADS)
    pid_h = tl.program_id(1)
    if pid_h < q_blocks:
        head = pid_h * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = mask_t[:, None, None] & (head < num_q_heads)[None, :, None]
        base = token[:, None, None] * stride_q_t + head[None, :, None] * stride_q_h
        _rotate(
            query_ptr,
            query_out_ptr,
            base + first[None, None, :],
            base + second[None, None, :],
            cos,
            sin,
            mask,
        )
    else:
        head = (pid_h - q_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = mask_t[:, None, None] & (head < num_kv_heads)[None, :, None]
        base = token[:, None, None] * stride_k_t + head[None, :, None] * stride_k_h
        _rotate(
            key_ptr, key_out_ptr, base + first[None, None, :], base + second[None, None, :], cos, sin, mask
        )


SPACE: Space = {
    "kwargs": {"BLOCK_TOKENS": [1, 2, 4, 16], "BLOCK_HEADS": [1, 4, 8, 32]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_TOKENS"] * c["BLOCK_HEADS"] <= min(128, 64 * c["num_warps"]),
}

Shape = tuple[int, int, int, int]


def _make(shape: Shape, tiny: Shape, neox: bool, device: str, small: bool = False) -> Data:
    tokens, q_heads, kv_heads, half = tiny if small else shape
    longest = 50 if small else 32768
    q = normal((tokens, q_heads, 2 * half), device, dtype=torch.bfloat16, seed=1)
    k = normal((tokens, kv_heads, 2 * half), device, dtype=torch.bfloat16, seed=2)
    angles = torch.arange(longest, device=device)[:, None] * 1e4 ** (
        -torch.arange(half, device=device) / half
    )
    cache = torch.cat([angles.cos(), angles.sin()], -1).to(torch.bfloat16)
    positions = integers(0, longest, (tokens,), device, dtype=torch.int64, seed=3)
    q_out, k_out = (unset(t.shape, device, dtype=torch.bfloat16) for t in (q, k))
    strides = (*q.stride()[:2], *k.stride()[:2], cache.stride(0))
    return {
        "args": (q, k, q_out, k_out, cache, positions, tokens, q_heads, kv_heads, *strides),
        "kwargs": {"HALF_DIM": half, "IS_NEOX": neox},
        "grid": lambda meta: (
            triton.cdiv(tokens, meta["BLOCK_TOKENS"]),
            triton.cdiv(q_heads, meta["BLOCK_HEADS"]) + triton.cdiv(kv_heads, meta["BLOCK_HEADS"]),
        ),
        "outputs": (q_out, k_out),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    cache, positions = data["args"][4:6]
    cos, sin = cache[positions].float()[:, None].chunk(2, -1)
    rotated = []
    for x in data["args"][:2]:
        if data["kwargs"]["IS_NEOX"]:
            x1, x2 = x.float().chunk(2, -1)
            rotated.append(torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1))
        else:
            x1, x2 = x.float().unflatten(-1, (-1, 2)).unbind(-1)
            rotated.append(torch.stack([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).flatten(-2))
    return tuple(rotated)


CASES = [
    Case(
        name="srv_rotary_positions/" + "x".join(map(str, shape)) + ("" if neox else "_interleaved"),
        kernel=srv_rotary_positions,
        key=("num_tokens", "num_q_heads", "num_kv_heads"),
        space=SPACE,
        make=partial(_make, shape, (5, 6, 2, shape[3]), neox),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        # Four products and two sums for each pair.
        flops=6.0 * shape[0] * (shape[1] + shape[2]) * shape[3],
        bytes=moved(partial(_make, shape, shape, neox)),
    )
    for shape, neox in [
        ((16, 32, 16, 64), True),
        ((256, 32, 16, 64), True),
        ((4096, 32, 16, 64), True),
        ((16384, 32, 16, 64), True),
        ((8192, 64, 16, 64), True),
        ((1024, 128, 16, 64), True),
        ((256, 128, 16, 64), False),
        ((4096, 64, 16, 64), False),
        ((16384, 16, 16, 64), False),
    ]
]
