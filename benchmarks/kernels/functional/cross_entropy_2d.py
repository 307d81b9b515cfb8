"""Weighted cross entropy of per-pixel classes (NCHW): logsumexp over channels, total by atomics."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal, unset
from benchmarks.kernels.functional.helpers import (
    grid_2d,
    inside,
    lse_merge,
    safe_exp_shift,
    tile_range,
)

FAMILY, HAND = "loss", "functional"


@triton.jit
def fold_channels(m, z, picked, x, channel, target):
    """Take a tile of channels into the running pair, and the target's logit if it is among them."""
    m_tile = tl.max(x, axis=0)
    z_tile = tl.sum(tl.exp(x - safe_exp_shift(m_tile)[None, :]), axis=0)
    hit = channel[:, None] == target[None, :]
    m, z = lse_merge(m, z, m_tile, z_tile)
    return m, z, picked + tl.sum(tl.where(hit, x, 0.0), axis=0)


@triton.jit
def fn_cross_entropy_2d(
    x_ptr,
    target_ptr,
    weight_ptr,
    loss_ptr,
    total_ptr,
    C,
    pixels,
    ignore_index,
    TILE_C: tl.constexpr,
    TILE_P: tl.constexpr,
):
    image = tl.program_id(1).to(tl.int64)
    place = tile_range(tl.program_id(0), TILE_P)
    mask = place < pixels
    target = tl.load(target_ptr + image * pixels + place, mask=mask, other=ignore_index).to(tl.int32)
    m = tl.full([TILE_P], float("-inf"), dtype=tl.float32)
    z = tl.zeros([TILE_P], dtype=tl.float32)
    picked = tl.zeros([TILE_P], dtype=tl.float32)
    for start in range(0, C, TILE_C):
        channel = start + tl.arange(0, TILE_C)
        at = image * C * pixels + grid_2d(channel, place, pixels)
        x = tl.load(x_ptr + at, mask=inside(channel, place, C, pixels), other=float("-inf"))
        m, z, picked = fold_channels(m, z, picked, x.to(tl.float32), channel, target)
    counted = mask & (target != ignore_index)
    weight = tl.load(weight_ptr + target, mask=counted, other=0.0)
    loss = tl.where(counted, weight * (safe_exp_shift(m) + tl.log(z) - picked), 0.0)
    tl.store(loss_ptr + image * pixels + place, loss, mask=mask)
    tl.atomic_add(total_ptr + image, tl.sum(loss, axis=0), sem="relaxed")


SPACE: Space = {
    "kwargs": {"TILE_C": [2, 8, 32, 128], "TILE_P": [16, 64, 128, 256, 1024]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [2],
    "where": lambda p: 64 <= p["TILE_C"] * p["TILE_P"] // p["num_warps"] <= 2048,
}

Shape = tuple[int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    images, classes, pixels = tiny if small else shape
    x = normal((images, classes, pixels), device, dtype=torch.bfloat16, seed=1, scale=2.0)
    target = integers(0, classes, (images, pixels), device, dtype=torch.int64, seed=2)
    # The border of a segmentation map is not labelled.
    target[:, :4] = -100
    weight = normal((classes,), device, dtype=torch.float32, seed=3).abs() + 0.5
    loss = unset((images, pixels), device, dtype=torch.float32)
    total = torch.zeros(images, dtype=torch.float32, device=device)
    return {
        "args": (x, target, weight, loss, total, classes, pixels, -100),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(pixels, meta["TILE_P"]), images),
        "outputs": (loss, total),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, target, weight = data["args"][:3]
    loss = torch.nn.functional.cross_entropy(x.float(), target, weight, ignore_index=-100, reduction="none")
    return loss, loss.double().sum(-1)


CASES = [
    Case(
        name=f"fn_cross_entropy_2d/{images}x{classes}x{pixels}",
        kernel=fn_cross_entropy_2d,
        key=("C", "pixels"),
        space=SPACE,
        make=partial(_make, (images, classes, pixels), (2, 21, 75)),
        reference=_reference,
        tolerance=(2e-3, 1e-3),
        reset_to_zero=("total_ptr",),
        flops=4.0 * images * classes * pixels,
        bytes=2.0 * images * classes * pixels + 12.0 * images * pixels + 4.0 * classes + 4.0 * images,
    )
    for images, classes, pixels in [
        (8, 32, 262144),
        (16, 160, 65536),
        (4, 16, 1048576),
        (64, 1008, 256),
        (2, 8192, 4096),
        (128, 32, 4096),
        (1, 80, 16384),
        (32, 512, 1024),
        (4, 32000, 1024),
    ]
]
