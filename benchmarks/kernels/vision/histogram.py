"""Intensity histograms of byte images: private bins per program, or one global atomic per pixel."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers

FAMILY, HAND = "atomics", "vision"


@triton.jit
def vis_histogram256(
    pixel_ptr, bins_ptr, pixels, BLOCK: tl.constexpr, PASSES: tl.constexpr, PRIVATE: tl.constexpr
):
    image = tl.program_id(1).to(tl.int64)
    src = pixel_ptr + image * pixels
    bins = bins_ptr + image * 256
    first = tl.program_id(0) * BLOCK * PASSES
    if PRIVATE:
        bucket = tl.arange(0, 256)
        counts = tl.zeros((256,), dtype=tl.int32)
        for t in range(PASSES):
            i = first + t * BLOCK + tl.arange(0, BLOCK)
            v = tl.load(src + i, mask=i < pixels, other=0).to(tl.int32)
            counts += tl.histogram(v, 256)
        # Lanes past the end were counted as black pixels.
        beyond = tl.minimum(tl.maximum(first + BLOCK * PASSES - pixels, 0), BLOCK * PASSES)
        counts -= tl.where(bucket == 0, beyond, 0)
        tl.atomic_add(bins + bucket, counts.to(tl.float32), mask=counts > 0, sem="relaxed")
    else:
        for t in range(PASSES):
            i = first + t * BLOCK + tl.arange(0, BLOCK)
            v = tl.load(src + i, mask=i < pixels, other=0).to(tl.int32)
            one = tl.full((BLOCK,), 1.0, dtype=tl.float32)
            tl.atomic_add(bins + v, one, mask=i < pixels, sem="relaxed")


SPACE: Space = {
    "kwargs": {"BLOCK": [256, 1024, 2048, 8192], "PASSES": [1, 4, 16], "PRIVATE": [True, False]},
    "num_warps": [4, 8],
    "num_stages": [2],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    images, pixels = tiny if small else shape
    image = integers(0, 256, (images, pixels), device, dtype=torch.uint8, seed=1)
    bins = torch.zeros((images, 256), dtype=torch.float32, device=device)
    return {
        "args": (image, bins, pixels),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(pixels, meta["BLOCK"] * meta["PASSES"]), images),
        "outputs": (bins,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    return (torch.stack([torch.bincount(one, minlength=256) for one in data["args"][0]]).double(),)


CASES = [
    Case(
        name=f"vis_histogram256/{images}x{pixels}",
        kernel=vis_histogram256,
        key=("pixels",),
        space=SPACE,
        make=partial(_make, (images, pixels), (2, 700)),
        reference=_reference,
        tolerance=(0.0, 0.0),
        reset_to_zero=("bins_ptr",),
        flops=1.0 * images * pixels,
        bytes=1.0 * images * pixels + 4.0 * 256 * images,
    )
    for images, pixels in [
        (1, 4096 * 4096),
        (64, 224 * 224),
        (512, 224 * 224),
        (16, 1024 * 1024),
        (1, 256 * 256),
        (3, 3840 * 2160),
        (1024, 64 * 64),
        (8, 1920 * 1088),
        (128, 512 * 512),
    ]
]
