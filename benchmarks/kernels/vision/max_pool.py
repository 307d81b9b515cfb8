"""Max pooling 3x3, stride 2, padding 1 over NCHW: flat output indices, several blocks of them per program."""

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
def vis_max_pool(x_ptr, y_ptr, total, H, W, OH, OW, BLOCK: tl.constexpr, PER_THREAD: tl.constexpr):
    start = tl.program_id(0) * (BLOCK * PER_THREAD)
    for u in tl.static_range(PER_THREAD):
        index = start + u * BLOCK + tl.arange(0, BLOCK)
        ox = index % OW
        oy = (index // OW) % OH
        plane = index // (OW * OH)
        best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        for i in tl.static_range(3):
            for j in tl.static_range(3):
                iy = oy * 2 + (i - 1)
                ix = ox * 2 + (j - 1)
                inside = (index < total) & (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W)
                v = tl.load(x_ptr + (plane * H + iy) * W + ix, mask=inside, other=float("-inf"))
                best = tl.maximum(best, v.to(tl.float32))
        tl.store(y_ptr + index, best.to(tl.float16), mask=index < total)


SPACE: Space = {
    "kwargs": {"BLOCK": [64, 128, 256, 512, 1024, 2048], "PER_THREAD": [1, 2, 4]},
    "num_warps": [1, 4, 8],
    "num_stages": [1],
    "where": lambda c: c["BLOCK"] * c["PER_THREAD"] <= 2048 * c["num_warps"],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    planes, h, w = tiny if small else shape
    oh, ow = (h + 1) // 2, (w + 1) // 2
    x, y = normal((planes, h, w), device, seed=1), unset((planes, oh, ow), device)
    total = planes * oh * ow
    return {
        "args": (x, y, total, h, w, oh, ow),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(total, meta["BLOCK"] * meta["PER_THREAD"]),),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x = data["args"][0].float()
    return (torch.nn.functional.max_pool2d(x[:, None], 3, stride=2, padding=1)[:, 0],)


CASES = [
    Case(
        name=f"vis_max_pool/{planes}x{h}x{w}",
        kernel=vis_max_pool,
        key=("total", "OW"),
        space=SPACE,
        make=partial(_make, (planes, h, w), (2, 9, 13)),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        # Eight comparisons an output.
        flops=8.0 * planes * ((h + 1) // 2) * ((w + 1) // 2),
        bytes=2.0 * planes * (h * w + ((h + 1) // 2) * ((w + 1) // 2)),
    )
    for planes, h, w in [
        (2048, 128, 128),
        (64, 224, 224),
        (16384, 32, 32),
        (1024, 64, 64),
        (4096, 96, 96),
        (48, 1024, 1024),
        (3, 2048, 4096),
        (128, 32, 32),
        (256, 384, 608),
    ]
]
