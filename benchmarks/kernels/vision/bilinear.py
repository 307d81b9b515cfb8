"""Bilinear upsampling of NHWC images (pixel centres, edges clamped): a tile of output pixels by channels."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "stencil", "vision"


@triton.jit
def _source(o, size, scale):
    # Where output coordinate `o` falls between two input coordinates, and how far towards the second.
    s = tl.maximum((o.to(tl.float32) + 0.5) * scale - 0.5, 0.0)
    low = s.to(tl.int32)
    high = low + tl.where(low < size - 1, 1, 0)
    return low, high, s - low.to(tl.float32)


@triton.jit
def vis_bilinear_nhwc(
    x_ptr, y_ptr, H, W, OH, OW, C, scale_h, scale_w, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr
):
    pixel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    ch = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    image = tl.program_id(2)
    y0, y1, fy = _source(pixel // OW, H, scale_h)
    x0, x1, fx = _source(pixel % OW, W, scale_w)
    keep = (pixel < OH * OW)[:, None] & (ch < C)[None, :]
    src = x_ptr + image * H * W * C + ch[None, :]
    v00 = tl.load(src + ((y0 * W + x0) * C)[:, None], mask=keep).to(tl.float32)
    v01 = tl.load(src + ((y0 * W + x1) * C)[:, None], mask=keep).to(tl.float32)
    v10 = tl.load(src + ((y1 * W + x0) * C)[:, None], mask=keep).to(tl.float32)
    v11 = tl.load(src + ((y1 * W + x1) * C)[:, None], mask=keep).to(tl.float32)
    top = v00 + (v01 - v00) * fx[:, None]
    bottom = v10 + (v11 - v10) * fx[:, None]
    out = top + (bottom - top) * fy[:, None]
    tl.store(y_ptr + (image * OH * OW + pixel)[:, None] * C + ch[None, :], out.to(tl.float16), mask=keep)


SPACE: Space = {
    "kwargs": {"BLOCK_P": [1, 4, 16, 64], "BLOCK_C": [32, 64, 128, 256]},
    "num_warps": [1, 4, 8],
    "num_stages": [1],
    "where": lambda c: c["BLOCK_P"] * c["BLOCK_C"] <= 2048 * c["num_warps"],
}

Shape = tuple[int, int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    n, h, w, c, factor = tiny if small else shape
    oh, ow = h * factor, w * factor
    x, y = normal((n, h, w, c), device, seed=1), unset((n, oh, ow, c), device)
    return {
        "args": (x, y, h, w, oh, ow, c, h / oh, w / ow),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(oh * ow, meta["BLOCK_P"]), triton.cdiv(c, meta["BLOCK_C"]), n),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, y = data["args"][:2]
    found = torch.nn.functional.interpolate(
        x.float().permute(0, 3, 1, 2), size=y.shape[1:3], mode="bilinear", align_corners=False
    )
    return (found.permute(0, 2, 3, 1).contiguous(),)


CASES = [
    Case(
        name=f"vis_bilinear_nhwc/{n}x{h}x{w}x{c}-by{factor}",
        kernel=vis_bilinear_nhwc,
        key=("OH", "OW", "C"),
        space=SPACE,
        make=partial(_make, (n, h, w, c, factor), (1, 3, 5, 40, 2)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=9.0 * n * h * w * c * factor**2,
        bytes=2.0 * n * h * w * c * (1 + factor**2),
    )
    for n, h, w, c, factor in [
        (8, 64, 64, 256, 2),
        (2, 32, 32, 512, 2),
        (1, 256, 256, 256, 2),
        (16, 32, 32, 64, 4),
        (4, 128, 128, 32, 4),
        (1, 16, 16, 768, 2),
        (2, 16, 16, 1280, 8),
        (32, 64, 48, 96, 2),
        (1, 512, 512, 16, 4),
    ]
]
