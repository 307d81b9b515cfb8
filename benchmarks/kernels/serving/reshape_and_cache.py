"""New keys and values scattered into their pages: keys in stretches of eight, values transposed."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.serving._work import moved, permutation

FAMILY, HAND = "indexing", "serving"


@triton.jit
def srv_reshape_and_cache(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    num_tokens,
    row_size,
    stride_key_t,
    stride_value_t,
    stride_kc_page,
    stride_vc_page,
    PAGE_SIZE: tl.constexpr,
    x: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TILE_SIZE: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    # Heads and their elements lie one after another in both caches, so a row needs one index.
    offs = tl.program_id(1) * TILE_SIZE + tl.arange(0, TILE_SIZE)
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=-1)
    mask = (slot >= 0)[:, None] & (offs < row_size)[None, :]
    page = slot // PAGE_SIZE
    inside = slot % PAGE_SIZE
    key = tl.load(key_ptr + token[:, None] * stride_key_t + offs[None, :], mask=mask)
    key_target = page[:, None] * stride_kc_page + (offs // x)[None, :] * (PAGE_SIZE * x)
    key_target += inside[:, None] * x + (offs % x)[None, :]
    tl.store(key_cache_ptr + key_target, key, mask=mask)
    value = tl.load(value_ptr + token[:, None] * stride_value_t + offs[None, :], mask=mask)
    value_target = page[:, None] * stride_vc_page + offs[None, :] * PAGE_SIZE + inside[:, None]
    tl.store(value_cache_ptr + value_target, value, mask=mask)


SPACE: Space = {
    "kwargs": {"BLOCK_TOKENS": [1, 4, 16, 32], "TILE_SIZE": [32, 128, 512, 1024]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_TOKENS"] * c["TILE_SIZE"] <= 16384,
}

PAGE, X = 16, 8


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    pages, heads, dim = tiny if small else shape
    tokens = pages * PAGE
    key = normal((tokens, heads, dim), device, dtype=torch.bfloat16, seed=1)
    value = normal((tokens, heads, dim), device, dtype=torch.bfloat16, seed=2)
    # A prefill fills whole pages, which the allocator took from anywhere.
    first = permutation(pages, device, seed=3) * PAGE
    slots = (first[:, None] + torch.arange(PAGE, device=device)).reshape(-1)
    key_cache = unset((pages, heads, dim // X, PAGE, X), device, dtype=torch.bfloat16)
    value_cache = unset((pages, heads, dim, PAGE), device, dtype=torch.bfloat16)
    strides = [t.stride(0) for t in (key, value, key_cache, value_cache)]
    return {
        "args": (key, value, key_cache, value_cache, slots, tokens, heads * dim, *strides),
        "kwargs": {"PAGE_SIZE": PAGE, "x": X},
        "grid": lambda meta: (
            triton.cdiv(tokens, meta["BLOCK_TOKENS"]),
            triton.cdiv(heads * dim, meta["TILE_SIZE"]),
        ),
        "outputs": (key_cache, value_cache),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    key, value, _, value_cache, slots = data["args"][:5]
    pages, heads, dim, _ = value_cache.shape
    by_slot = torch.argsort(slots)
    keys = key[by_slot].view(pages, PAGE, heads, dim // X, X).permute(0, 2, 3, 1, 4)
    values = value[by_slot].view(pages, PAGE, heads, dim).permute(0, 2, 3, 1)
    return keys.contiguous(), values.contiguous()


CASES = [
    Case(
        name=f"srv_reshape_and_cache/{pages * PAGE}x{heads}x{dim}",
        kernel=srv_reshape_and_cache,
        key=("num_tokens", "row_size"),
        space=SPACE,
        make=partial(_make, (pages, heads, dim), (3, 3, 24)),
        reference=_reference,
        tolerance=(0.0, 0.0),
        bytes=moved(partial(_make, (pages, heads, dim), (pages, heads, dim))),
    )
    for pages, heads, dim in [
        (4, 8, 128),
        (64, 8, 128),
        (512, 8, 128),
        (2048, 8, 128),
        (1024, 32, 128),
        (256, 1, 128),
        (4096, 1, 128),
        (512, 16, 64),
        (4096, 4, 256),
    ]
]
