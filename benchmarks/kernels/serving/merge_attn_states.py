"""Attention over a shared prefix and over the suffix, merged by their log-sum-exps."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.serving._work import moved

FAMILY, HAND = "attention", "serving"


@triton.jit
def srv_merge_attn_states(
    output,
    output_lse,
    prefix_output,
    prefix_lse,
    suffix_output,
    suffix_lse,
    num_tokens,
    num_heads,
    stride_t,
    stride_h,
    stride_lh,
    stride_lt,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    # A row is one head of one token: tokens vary slowest in a tile, as they do in memory.
    offs_row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    token = tl.program_id(0) * BLOCK_TOKENS + offs_row // BLOCK_HEADS
    head = tl.program_id(1) * BLOCK_HEADS + offs_row % BLOCK_HEADS
    offs_d = tl.arange(0, PADDED_HEAD_SIZE)
    row_mask = (token < num_tokens) & (head < num_heads)
    mask = row_mask[:, None] & (offs_d[None, :] < HEAD_SIZE)
    offs_lse = head * stride_lh + token * stride_lt
    offs = token[:, None] * stride_t + head[:, None] * stride_h + offs_d[None, :]

    p_lse = tl.load(prefix_lse + offs_lse, mask=row_mask, other=0.0)
    s_lse = tl.load(suffix_lse + offs_lse, mask=row_mask, other=0.0)
    p_out = tl.load(prefix_output + offs, mask=mask, other=0.0).to(tl.float32)
    s_out = tl.load(suffix_output + offs, mask=mask, other=0.0).to(tl.float32)
    max_lse = tl.maximum(p_lse, s_lse)
    p_se = tl.exp(p_lse - max_lse)
    s_se = tl.exp(s_lse - max_lse)
    out_se = p_se + s_se
    out = p_out * (p_se / out_se)[:, None] + s_out * (s_se / out_se)[:, None]
    tl.store(output + offs, out.to(output.dtype.element_ty), mask=mask)
    tl.store(output_lse + offs_lse, tl.log(out_se) + max_lse, mask=row_mask)


SPACE: Space = {
    "kwargs": {"BLOCK_TOKENS": [1, 2, 4, 16], "BLOCK_HEADS": [1, 4, 8, 32]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_TOKENS"] * c["BLOCK_HEADS"] <= min(128, 64 * c["num_warps"]),
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    tokens, heads, dim = tiny if small else shape
    size = (tokens, heads, dim)
    prefix = normal(size, device, dtype=torch.bfloat16, seed=1)
    prefix_lse = normal((heads, tokens), device, dtype=torch.float32, seed=2, scale=2.0)
    suffix = normal(size, device, dtype=torch.bfloat16, seed=3)
    suffix_lse = normal((heads, tokens), device, dtype=torch.float32, seed=4, scale=2.0)
    out = unset(size, device, dtype=torch.bfloat16)
    lse = unset((heads, tokens), device, dtype=torch.float32)
    strides = (*out.stride()[:2], *lse.stride())
    return {
        "args": (out, lse, prefix, prefix_lse, suffix, suffix_lse, tokens, heads, *strides),
        "kwargs": {"HEAD_SIZE": dim, "PADDED_HEAD_SIZE": triton.next_power_of_2(dim)},
        "grid": lambda meta: (
            triton.cdiv(tokens, meta["BLOCK_TOKENS"]),
            triton.cdiv(heads, meta["BLOCK_HEADS"]),
        ),
        "outputs": (out, lse),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    _, _, prefix, prefix_lse, suffix, suffix_lse = data["args"][:6]
    lse = torch.logaddexp(prefix_lse, suffix_lse)
    shares = ((part - lse).exp().T[..., None] for part in (prefix_lse, suffix_lse))
    return sum(p.float() * s for p, s in zip((prefix, suffix), shares, strict=True)), lse


CASES = [
    Case(
        name=f"srv_merge_attn_states/{tokens}x{heads}x{dim}",
        kernel=srv_merge_attn_states,
        key=("num_tokens", "num_heads"),
        space=SPACE,
        make=partial(_make, (tokens, heads, dim), (7, 3, dim)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        flops=3.0 * tokens * heads * dim,
        bytes=moved(partial(_make, (tokens, heads, dim), (tokens, heads, dim))),
    )
    for tokens, heads, dim in [
        (64, 32, 128),
        (1024, 32, 128),
        (8192, 32, 128),
        (2048, 64, 128),
        (16384, 16, 128),
        (512, 128, 128),
        (32768, 32, 128),
        (4096, 16, 192),
        (8192, 128, 192),
    ]
]
