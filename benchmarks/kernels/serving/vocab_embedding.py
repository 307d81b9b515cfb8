"""Embedding rows of one rank's part of the vocabulary; tokens of other ranks give zeros."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset

FAMILY, HAND = "indexing", "serving"


@triton.jit
def srv_vocab_embedding(
    weight_ptr,
    ids_ptr,
    out_ptr,
    num_tokens,
    hidden_size,
    vocab_start,
    vocab_end,
    stride_w_row,
    stride_out_row,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SKIP_FOREIGN: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_t = token < num_tokens
    ids = tl.load(ids_ptr + token, mask=mask_t, other=-1)
    mine = (ids >= vocab_start) & (ids < vocab_end)
    mask = mask_t[:, None] & (offs_d < hidden_size)[None, :]
    local = tl.where(mine, ids - vocab_start, 0)
    w_ptrs = weight_ptr + local[:, None] * stride_w_row + offs_d[None, :]
    if SKIP_FOREIGN:
        rows = tl.load(w_ptrs, mask=mask & mine[:, None], other=0.0)
    else:
        # Foreign tokens read the first row, which is in the cache.
        rows = tl.load(w_ptrs, mask=mask, other=0.0)
        rows = tl.where(mine[:, None], rows, 0.0)
    out_ptrs = out_ptr + token.to(tl.int64)[:, None] * stride_out_row + offs_d[None, :]
    tl.store(out_ptrs, rows.to(out_ptr.dtype.element_ty), mask=mask)


SPACE: Space = {
    "kwargs": {"BLOCK_TOKENS": [1, 4, 16], "BLOCK_D": [128, 512, 2048, 8192], "SKIP_FOREIGN": [True, False]},
    "num_warps": [1, 4, 8],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_TOKENS"] * c["BLOCK_D"] <= 8192,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    tokens, rows, hidden = tiny if small else shape
    weight = normal((rows, hidden), device, dtype=torch.bfloat16, seed=1)
    # The second of two ranks.
    ids = integers(0, 2 * rows, (tokens,), device, dtype=torch.int64, seed=2)
    out = unset((tokens, hidden), device, dtype=torch.bfloat16)
    return {
        "args": (weight, ids, out, tokens, hidden, rows, 2 * rows, weight.stride(0), out.stride(0)),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(tokens, meta["BLOCK_TOKENS"]),
            triton.cdiv(hidden, meta["BLOCK_D"]),
        ),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    weight, ids = data["args"][:2]
    local = ids - weight.shape[0]
    return (weight[local.clamp(min=0)] * (local >= 0)[:, None],)


CASES = [
    Case(
        name=f"srv_vocab_embedding/{tokens}x{rows}x{hidden}",
        kernel=srv_vocab_embedding,
        key=("num_tokens", "hidden_size"),
        space=SPACE,
        make=partial(_make, (tokens, rows, hidden), (11, 30, 200)),
        reference=_reference,
        tolerance=(0.0, 0.0),
    )
    for tokens, rows, hidden in [
        (64, 64128, 4096),
        (1024, 64128, 4096),
        (8192, 64128, 4096),
        (65536, 64128, 4096),
        (2048, 76032, 8192),
        (16384, 16032, 8192),
        (131072, 25136, 768),
        (32768, 128000, 2048),
    ]
]
