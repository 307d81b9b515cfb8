"""1x1 convolution over channels-last images: persistent matmul with bias, SiLU and the residual added."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.blockptr.tiles import SMS, load_block, load_line, store_block

FAMILY, HAND = "conv", "blockptr"


@triton.jit
def bp_conv1x1(
    x_ptr,
    w_ptr,
    bias_ptr,
    skip_ptr,
    y_ptr,
    pixels,
    c_out,
    c_in,
    stride_xp,
    stride_wo,
    stride_yp,
    BLOCK_P: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SKIP_FIRST: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    tl.assume(stride_xp > 0)
    tl.assume(stride_wo > 0)
    tl.assume(stride_yp > 0)
    tiles_o = tl.cdiv(c_out, BLOCK_O)
    for tile_id in tl.range(tl.program_id(0), tl.cdiv(pixels, BLOCK_P) * tiles_o, PROGRAMS):
        # All output channels of a run of pixels, before the next run.
        off_p = (tile_id // tiles_o) * BLOCK_P
        off_o = (tile_id % tiles_o) * BLOCK_O
        if SKIP_FIRST:
            skip = load_block(skip_ptr, pixels, c_out, stride_yp, 1, off_p, off_o, BLOCK_P, BLOCK_O)
        acc = tl.zeros((BLOCK_P, BLOCK_O), dtype=tl.float32)
        for off_c in tl.range(0, c_in, BLOCK_C):
            x = load_block(x_ptr, pixels, c_in, stride_xp, 1, off_p, off_c, BLOCK_P, BLOCK_C)
            w = load_block(w_ptr, c_in, c_out, 1, stride_wo, off_c, off_o, BLOCK_C, BLOCK_O)
            acc = tl.dot(x, w, acc)
        acc += load_line(bias_ptr, c_out, off_o, BLOCK_O).to(tl.float32)[None, :]
        if not SKIP_FIRST:
            skip = load_block(skip_ptr, pixels, c_out, stride_yp, 1, off_p, off_o, BLOCK_P, BLOCK_O)
        y = acc * tl.sigmoid(acc) + skip.to(tl.float32)
        store_block(y_ptr, y, pixels, c_out, stride_yp, 1, off_p, off_o, BLOCK_P, BLOCK_O)


SPACE: Space = {
    "kwargs": {
        "BLOCK_P": [32, 64, 128],
        "BLOCK_O": [32, 64, 128],
        "BLOCK_C": [32, 64],
        "SKIP_FIRST": [False, True],
        "PROGRAMS": [SMS, 4 * SMS],
    },
    "num_warps": [4, 8],
    "num_stages": [3],
    "where": lambda p: (p["num_warps"] == 8) == (p["BLOCK_P"] * p["BLOCK_O"] >= 16384),
}


def _make(shape: tuple[int, ...], device: str, small: bool = False) -> Data:
    batch, side, c_in, c_out = (2, 7, 50, 70) if small else shape
    x = normal((batch, side, side, c_in), device, seed=1)
    w = normal((c_out, c_in), device, seed=2, scale=c_in**-0.5)
    bias = normal((c_out,), device, seed=3)
    skip = normal((batch, side, side, c_out), device, seed=4)
    y = unset((batch, side, side, c_out), device)
    pixels = batch * side * side
    return {
        "args": (x, w, bias, skip, y, pixels, c_out, c_in, x.stride(2), w.stride(0), y.stride(2)),
        "kwargs": {},
        "grid": lambda meta: (
            min(
                meta["PROGRAMS"],
                triton.cdiv(pixels, meta["BLOCK_P"]) * triton.cdiv(c_out, meta["BLOCK_O"]),
            ),
        ),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, w, bias, skip = (t.float() for t in data["args"][:4])
    return (torch.nn.functional.silu(x @ w.T + bias) + skip,)


CASES = [
    Case(
        name=f"bp_conv1x1/{batch}x{side}x{side}x{c_in}to{c_out}",
        kernel=bp_conv1x1,
        key=("pixels", "c_out", "c_in"),
        space=SPACE,
        make=partial(_make, (batch, side, c_in, c_out)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        # Bias, SiLU (4) and residual for each output.
        flops=2.0 * batch * side * side * c_in * c_out + 6.0 * batch * side * side * c_out,
        bytes=2.0 * (batch * side * side * (c_in + 2 * c_out) + c_in * c_out + c_out),
    )
    for batch, side, c_in, c_out in [
        (64, 56, 64, 256),
        (64, 28, 512, 128),
        (128, 16, 1024, 2048),
        (2, 64, 320, 320),
        (2, 32, 640, 640),
        (1, 128, 512, 512),
        (32, 80, 96, 48),
        (8, 16, 1280, 1280),
    ]
]
