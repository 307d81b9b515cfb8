"""Attention backward, the preparatory row sums of O * dO: heads and tokens share one tile."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import tile_range

FAMILY, HAND = "attention_backward", "functional"


@triton.jit
def row_dot(a, b):
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), axis=1)


@triton.jit
def fn_attn_delta(
    o_ptr,
    do_ptr,
    delta_ptr,
    seq_len,
    heads,
    stride_token,
    HEAD_DIM: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_H: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.arange(0, TILE_T * TILE_H)
    token = tl.program_id(0) * TILE_T + rows // TILE_H
    head = tl.program_id(1) * TILE_H + rows % TILE_H
    mask = (token < seq_len) & (head < heads)
    at = (batch * seq_len + token) * stride_token + head * HEAD_DIM
    tile = at[:, None] + tile_range(0, HEAD_DIM)[None, :]
    o = tl.load(o_ptr + tile, mask=mask[:, None], other=0.0)
    do = tl.load(do_ptr + tile, mask=mask[:, None], other=0.0)
    tl.store(delta_ptr + (batch * heads + head) * seq_len + token, row_dot(o, do), mask=mask)


SPACE: Space = {
    "kwargs": {"TILE_T": [1, 4, 16, 64], "TILE_H": [1, 2, 4, 16]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
    "where": lambda p: 4 <= p["TILE_T"] * p["TILE_H"] <= 256,
}

Shape = tuple[int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    batch, length, heads, dim = tiny if small else shape
    o, do = (normal((batch, length, heads, dim), device, dtype=torch.bfloat16, seed=n) for n in (1, 2))
    delta = unset((batch, heads, length), device, dtype=torch.float32)
    return {
        "args": (o, do, delta, length, heads, heads * dim),
        "kwargs": {"HEAD_DIM": dim},
        "grid": lambda meta: (
            triton.cdiv(length, meta["TILE_T"]),
            triton.cdiv(heads, meta["TILE_H"]),
            batch,
        ),
        "outputs": (delta,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    o, do = data["args"][:2]
    return ((o.float() * do.float()).sum(-1).transpose(1, 2).contiguous(),)


CASES = [
    Case(
        name=f"fn_attn_delta/{batch}x{length}x{heads}x{dim}",
        kernel=fn_attn_delta,
        key=("seq_len", "heads"),
        space=SPACE,
        make=partial(_make, (batch, length, heads, dim), (2, 11, 3, dim)),
        reference=_reference,
        tolerance=(2e-3, 1e-3),
        flops=2.0 * batch * length * heads * dim,
        bytes=4.0 * batch * length * heads * dim + 4.0 * batch * length * heads,
    )
    for batch, length, heads, dim in [
        (1, 4096, 32, 128),
        (4, 4096, 32, 128),
        (1, 512, 16, 128),
        (32, 256, 48, 128),
        (1, 16384, 16, 128),
        (2, 1024, 16, 64),
        (8, 2048, 32, 64),
        (64, 256, 16, 64),
        (16, 4096, 32, 64),
    ]
]
