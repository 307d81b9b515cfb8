"""Group normalisation and SiLU of an image model: few long rows, two sums in one looped reduction."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "norm", "inductor"


@triton.jit
def red_fused_native_group_norm_silu(
    in_ptr0,
    in_ptr1,
    in_ptr2,
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
    rbase = tl.arange(0, RBLOCK)[None, :]
    x4 = xindex
    x0 = xindex % 32
    _tmp2 = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    _tmp5 = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r5 = rindex
        tmp0 = tl.load(
            in_ptr0 + (r5 + rnumel * x4), rmask & xmask, eviction_policy="evict_last", other=0.0
        ).to(tl.float32)
        tmp1 = tl.broadcast_to(tmp0, [XBLOCK, RBLOCK])
        tmp3 = _tmp2 + tmp1
        _tmp2 = tl.where(rmask & xmask, tmp3, _tmp2)
        tmp4 = _tmp5 + tmp1 * tmp1
        _tmp5 = tl.where(rmask & xmask, tmp4, _tmp5)
    tmp2 = tl.sum(_tmp2, 1)[:, None]
    tmp5 = tl.sum(_tmp5, 1)[:, None]
    tmp6 = tmp2 / rnumel
    tmp7 = tmp5 / rnumel - tmp6 * tmp6
    tmp8 = 1e-06
    tmp9 = tl.rsqrt(tmp7 + tmp8)
    for roffset in range(0, rnumel, RBLOCK):
        rindex = roffset + rbase
        rmask = rindex < rnumel
        r5 = rindex
        r3 = rindex // ks0
        tmp10 = tl.load(
            in_ptr0 + (r5 + rnumel * x4), rmask & xmask, eviction_policy="evict_first", other=0.0
        ).to(tl.float32)
        tmp13 = tl.load(in_ptr1 + (r3 + ks1 * x0), rmask & xmask, eviction_policy="evict_last", other=0.0).to(
            tl.float32
        )
        tmp15 = tl.load(in_ptr2 + (r3 + ks1 * x0), rmask & xmask, eviction_policy="evict_last", other=0.0).to(
            tl.float32
        )
        tmp11 = tmp10 - tmp6
        tmp12 = tmp11 * tmp9
        tmp14 = tmp12 * tmp13
        tmp16 = tmp14 + tmp15
        tmp17 = tl.sigmoid(tmp16)
        tmp18 = tmp16 * tmp17
        tl.store(out_ptr2 + (r5 + rnumel * x4), tmp18, rmask & xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [1, 2, 4], "RBLOCK": [256, 1024, 2048, 4096, 8192]},
    "num_warps": [4, 8, 16, 32],
    "num_stages": [1],
    "where": lambda c: c["XBLOCK"] * c["RBLOCK"] <= 16384,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    batch, channels, pixels = tiny if small else shape
    x = normal((batch, channels, pixels), device, seed=1)
    weight, bias = normal((channels,), device, seed=2), normal((channels,), device, seed=3)
    y = unset((batch, channels, pixels), device)
    xnumel, rnumel = batch * 32, channels // 32 * pixels
    return {
        "args": (x, weight, bias, y, pixels, channels // 32, xnumel, rnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, weight, bias = data["args"][:3]
    y = torch.nn.functional.group_norm(x.float(), 32, weight.float(), bias.float(), 1e-6)
    return (torch.nn.functional.silu(y),)


CASES = [
    Case(
        name=f"red_fused_native_group_norm_silu/{b}x{c}x{p}",
        kernel=red_fused_native_group_norm_silu,
        key=("xnumel", "rnumel", "ks0"),
        space=SPACE,
        make=partial(_make, (b, c, p), (1, 64, 23)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=12.0 * b * c * p,
        bytes=2.0 * (2 * b * c * p + 2 * c),
    )
    for b, c, p in [
        (2, 320, 4096),
        (2, 1280, 256),
        (2, 1280, 64),
        (16, 640, 1024),
        (64, 320, 1024),
        (1, 256, 65536),
        (8, 128, 65536),
        (4, 128, 262144),
        (128, 256, 784),
    ]
]
