"""Vertical box blur: a program walks down a strip with a running sum of the rows in the window."""

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
def vis_box_blur(src_ptr, dst_ptr, H, W, radius, COLUMNS: tl.constexpr, STRIP: tl.constexpr):
    x = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.program_id(1) * STRIP
    base = tl.program_id(2).to(tl.int64) * H * W
    window = tl.zeros((COLUMNS,), dtype=tl.float32)
    for y in range(tl.maximum(top - radius, 0), tl.minimum(top + radius, H)):
        window += tl.load(src_ptr + base + y * W + x, mask=x < W, other=0.0).to(tl.float32)
    weight = 1.0 / (2 * radius + 1)
    for y in range(top, tl.minimum(top + STRIP, H)):
        enters = x < tl.where(y + radius < H, W, 0)
        window += tl.load(src_ptr + base + (y + radius) * W + x, mask=enters, other=0.0).to(tl.float32)
        tl.store(dst_ptr + base + y * W + x, (window * weight).to(tl.float16), mask=x < W)
        leaves = x < tl.where(y >= radius, W, 0)
        window -= tl.load(src_ptr + base + (y - radius) * W + x, mask=leaves, other=0.0).to(tl.float32)


SPACE: Space = {
    "kwargs": {"COLUMNS": [32, 64, 128, 256, 1024], "STRIP": [8, 32, 128, 512]},
    "num_warps": [1, 2, 4],
    "num_stages": [2],
}

Shape = tuple[int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    planes, h, w, radius = tiny if small else shape
    src, dst = normal((planes, h, w), device, seed=1), unset((planes, h, w), device)
    return {
        "args": (src, dst, h, w, radius),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(w, meta["COLUMNS"]), triton.cdiv(h, meta["STRIP"]), planes),
        "outputs": (dst,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    src, radius = data["args"][0].float(), data["args"][4]
    found = torch.nn.functional.avg_pool2d(src[:, None], (2 * radius + 1, 1), stride=1, padding=(radius, 0))
    return (found[:, 0],)


CASES = [
    Case(
        name=f"vis_box_blur/{planes}x{h}x{w}-r{radius}",
        kernel=vis_box_blur,
        key=("H", "W", "radius"),
        space=SPACE,
        make=partial(_make, (planes, h, w, radius), (2, 21, 50, 2)),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        flops=3.0 * planes * h * w,
        bytes=4.0 * planes * h * w,
    )
    for planes, h, w, radius in [
        (3, 2048, 4096, 7),
        (3, 1024, 1024, 3),
        (48, 512, 512, 5),
        (1, 8192, 8192, 12),
        (256, 224, 224, 2),
        (1, 512, 768, 9),
        (1024, 128, 128, 4),
        (12, 1088, 1920, 24),
        (64, 64, 4096, 6),
    ]
]
