"""Depthwise 3x3 convolution over NCHW planes in fp32: a tile of one plane per program."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "conv", "vision"


@triton.jit
def vis_depthwise3x3(x_ptr, w_ptr, y_ptr, C, H, W, TILE_H: tl.constexpr, TILE_W: tl.constexpr):
    plane = tl.program_id(2)
    channel = plane % C
    row = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)[:, None]
    col = tl.program_id(0) * TILE_W + tl.arange(0, TILE_W)[None, :]
    base = plane.to(tl.int64) * H * W
    acc = tl.zeros((TILE_H, TILE_W), dtype=tl.float32)
    for i in tl.static_range(3):
        for j in tl.static_range(3):
            yy = row + (i - 1)
            xx = col + (j - 1)
            halo = (yy >= 0) & (yy < H) & (xx >= 0) & (xx < W)
            v = tl.load(x_ptr + base + yy * W + xx, mask=halo, other=0.0)
            acc += v * tl.load(w_ptr + channel * 9 + i * 3 + j)
    tl.store(y_ptr + base + row * W + col, acc, mask=(row < H) & (col < W))


SPACE: Space = {
    "kwargs": {"TILE_H": [1, 4, 8, 16], "TILE_W": [16, 32, 64, 256]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
}


def _make(
    shape: tuple[int, int, int, int], tiny: tuple[int, int, int, int], device: str, small: bool = False
) -> Data:
    n, c, h, w = tiny if small else shape
    x = normal((n, c, h, w), device, dtype=torch.float32, seed=1)
    weight = normal((c, 3, 3), device, dtype=torch.float32, seed=2)
    y = unset((n, c, h, w), device, dtype=torch.float32)
    return {
        "args": (x, weight, y, c, h, w),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(w, meta["TILE_W"]), triton.cdiv(h, meta["TILE_H"]), n * c),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, weight = data["args"][:2]
    padded = torch.nn.functional.pad(x.double(), (1, 1, 1, 1))
    h, w = x.shape[2:]
    found = torch.zeros_like(x, dtype=torch.float64)
    for tap in range(9):
        i, j = divmod(tap, 3)
        found.addcmul_(padded[:, :, i : i + h, j : j + w], weight[:, i, j].double()[None, :, None, None])
    return (found,)


CASES = [
    Case(
        name=f"vis_depthwise3x3/{n}x{c}x{h}x{w}",
        kernel=vis_depthwise3x3,
        key=("C", "H", "W"),
        space=SPACE,
        make=partial(_make, (n, c, h, w), (1, 2, 5, 19)),
        reference=_reference,
        tolerance=(1e-4, 1e-4),
        flops=18.0 * n * c * h * w,
        bytes=4.0 * (2 * n * c * h * w + 9 * c),
    )
    for n, c, h, w in [
        (16, 64, 112, 112),
        (32, 256, 64, 64),
        (16, 512, 32, 32),
        (64, 768, 16, 16),
        (1, 96, 64, 64),
        (4, 32, 512, 512),
        (1, 16, 1024, 2048),
        (2, 320, 128, 128),
        (1, 144, 208, 304),
    ]
]
