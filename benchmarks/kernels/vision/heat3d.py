"""One heat step on a 3-D grid, 7 points: programs march along z with three planes in registers."""

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
def vis_heat3d(u_ptr, out_ptr, D, H, W, k, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, DEPTH: tl.constexpr):
    x = tl.program_id(0) * TILE_X + tl.arange(0, TILE_X)[None, :]
    y = tl.program_id(1) * TILE_Y + tl.arange(0, TILE_Y)[:, None]
    z0 = tl.program_id(2) * DEPTH
    plane = H * W
    inside = (y < H) & (x < W)
    at = y * W + x
    below = tl.load(u_ptr + (z0 - 1) * plane + at, mask=inside & (x < tl.where(z0 > 0, W, 0)), other=0.0)
    here = tl.load(u_ptr + z0 * plane + at, mask=inside, other=0.0)
    for z in range(z0, tl.minimum(z0 + DEPTH, D)):
        p = u_ptr + z * plane + at
        above = tl.load(p + plane, mask=inside & (x < tl.where(z + 1 < D, W, 0)), other=0.0)
        west = tl.load(p - 1, mask=inside & (x > 0), other=0.0)
        east = tl.load(p + 1, mask=inside & (x + 1 < W), other=0.0)
        north = tl.load(p - W, mask=inside & (y > 0), other=0.0)
        south = tl.load(p + W, mask=inside & (y + 1 < H), other=0.0)
        around = west + east + north + south + above + below
        tl.store(out_ptr + z * plane + at, here + k * (around - 6.0 * here), mask=inside)
        below = here
        here = above


SPACE: Space = {
    "kwargs": {"TILE_Y": [1, 4, 16], "TILE_X": [32, 64, 128], "DEPTH": [1, 4, 16, 64]},
    "num_warps": [2, 4],
    "num_stages": [1],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    d, h, w = tiny if small else shape
    u = normal((d, h, w), device, dtype=torch.float32, seed=1)
    out = unset((d, h, w), device, dtype=torch.float32)
    return {
        "args": (u, out, d, h, w, 0.125),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(w, meta["TILE_X"]),
            triton.cdiv(h, meta["TILE_Y"]),
            triton.cdiv(d, meta["DEPTH"]),
        ),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    u, k = data["args"][0].double(), data["args"][5]
    out = u * (1 - 6 * k)
    for axis, size in enumerate(u.shape):
        up, down = out.narrow(axis, 1, size - 1), out.narrow(axis, 0, size - 1)
        up.add_(u.narrow(axis, 0, size - 1), alpha=k)
        down.add_(u.narrow(axis, 1, size - 1), alpha=k)
    return (out,)


CASES = [
    Case(
        name=f"vis_heat3d/{d}x{h}x{w}",
        kernel=vis_heat3d,
        key=("D", "H", "W"),
        space=SPACE,
        make=partial(_make, (d, h, w), (3, 5, 38)),
        reference=_reference,
        tolerance=(1e-4, 1e-4),
        flops=8.0 * d * h * w,
        bytes=8.0 * d * h * w,
    )
    for d, h, w in [
        (512, 512, 512),
        (256, 256, 256),
        (128, 128, 128),
        (64, 64, 64),
        (16, 2048, 2048),
        (1024, 128, 128),
        (48, 480, 640),
        (32, 64, 96),
        (384, 384, 320),
    ]
]
