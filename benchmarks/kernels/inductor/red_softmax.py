"""Scaled softmax over rows of any length, in the three passes of a looped reduction."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

if TYPE_CHECKING:
    import torch

FAMILY, HAND = "softmax", "inductor"


@triton.jit
def red_fused_softmax(in_ptr0, out_ptr2, ks0, xnumel, rnumel, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    rbase = tl.arange(0, RBLOCK)[None, :]
    x0 = xindex
    _tmp4 = tl.full([XBLOCK, RBLOCK], float("-inf"), tl.float32)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r1 = rindex
        tmp0 = tl.load(
            in_ptr0 + (r1 + rnumel * x0), rmask & xmask, eviction_policy="evict_last", other=0.0
        ).to(tl.float32)
        tmp1 = tmp0 * ks0
        tmp3 = tl.maximum(_tmp4, tl.broadcast_to(tmp1, [XBLOCK, RBLOCK]))
        _tmp4 = tl.where(rmask & xmask, tmp3, _tmp4)
    tmp4 = tl.max(_tmp4, 1)[:, None]
    _tmp9 = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r1 = rindex
        tmp5 = tl.load(
            in_ptr0 + (r1 + rnumel * x0), rmask & xmask, eviction_policy="evict_last", other=0.0
        ).to(tl.float32)
        tmp6 = tmp5 * ks0
        tmp7 = tmp6 - tmp4
        tmp8 = tl.exp(tmp7)
        tmp10 = _tmp9 + tl.broadcast_to(tmp8, [XBLOCK, RBLOCK])
        _tmp9 = tl.where(rmask & xmask, tmp10, _tmp9)
    tmp9 = tl.sum(_tmp9, 1)[:, None]
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r1 = rindex
        tmp11 = tl.load(
            in_ptr0 + (r1 + rnumel * x0), rmask & xmask, eviction_policy="evict_first", other=0.0
        ).to(tl.float32)
        tmp12 = tmp11 * ks0
        tmp13 = tmp12 - tmp4
        tmp14 = tl.exp(tmp13)
        tmp15 = tmp14 / tmp9
        tl.store(out_ptr2 + (r1 + rnumel * x0), tmp15, rmask & xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [1, 2, 8, 32], "RBLOCK": [128, 512, 1024, 2048, 4096]},
    "num_warps": [2, 4, 8, 16],
    "num_stages": [1],
    "where": lambda c: c["XBLOCK"] * c["RBLOCK"] <= 16384,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    xnumel, rnumel = tiny if small else shape
    x = normal((xnumel, rnumel), device, seed=1, scale=3.0)
    y = unset((xnumel, rnumel), device)
    return {
        "args": (x, y, 0.125, xnumel, rnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, _, scale = data["args"][:3]
    return ((x.float() * scale).softmax(-1),)


CASES = [
    Case(
        name=f"red_fused_softmax/{x}x{r}",
        kernel=red_fused_softmax,
        key=("xnumel", "rnumel"),
        space=SPACE,
        make=partial(_make, (x, r), (5, 300)),
        reference=_reference,
        tolerance=(1e-3, 5e-3),
        # Scale, compare, subtract, exponentiate, add, divide.
        flops=6.0 * x * r,
        bytes=2.0 * 2 * x * r,
    )
    for x, r in [
        (8192, 32000),
        (64, 128256),
        (16, 131072),
        (256, 50304),
        (2048, 16384),
        (1024, 8192),
        (4096, 4096),
        (16384, 1024),
        (32768, 272),
    ]
]
