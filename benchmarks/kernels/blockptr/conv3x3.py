"""3x3 convolution over channels-last images: shifted blocks of pixels, zeros over the edge."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import load_block

FAMILY, HAND = "conv", "blockptr"


@triton.jit
def bp_conv3x3(
    x_ptr,
    w_ptr,
    y_ptr,
    height,
    width,
    c_in,
    c_out,
    stride_xn,
    stride_xh,
    stride_xw,
    stride_wt,
    stride_wc,
    stride_yn,
    stride_yh,
    stride_yw,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_O: tl.constexpr,
    TAPS_OUTSIDE: tl.constexpr,
):
    tl.assume(stride_xh > 0)
    tl.assume(stride_yh > 0)
    PIXELS: tl.constexpr = BLOCK_H * BLOCK_W
    tiles_w = tl.cdiv(width, BLOCK_W)
    off_h = (tl.program_id(0) // tiles_w) * BLOCK_H
    off_w = (tl.program_id(0) % tiles_w) * BLOCK_W
    off_o = tl.program_id(1) * BLOCK_O
    image = tl.program_id(2).to(tl.int64)
    x_base = x_ptr + image * stride_xn
    rows = off_h + tl.arange(0, PIXELS) // BLOCK_W
    cols = off_w + tl.arange(0, PIXELS) % BLOCK_W
    acc = tl.zeros((PIXELS, BLOCK_O), dtype=tl.float32)
    steps = tl.cdiv(c_in, BLOCK_C)
    for i in tl.range(0, 9 * steps):
        # Either all channels of one tap, or all taps of one block of channels (which stays in cache).
        if TAPS_OUTSIDE:
            tap = i // steps
            off_c = (i % steps) * BLOCK_C
        else:
            tap = i % 9
            off_c = (i // 9) * BLOCK_C
        h = rows + (tap // 3 - 1)
        w = cols + (tap % 3 - 1)
        c = off_c + tl.arange(0, BLOCK_C)
        inside = (h >= 0) & (h < height) & (w >= 0) & (w < width)
        x = tl.load(
            x_base + (h * stride_xh + w * stride_xw)[:, None] + c[None, :],
            mask=inside[:, None] & (c < c_in)[None, :],
            other=0.0,
        )
        k = load_block(w_ptr + tap * stride_wt, c_in, c_out, stride_wc, 1, off_c, off_o, BLOCK_C, BLOCK_O)
        acc = tl.dot(x, k, acc)
    o = off_o + tl.arange(0, BLOCK_O)
    y_ptrs = y_ptr + image * stride_yn + (rows * stride_yh + cols * stride_yw)[:, None] + o[None, :]
    stored = ((rows < height) & (cols < width))[:, None] & (o < c_out)[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=stored)


SPACE: Space = {
    "kwargs": {
        "BLOCK_H": [2, 8],
        "BLOCK_W": [8, 16],
        "BLOCK_C": [32, 64],
        "BLOCK_O": [32, 64, 128],
        "TAPS_OUTSIDE": [False, True],
    },
    "num_warps": [4, 8],
    "num_stages": [2, 4],
    "where": lambda p: (
        (p["num_warps"] == 8) == (p["BLOCK_H"] * p["BLOCK_W"] * p["BLOCK_O"] >= 8192)
        and (p["num_stages"] == 4 or p["BLOCK_C"] == 64)
    ),
}


def _make(shape: tuple[int, ...], device: str, small: bool = False) -> Data:
    batch, side, c_in, c_out = (1, 9, 40, 50) if small else shape
    x = normal((batch, side, side, c_in), device, seed=1)
    w = normal((9, c_in, c_out), device, seed=2, scale=(9 * c_in) ** -0.5)
    y = unset((batch, side, side, c_out), device)
    sizes = (side, side, c_in, c_out)
    return {
        "args": (x, w, y, *sizes, *x.stride()[:3], *w.stride()[:2], *y.stride()[:3]),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(side, meta["BLOCK_H"]) * triton.cdiv(side, meta["BLOCK_W"]),
            triton.cdiv(c_out, meta["BLOCK_O"]),
            batch,
        ),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, w = data["args"][0].float(), data["args"][1].float()
    height, width = x.shape[1:3]
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
    y = padded[:, :height, :width] @ w[0]
    for tap in range(1, 9):
        y += padded[:, tap // 3 : tap // 3 + height, tap % 3 : tap % 3 + width] @ w[tap]
    return (y,)


CASES = [
    Case(
        name=f"bp_conv3x3/{batch}x{side}x{side}x{c_in}to{c_out}",
        kernel=bp_conv3x3,
        key=("height", "width", "c_in", "c_out"),
        space=SPACE,
        make=partial(_make, (batch, side, c_in, c_out)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=18.0 * batch * side * side * c_in * c_out,
        bytes=2.0 * (batch * side * side * (c_in + c_out) + 9 * c_in * c_out),
    )
    for batch, side, c_in, c_out in [
        (32, 64, 64, 64),
        (64, 32, 128, 128),
        (64, 16, 256, 256),
        (2, 64, 320, 320),
        (4, 32, 640, 640),
        (1, 256, 128, 128),
        (16, 16, 512, 512),
        (1, 512, 64, 16),
    ]
]
