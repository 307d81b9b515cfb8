"""Bilinear upsampling by two, aligned to pixel centres: four gathers from indices computed in float."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "stencil", "inductor"


@triton.jit
def poi_fused_upsample_bilinear2d(in_ptr0, out_ptr0, ks0, ks1, ks2, ks3, xnumel, XBLOCK: tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x1 = (xindex // ks0) % ks1
    x0 = xindex % ks0
    x2 = xindex // (ks0 * ks1)
    x3 = xindex
    tmp0 = x1.to(tl.float32)
    tmp1 = 0.5
    tmp2 = tmp0 + tmp1
    tmp3 = tmp2 * 0.5
    tmp4 = tmp3 - tmp1
    tmp5 = tl.maximum(tmp4, 0.0)
    tmp6 = tmp5.to(tl.int32)
    tmp7 = tl.minimum(tmp6 + 1, ks3 - 1)
    tmp8 = x0.to(tl.float32)
    tmp9 = tmp8 + tmp1
    tmp10 = tmp9 * 0.5
    tmp11 = tmp10 - tmp1
    tmp12 = tl.maximum(tmp11, 0.0)
    tmp13 = tmp12.to(tl.int32)
    tmp14 = tl.minimum(tmp13 + 1, ks2 - 1)
    tmp15 = tl.load(in_ptr0 + (tmp14 + ks2 * tmp7 + ks2 * ks3 * x2), xmask, eviction_policy="evict_last").to(
        tl.float32
    )
    tmp16 = tl.load(in_ptr0 + (tmp13 + ks2 * tmp7 + ks2 * ks3 * x2), xmask, eviction_policy="evict_last").to(
        tl.float32
    )
    tmp17 = tl.load(in_ptr0 + (tmp14 + ks2 * tmp6 + ks2 * ks3 * x2), xmask, eviction_policy="evict_last").to(
        tl.float32
    )
    tmp18 = tl.load(in_ptr0 + (tmp13 + ks2 * tmp6 + ks2 * ks3 * x2), xmask, eviction_policy="evict_last").to(
        tl.float32
    )
    tmp19 = tmp12 - tmp13.to(tl.float32)
    tmp20 = tmp15 - tmp16
    tmp21 = tmp20 * tmp19
    tmp22 = tmp16 + tmp21
    tmp23 = tmp17 - tmp18
    tmp24 = tmp23 * tmp19
    tmp25 = tmp18 + tmp24
    tmp26 = tmp5 - tmp6.to(tl.float32)
    tmp27 = tmp22 - tmp25
    tmp28 = tmp27 * tmp26
    tmp29 = tmp25 + tmp28
    tl.store(out_ptr0 + x3, tmp29, xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [32, 64, 128, 256, 512, 1024, 2048, 4096]},
    "num_warps": [1, 2, 4, 8, 16],
    "num_stages": [1],
    "where": lambda c: c["XBLOCK"] <= 2048 * c["num_warps"],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    planes, height, width = tiny if small else shape
    x = normal((planes, height, width), device, seed=1)
    y = unset((planes, 2 * height, 2 * width), device)
    xnumel = 4 * planes * height * width
    return {
        "args": (x, y, 2 * width, 2 * height, width, height, xnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    image = data["args"][0].float()[None]
    return (torch.nn.functional.interpolate(image, scale_factor=2, mode="bilinear")[0],)


CASES = [
    Case(
        name=f"poi_fused_upsample_bilinear2d/{n}x{h}x{w}",
        kernel=poi_fused_upsample_bilinear2d,
        key=("ks2", "ks3", "xnumel"),
        space=SPACE,
        make=partial(_make, (n, h, w), (3, 5, 7)),
        reference=_reference,
        tolerance=(2e-3, 2e-3),
        # Three interpolations of three operations each.
        flops=9.0 * 4 * n * h * w,
        bytes=2.0 * 5 * n * h * w,
    )
    for n, h, w in [
        (640, 32, 32),
        (2560, 16, 16),
        (512, 128, 128),
        (256, 512, 512),
        (64, 1024, 1024),
        (16384, 64, 64),
        (48, 256, 256),
        (19, 256, 512),
        (16, 64, 64),
    ]
]
