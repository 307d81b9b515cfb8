"""Masked softmax over attention scores: a persistent reduction, one padded block holds the row."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset

FAMILY, HAND = "softmax", "inductor"


@triton.jit
def per_fused_masked_softmax(
    in_ptr0,
    in_ptr1,
    out_ptr2,
    ks0,
    ks1,
    xnumel,
    rnumel,
    XBLOCK: tl.constexpr,
    RBLOCK: tl.constexpr,
):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    rindex = tl.arange(0, RBLOCK)[None, :]
    rmask = rindex < rnumel
    r3 = rindex
    x4 = xindex
    x0 = xindex % ks0
    x2 = xindex // ks1
    tmp0 = tl.load(in_ptr0 + (r3 + rnumel * x4), rmask & xmask, other=0.0).to(tl.float32)
    tmp3 = tl.load(
        in_ptr1 + (r3 + rnumel * x0 + ks0 * rnumel * x2),
        rmask & xmask,
        eviction_policy="evict_last",
        other=0.0,
    ).to(tl.int1)
    tmp1 = 0.088388347
    tmp2 = tmp0 * tmp1
    tmp4 = float("-inf")
    tmp5 = tl.where(tmp3, tmp4, tmp2)
    tmp6 = tl.broadcast_to(tmp5, [XBLOCK, RBLOCK])
    tmp8 = tl.where(rmask & xmask, tmp6, float("-inf"))
    tmp9 = tl.max(tmp8, 1)[:, None]
    tmp10 = tmp5 - tmp9
    tmp11 = tl.exp(tmp10)
    tmp12 = tl.broadcast_to(tmp11, [XBLOCK, RBLOCK])
    tmp14 = tl.where(rmask & xmask, tmp12, 0)
    tmp15 = tl.sum(tmp14, 1)[:, None]
    tmp16 = tmp11 / tmp15
    tl.store(out_ptr2 + (r3 + rnumel * x4), tmp16, rmask & xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [1, 2, 4, 8, 16, 32, 64]},
    "num_warps": [1, 2, 4, 8, 16, 32],
    "num_stages": [1],
    "where": lambda c: c["XBLOCK"] <= 16 * c["num_warps"],
}


def _make(
    shape: tuple[int, int, int, int], tiny: tuple[int, int, int, int], device: str, small: bool = False
) -> Data:
    batch, heads, queries, keys = tiny if small else shape
    scores = normal((batch, heads, queries, keys), device, seed=1, scale=20.0)
    # A quarter of the keys is hidden, the first one never.
    hidden = integers(0, 4, (batch, queries, keys), device, dtype=torch.int8, seed=2) == 0
    hidden[..., 0] = False
    y = unset((batch, heads, queries, keys), device)
    xnumel = batch * heads * queries
    return {
        "args": (scores, hidden, y, queries, heads * queries, xnumel, keys),
        "kwargs": {"RBLOCK": triton.next_power_of_2(keys)},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    scores, hidden = data["args"][:2]
    scaled = scores.float() * 0.088388347
    return (scaled.masked_fill_(hidden[:, None], float("-inf")).softmax(-1),)


CASES = [
    Case(
        name=f"per_fused_masked_softmax/{b}x{h}x{q}x{k}",
        kernel=per_fused_masked_softmax,
        key=("ks0", "xnumel", "rnumel"),
        space=SPACE,
        make=partial(_make, (b, h, q, k), (2, 2, 3, 70)),
        reference=_reference,
        tolerance=(1e-3, 5e-3),
        # Scale, compare, subtract, exponentiate, add, divide.
        flops=6.0 * b * h * q * k,
        bytes=2.0 * 2 * b * h * q * k + 1.0 * b * q * k,
    )
    for b, h, q, k in [
        (16, 32, 512, 512),
        (1, 32, 512, 512),
        (2, 16, 384, 384),
        (128, 32, 16, 512),
        (4, 8, 16, 320),
        (64, 12, 208, 208),
        (256, 16, 64, 256),
        (8, 16, 256, 256),
        (1, 16, 256, 240),
    ]
]
