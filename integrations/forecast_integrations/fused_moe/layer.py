"""A layer of experts, what it multiplies for a batch of tokens, and how its kernel finds each token's expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton

_PAIRS_EACH = 4
"""Fewer pairs of token and expert than a quarter of the experts: vLLM gives each a block of its own, unsorted."""


@dataclass(frozen=True)
class MoeLayer:
    """The experts of a layer, as one device holds them: each multiplies by [2 width, hidden], then [hidden, width]."""

    experts: int
    width: int
    """Width of the part that is on this device: `N` in the names of vLLM's and SGLang's files."""
    hidden: int
    top_k: int
    """Experts of each token."""
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        """Raises ValueError for sizes that no layer has."""
        sizes = (self.experts, self.width, self.hidden, self.top_k)
        if min(sizes) < 1 or self.top_k > self.experts:
            raise ValueError(
                "experts, width, hidden and top_k must be 1 or more, and a token has no more experts than there are; "
                f"got {', '.join(map(str, sizes))}"
            )


@dataclass(frozen=True)
class Assignment:
    """Which token and which expert each block of rows is for."""

    sorted_tokens: torch.Tensor | None
    """[rows], int32: numbers of pairs of token and expert by expert, each expert's filled up to whole blocks with the
    number of pairs; None where every pair has a block of its own."""
    experts: torch.Tensor
    """[blocks], int32."""
    padded: torch.Tensor
    """[1], int32: the rows that are any expert's."""
    rows: int
    """Rows of the launch; more than there may be in use, as the host does not know those."""


def chosen_experts(layer: MoeLayer, tokens: int, device: str, seed: int) -> torch.Tensor:
    """[tokens, top_k], int32: every token's experts, by chance."""
    generator = torch.Generator(device).manual_seed(seed)
    scores = torch.rand(tokens, layer.experts, generator=generator, device=device)
    return scores.topk(layer.top_k, dim=1).indices.to(torch.int32)


def assignment(chosen: torch.Tensor, experts: int, block: int, *, unsorted: bool = False) -> Assignment:
    """Blocks of `block` rows for these choices, [tokens, top_k], as the servers' own operation makes them.

    `unsorted`: a block for each pair, where these are few; see `is_unsorted`.
    """
    pairs, device = chosen.numel(), chosen.device

    def whole(values: torch.Tensor) -> torch.Tensor:
        return values.to(device=device, dtype=torch.int32)

    if unsorted:
        return Assignment(None, chosen.reshape(-1), whole(torch.tensor([pairs * block])), pairs * block)
    rows = pairs + experts * (block - 1)
    if pairs < experts:
        rows = min(pairs * block, rows)
    flat = chosen.reshape(-1).long().cpu()
    counts = torch.bincount(flat, minlength=experts)
    blocks = (counts + block - 1) // block
    begin = torch.cumsum(blocks * block, 0) - blocks * block
    used = int(blocks.sum())
    order = torch.argsort(flat, stable=True)
    before = torch.cumsum(counts, 0) - counts
    places = begin[flat[order]] + torch.arange(pairs) - before[flat[order]]
    listed = torch.full((rows,), pairs)
    listed[places] = order
    of_blocks = torch.zeros(triton.cdiv(rows, block), dtype=torch.int64)
    of_blocks[:used] = torch.repeat_interleave(torch.arange(experts), blocks)
    tokens = chosen.shape[0]
    launched = min(rows, pairs * block) if tokens < block else rows
    return Assignment(whole(listed), whole(of_blocks), whole(torch.tensor([used * block])), launched)


def is_unsorted(pairs: int, experts: int) -> bool:
    """Whether vLLM gives each of so few pairs a block of its own."""
    return pairs * _PAIRS_EACH <= experts


@dataclass(frozen=True)
class Product:
    """One of a layer's two products, for a batch."""

    rows: torch.Tensor
    """The left operand: [tokens, hidden], or [tokens * top_k, width]."""
    weights: torch.Tensor
    """[experts, columns, inner]."""
    out: torch.Tensor
    """[tokens * top_k, columns]."""
    top_k: int
    """Pairs that share a row of `rows`; 1 in the second product."""
    is_weighted: bool
    """By how much the token wants the expert: the second product is."""


def products(
    layer: MoeLayer, tokens: int, weights: tuple[torch.Tensor, torch.Tensor]
) -> tuple[Product, Product]:
    """Both, with the layer's own weights."""
    pairs, device = tokens * layer.top_k, weights[0].device

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=layer.dtype, device=device)

    def room(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=layer.dtype, device=device)

    first = Product(drawn(tokens, layer.hidden), weights[0], room(pairs, 2 * layer.width), layer.top_k, False)
    return first, Product(drawn(pairs, layer.width), weights[1], room(pairs, layer.hidden), 1, True)


def drawn_weights(layer: MoeLayer, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random weights of both products."""
    shapes = (layer.experts, 2 * layer.width, layer.hidden), (layer.experts, layer.hidden, layer.width)
    first, second = (torch.randn(*s, dtype=layer.dtype, device=device).mul_(s[2] ** -0.5) for s in shapes)
    return first, second


def named_arguments(product: Product, wanted: torch.Tensor, compute_type: Any) -> Mapping[str, Any]:
    """Arguments of the kernel of either server by its parameters' names; a kernel has only some of them.

    `wanted`: [tokens, top_k], float32. Arguments that depend on the config are left out: rows and their experts.
    """
    a, b, c = product.rows, product.weights, product.out
    return {
        "a_ptr": a, "b_ptr": b, "c_ptr": c, "topk_weights_ptr": wanted,
        "a_desc": None, "b_desc": None, "b_bias_ptr": None, "bias_ptr": None,
        "a_scale_ptr": None, "b_scale_ptr": None, "add_mask_ptr": None,
        "N": b.shape[1], "K": b.shape[2], "num_valid_tokens": c.shape[0],
        "stride_am": a.stride(0), "stride_ak": a.stride(1),
        "stride_be": b.stride(0), "stride_bk": b.stride(2), "stride_bn": b.stride(1),
        "stride_cm": c.stride(0), "stride_cn": c.stride(1),
        "stride_asm": 0, "stride_ask": 0, "stride_bse": 0, "stride_bsk": 0, "stride_bsn": 0,
        "stride_bbe": 0, "stride_bbn": 0, "stride_bias_e": 0, "stride_bias_n": 0,
        "group_n": 0, "group_k": 0, "SPLIT_K": 1,
        "MUL_ROUTED_WEIGHT": product.is_weighted, "top_k": product.top_k, "compute_type": compute_type,
        "use_fp8_w8a8": False, "use_int8_w8a8": False, "use_int8_w8a16": False, "per_channel_quant": False,
        "HAS_BIAS": False, "SWAP_AB": False, "swap_ab": False, "USE_TD": False, "c_sorted": False,
        "FUSE_ADD_TO_OUTPUT": False, "MASK_OUTPUT": False, "FUSE_SUM_ALL_REDUCE": False, "ROUTER_TOPK": 1,
    }  # fmt: skip
