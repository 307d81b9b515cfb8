"""Skip connection of a U-Net: two feature maps concatenated by channel, SiLU on the way, flat."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "elementwise", "inductor"


@triton.jit
def poi_fused_cat_silu(in_ptr0, in_ptr1, out_ptr0, ks0, ks1, ks2, xnumel, XBLOCK: tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    x1 = (xindex // ks0) % ks2
    x0 = xindex % ks0
    x2 = xindex // (ks0 * ks2)
    x3 = xindex
    tmp0 = x1
    tmp3 = ks1
    tmp4 = tmp0 < tmp3
    tmp5 = tl.load(in_ptr0 + (x0 + ks0 * x1 + ks0 * ks1 * x2), tmp4 & xmask, other=0.0)
    tmp6 = tmp0 >= tmp3
    tmp9 = tl.load(in_ptr1 + (x0 + ks0 * (x1 - ks1) + ks0 * (ks2 - ks1) * x2), tmp6 & xmask, other=0.0)
    tmp10 = tl.where(tmp4, tmp5, tmp9)
    tmp11 = tl.sigmoid(tmp10)
    tmp12 = tmp10 * tmp11
    tl.store(out_ptr0 + x3, tmp12, xmask)


SPACE: Space = {
    "kwargs": {"XBLOCK": [64, 128, 256, 512, 1024, 2048, 4096, 8192]},
    "num_warps": [1, 2, 4, 8, 16],
    "num_stages": [1],
    "where": lambda c: c["XBLOCK"] <= 4096 * c["num_warps"],
}


def _make(
    shape: tuple[int, int, int, int], tiny: tuple[int, int, int, int], device: str, small: bool = False
) -> Data:
    batch, first, second, pixels = tiny if small else shape
    x = normal((batch, first, pixels), device, dtype=torch.float32, seed=1)
    skip = normal((batch, second, pixels), device, dtype=torch.float32, seed=2)
    y = unset((batch, first + second, pixels), device, dtype=torch.float32)
    xnumel = batch * (first + second) * pixels
    return {
        "args": (x, skip, y, pixels, first, first + second, xnumel),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(xnumel, meta["XBLOCK"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (torch.nn.functional.silu(torch.cat(data["args"][:2], 1)),)


CASES = [
    Case(
        name=f"poi_fused_cat_silu/{b}x{c0}+{c1}x{p}",
        kernel=poi_fused_cat_silu,
        key=("ks0", "ks1", "ks2", "xnumel"),
        space=SPACE,
        make=partial(_make, (b, c0, c1, p), (2, 3, 5, 17)),
        reference=_reference,
        tolerance=(1e-5, 1e-5),
        flops=4.0 * b * (c0 + c1) * p,
        bytes=4.0 * 2 * b * (c0 + c1) * p,
    )
    for b, c0, c1, p in [
        (2, 320, 320, 4096),
        (2, 1280, 640, 1024),
        (2, 1280, 1280, 64),
        (16, 640, 320, 4096),
        (4, 64, 64, 262144),
        (1, 128, 64, 1048576),
        (64, 256, 256, 784),
        (1, 512, 256, 256),
        (32, 32, 16, 16384),
    ]
]
