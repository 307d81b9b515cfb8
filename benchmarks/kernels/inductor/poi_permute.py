"""Images from channels first to channels last, normalised and narrowed: a two-dimensional pointwise tile."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "transpose", "inductor"


@triton.jit
def poi_fused_convert_permute_sub(
    in_ptr0,
    in_ptr1,
    out_ptr0,
    ks0,
    ynumel,
    xnumel,
    YBLOCK: tl.constexpr,
    XBLOCK: tl.constexpr,
):
    yoffset = (tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)) * YBLOCK
    yindex = yoffset + tl.arange(0, YBLOCK)[None, :]
    ymask = yindex < ynumel
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:, None]
    xmask = xindex < xnumel
    x2 = xindex
    y3 = yindex
    y0 = yindex % ks0
    y1 = yindex // ks0
    tmp0 = tl.load(in_ptr0 + (x2 + xnumel * y3), xmask & ymask, eviction_policy="evict_last")
    tmp1 = tl.load(in_ptr1 + y0, ymask, eviction_policy="evict_last")
    tmp2 = tmp0 - tmp1
    tmp3 = tmp2.to(tl.float16)
    tl.store(out_ptr0 + (y0 + ks0 * x2 + ks0 * xnumel * y1), tmp3, xmask & ymask)


SPACE: Space = {
    "kwargs": {"YBLOCK": [1, 16, 32, 64, 128], "XBLOCK": [8, 16, 32, 64, 128, 256]},
    "num_warps": [2, 4, 8],
    "num_stages": [1],
    "where": lambda c: 128 <= c["YBLOCK"] * c["XBLOCK"] <= 4096,
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    batch, channels, pixels = tiny if small else shape
    x = normal((batch, channels, pixels), device, dtype=torch.float32, seed=1)
    mean = normal((channels,), device, dtype=torch.float32, seed=2)
    y = unset((batch, pixels, channels), device)
    ynumel = batch * channels

    def grid(meta: dict[str, int]) -> tuple[int, int, int]:
        tall = triton.cdiv(ynumel, meta["YBLOCK"])
        layers = triton.cdiv(tall, 65535)
        return triton.cdiv(pixels, meta["XBLOCK"]), triton.cdiv(tall, layers), layers

    return {
        "args": (x, mean, y, channels, ynumel, pixels),
        "kwargs": {},
        "grid": grid,
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, mean = data["args"][:2]
    return ((x - mean[:, None]).transpose(1, 2).contiguous(),)


CASES = [
    Case(
        name=f"poi_fused_convert_permute_sub/{b}x{c}x{p}",
        kernel=poi_fused_convert_permute_sub,
        key=("ks0", "ynumel", "xnumel"),
        space=SPACE,
        make=partial(_make, (b, c, p), (2, 9, 21)),
        reference=_reference,
        tolerance=(1e-3, 2e-3),
        flops=1.0 * b * c * p,
        bytes=6.0 * b * c * p + 4.0 * c,
    )
    for b, c, p in [
        (8, 64, 50176),
        (64, 256, 3136),
        (256, 512, 784),
        (512, 2048, 64),
        (2, 320, 4096),
        (1, 16, 1048576),
        (16, 1280, 256),
        (1024, 768, 208),
        (4, 128, 65536),
    ]
]
