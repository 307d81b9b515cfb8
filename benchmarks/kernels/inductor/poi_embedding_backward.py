"""Gradient of an embedding table: flat, every element added atomically into its row, padding left out."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal

FAMILY, HAND = "atomics", "inductor"


@triton.jit
def poi_fused_embedding_dense_backward(
    in_ptr0,
    in_ptr1,
    out_ptr0,
    ks0,
    ks1,
    ynumel,
    xnumel,
    YBLOCK: tl.constexpr,
    XBLOCK: tl.constexpr,
):
    yoffset = tl.program_id(1) * YBLOCK
    yindex = yoffset + tl.arange(0, YBLOCK)[None, :]
    ymask = yindex < ynumel
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    x1 = xindex
    y0 = yindex
    tmp0 = tl.load(in_ptr0 + x1, xmask, eviction_policy="evict_last", other=0)
    tmp6 = tl.load(in_ptr1 + (y0 + ks0 * x1), xmask & ymask, other=0.0).to(tl.float32)
    tmp1 = ks1
    tmp2 = tmp0 + tmp1
    tmp3 = tmp0 < 0
    tmp4 = tl.where(tmp3, tmp2, tmp0)
    tmp5 = tmp0 == 0
    tmp7 = 0.0
    tmp8 = tl.where(tmp5, tmp7, tmp6)
    tl.atomic_add(out_ptr0 + (y0 + ks0 * tmp4), tmp8, xmask & ymask, sem="relaxed")


SPACE: Space = {
    "kwargs": {"YBLOCK": [32, 64, 128, 256, 512], "XBLOCK": [1, 4, 16, 64]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
    "where": lambda c: 64 <= c["XBLOCK"] * c["YBLOCK"] <= 2048 * c["num_warps"],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    tokens, hidden, vocab = tiny if small else shape
    index = integers(-vocab // 4, vocab, (tokens,), device, dtype=torch.int64, seed=1)
    dy = normal((tokens, hidden), device, dtype=torch.bfloat16, seed=2)
    out = torch.zeros(vocab, hidden, dtype=torch.float32, device=device)
    return {
        "args": (index, dy, out, hidden, vocab, hidden, tokens),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(tokens, meta["XBLOCK"]), triton.cdiv(hidden, meta["YBLOCK"])),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    index, dy, out, _, vocab = data["args"][:5]
    kept = torch.where(index[:, None] == 0, 0.0, dy.float())
    return (torch.zeros_like(out).index_add_(0, torch.where(index < 0, index + vocab, index), kept),)


CASES = [
    Case(
        name=f"poi_fused_embedding_dense_backward/{t}x{h}/{v}",
        kernel=poi_fused_embedding_dense_backward,
        key=("ynumel", "xnumel", "ks1"),
        space=SPACE,
        make=partial(_make, (t, h, v), (23, 37, 11)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        reset_to_zero=("out_ptr0",),
        flops=1.0 * t * h,
        bytes=8.0 * t + 2.0 * t * h + 4.0 * v * h,
    )
    for t, h, v in [
        (16384, 768, 30528),
        (65536, 1024, 32000),
        (16384, 4096, 32000),
        (65536, 768, 512),
        (262144, 64, 65536),
        (131072, 256, 64),
        (4096, 2048, 50304),
        (512, 5120, 32000),
        (8192, 128, 16),
    ]
]
