"""Batch-norm statistics over NCHW: per channel a sum and a sum of squares, the batch split over programs."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal

FAMILY, HAND = "norm", "vision"


@triton.jit
def vis_batch_stats(x_ptr, sum_ptr, square_ptr, count, C, HW, BLOCK: tl.constexpr, SPLIT: tl.constexpr):
    channel = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(tl.program_id(1) * BLOCK, count, BLOCK * SPLIT):
        # Element e of a channel is pixel e % HW of image e // HW.
        e = start + tl.arange(0, BLOCK)
        offset = ((e // HW) * C + channel) * HW + e % HW
        v = tl.load(x_ptr + offset, mask=e < count, other=0.0).to(tl.float32)
        total += v
        squares += v * v
    tl.atomic_add(sum_ptr + channel, tl.sum(total, axis=0))
    tl.atomic_add(square_ptr + channel, tl.sum(squares, axis=0))


SPACE: Space = {
    "kwargs": {"BLOCK": [256, 1024, 2048, 4096], "SPLIT": [1, 4, 16, 64]},
    "num_warps": [2, 4, 8],
    "num_stages": [2],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    n, c, hw = tiny if small else shape
    x = normal((n, c, hw), device, seed=1)
    total = torch.zeros(c, dtype=torch.float32, device=device)
    squares = torch.zeros(c, dtype=torch.float32, device=device)
    return {
        "args": (x, total, squares, n * hw, c, hw),
        "kwargs": {},
        "grid": lambda meta: (c, meta["SPLIT"]),
        "outputs": (total, squares),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x = data["args"][0].float()
    return x.sum((0, 2)), x.square().sum((0, 2))


CASES = [
    Case(
        name=f"vis_batch_stats/{n}x{c}x{hw}",
        kernel=vis_batch_stats,
        key=("count", "C"),
        space=SPACE,
        make=partial(_make, (n, c, hw), (3, 4, 190)),
        reference=_reference,
        tolerance=(5e-2, 1e-4),
        reset_to_zero=("sum_ptr", "square_ptr"),
        flops=3.0 * n * c * hw,
        bytes=2.0 * n * c * hw + 8.0 * c,
    )
    for n, c, hw in [
        (32, 64, 112 * 112),
        (64, 256, 3136),
        (128, 512, 784),
        (256, 2048, 64),
        (16, 1024, 256),
        (8, 32, 512 * 512),
        (2, 320, 4096),
        (4, 128, 256 * 256),
        (2, 16, 4096),
        (512, 128, 1024),
    ]
]
