"""Token, position and segment embeddings gathered and added: flat, with wrapped negative indices."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset

FAMILY, HAND = "indexing", "inductor"


@triton.jit
def poi_fused_add_embedding(
    in_ptr0,
    in_ptr1,
    in_ptr2,
    in_ptr3,
    in_ptr4,
    out_ptr0,
    ks0,
    ks1,
    ks2,
    xnumel,
    XBLOCK: tl.constexpr,
):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x3 = xindex
    x0 = xindex % ks0
    x1 = xindex // ks0
    x2 = x1 % ks1
    tmp0 = tl.load(in_ptr0 + x1, xmask, eviction_policy="evict_last")
    tmp7 = tl.load(in_ptr2 + (x0 + ks0 * x2), xmask, eviction_policy="evict_last").to(tl.float32)
    tmp9 = tl.load(in_ptr3 + x1, xmask, eviction_policy="evict_last")
    tmp1 = ks2
    tmp2 = tmp0 + tmp1
    tmp3 = tmp0 < 0
    tmp4 = tl.where(tmp3, tmp2, tmp0)
    tmp6 = tl.load(in_ptr1 + (x0 + ks0 * tmp4), xmask).to(tl.float32)
    tmp8 = tmp6 + tmp7
    tmp10 = tmp9 + 2
    tmp11 = tmp9 < 0
    tmp12 = tl.where(tmp11, tmp10, tmp9)
    tmp13 = tl.load(in_ptr4 + (x0 + ks0 * tmp12), xmask, eviction_policy="evict_last").to(tl.float32)
    tmp14 = tmp8 + tmp13
    tl.store(out_ptr0 + x3, tmp14, xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [64, 128, 256, 512, 1024, 2048, 4096, 8192]},
    "num_warps": [1, 2, 4, 8, 16],
    "num_stages": [1],
    "where": lambda c: c["XBLOCK"] <= 4096 * c["num_warps"],
}


def _make(
    shape: tuple[int, int, int, int], tiny: tuple[int, int, int, int], device: str, small: bool = False
) -> Data:
    batch, length, hidden, vocab = tiny if small else shape
    tokens = integers(-vocab // 4, vocab, (batch, length), device, dtype=torch.int64, seed=1)
    table = normal((vocab, hidden), device, seed=2)
    positions = normal((length, hidden), device, seed=3)
    segments = integers(0, 2, (batch, length), device, dtype=torch.int64, seed=4)
    kinds = normal((2, hidden), device, seed=5)
    y = unset((batch, length, hidden), device)
    xnumel = batch * length * hidden
    return {
        "args": (tokens, table, positions, segments, kinds, y, hidden, length, vocab, xnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    tokens, table, positions, segments, kinds = data["args"][:5]
    return (table[tokens].float() + positions.float() + kinds[segments].float(),)


CASES = [
    Case(
        name=f"poi_fused_add_embedding/{b}x{s}x{h}/{v}",
        kernel=poi_fused_add_embedding,
        key=("ks0", "ks1", "ks2", "xnumel"),
        space=SPACE,
        make=partial(_make, (b, s, h, v), (2, 5, 37, 11)),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        flops=2.0 * b * s * h,
    )
    for b, s, h, v in [
        (32, 512, 768, 30528),
        (256, 512, 1024, 30528),
        (4, 4096, 4096, 128256),
        (64, 2048, 2048, 32000),
        (1, 8192, 8192, 32000),
        (256, 16, 4096, 50304),
        (8, 128, 5120, 32000),
        (4096, 64, 64, 262144),
        (1, 32, 2048, 50304),
    ]
]
