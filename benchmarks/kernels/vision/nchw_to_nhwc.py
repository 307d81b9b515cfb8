"""NCHW to NHWC: channels by pixels tiles of one image, several tiles along the pixels per program."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "transpose", "vision"


@triton.jit
def vis_nchw_to_nhwc(src_ptr, dst_ptr, C, P, TILE_P: tl.constexpr, TILE_C: tl.constexpr, TILES: tl.constexpr):
    image = tl.program_id(2).to(tl.int64) * C * P
    c = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    for t in tl.static_range(TILES):
        p = (tl.program_id(0) * TILES + t) * TILE_P + tl.arange(0, TILE_P)
        v = tl.load(src_ptr + image + c[:, None] * P + p[None, :], mask=(c < C)[:, None] & (p < P)[None, :])
        tl.store(
            dst_ptr + image + p[:, None] * C + c[None, :],
            tl.trans(v),
            mask=(p < P)[:, None] & (c < C)[None, :],
        )


SPACE: Space = {
    "kwargs": {"TILE_P": [16, 32, 64, 256], "TILE_C": [16, 32, 128], "TILES": [1, 4]},
    "num_warps": [2, 8],
    "num_stages": [1],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    n, c, p = tiny if small else shape
    src = normal((n, c, p), device, dtype=torch.float32, seed=1)
    dst = unset((n, p, c), device, dtype=torch.float32)
    return {
        "args": (src, dst, c, p),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(p, meta["TILE_P"] * meta["TILES"]),
            triton.cdiv(c, meta["TILE_C"]),
            n,
        ),
        "outputs": (dst,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (data["args"][0].transpose(1, 2).contiguous(),)


CASES = [
    Case(
        name=f"vis_nchw_to_nhwc/{n}x{c}x{p}",
        kernel=vis_nchw_to_nhwc,
        key=("C", "P"),
        space=SPACE,
        make=partial(_make, (n, c, p), (2, 18, 50)),
        reference=_reference,
        tolerance=(0.0, 0.0),
        bytes=8.0 * n * c * p,
    )
    for n, c, p in [
        (32, 64, 112 * 112),
        (64, 256, 3136),
        (128, 512, 784),
        (256, 2048, 64),
        (2, 320, 4096),
        (1, 16, 2048 * 2048),
        (8, 128, 256 * 256),
        (1, 1280, 256),
        (16, 48, 384 * 384),
    ]
]
