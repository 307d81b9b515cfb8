"""Gumbel-max sampling of the next token: argmax with its value, lane-wise maxima in a looped reduction."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "sort", "inductor"


@triton.jit
def maximum_with_index(a_value, a_index, b_value, b_index):
    mask = a_value > b_value
    equal = a_value == b_value
    mask |= equal & (a_index < b_index)
    return tl.where(mask, a_value, b_value), tl.where(mask, a_index, b_index)


@triton.jit
def red_fused_add_argmax(
    in_ptr0,
    in_ptr1,
    out_ptr0,
    out_ptr1,
    xnumel,
    rnumel,
    XBLOCK: tl.constexpr,
    RBLOCK: tl.constexpr,
):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    rbase = tl.arange(0, RBLOCK)[None, :]
    x0 = xindex
    _tmp4 = tl.full([XBLOCK, RBLOCK], float("-inf"), tl.float32)
    _tmp4_index = tl.full([XBLOCK, RBLOCK], 2147483647, tl.int32)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r1 = rindex
        tmp0 = tl.load(
            in_ptr0 + (r1 + rnumel * x0), rmask & xmask, eviction_policy="evict_first", other=0.0
        ).to(tl.float32)
        tmp1 = tl.load(in_ptr1 + (r1 + rnumel * x0), rmask & xmask, eviction_policy="evict_first", other=0.0)
        tmp2 = tmp0 + tmp1
        tmp3 = tl.broadcast_to(tmp2, [XBLOCK, RBLOCK])
        rindex2 = tl.broadcast_to(rindex, [XBLOCK, RBLOCK])
        _tmp4_next, _tmp4_index_next = maximum_with_index(_tmp4, _tmp4_index, tmp3, rindex2)
        _tmp4 = tl.where(rmask & xmask, _tmp4_next, _tmp4)
        _tmp4_index = tl.where(rmask & xmask, _tmp4_index_next, _tmp4_index)
    tmp5 = tl.max(_tmp4, 1)[:, None]
    tmp6 = tl.where(_tmp4 == tmp5, _tmp4_index, 2147483647)
    tmp4 = tl.min(tmp6, 1)[:, None]
    tl.store(out_ptr0 + x0, tmp4, xmask)
    tl.store(out_ptr1 + x0, tmp5, xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [1, 2, 4, 16], "RBLOCK": [256, 1024, 2048, 4096, 8192]},
    "num_warps": [2, 4, 8, 16],
    "num_stages": [1],
    "where": lambda c: c["XBLOCK"] * c["RBLOCK"] <= 16384,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    xnumel, rnumel = tiny if small else shape
    logits = normal((xnumel, rnumel), device, dtype=torch.bfloat16, seed=1)
    noise = normal((xnumel, rnumel), device, dtype=torch.float32, seed=2)
    index = unset((xnumel,), device, dtype=torch.int64)
    value = unset((xnumel,), device, dtype=torch.float32)
    return {
        "args": (logits, noise, index, value, xnumel, rnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (index, value),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    logits, noise = data["args"][:2]
    value, index = (logits.float() + noise).max(-1)
    return index, value


CASES = [
    Case(
        name=f"red_fused_add_argmax/{x}x{r}",
        kernel=red_fused_add_argmax,
        key=("xnumel", "rnumel"),
        space=SPACE,
        make=partial(_make, (x, r), (5, 300)),
        reference=_reference,
        tolerance=(0.0, 0.0),
        # Add and compare.
        flops=2.0 * x * r,
        bytes=6.0 * x * r + 12.0 * x,
    )
    for x, r in [
        (16, 128256),
        (128, 128256),
        (2048, 128256),
        (64, 32000),
        (4096, 32000),
        (512, 50304),
        (16384, 4096),
        (65536, 512),
        (256, 1008),
    ]
]
