"""Same-padded 3x3 convolution, NHWC, as an implicit GEMM: one flat loop over taps and channels."""

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
def vis_conv3x3_nhwc(
    img_ptr,
    wgt_ptr,
    out_ptr,
    M,
    H,
    W,
    IC,
    OC,
    BLOCK_PIX: tl.constexpr,
    BLOCK_OC: tl.constexpr,
    BLOCK_IC: tl.constexpr,
):
    # An output pixel is a row of the matrix: m = (n * H + p) * W + q.
    m = tl.program_id(0) * BLOCK_PIX + tl.arange(0, BLOCK_PIX)
    oc = tl.program_id(1) * BLOCK_OC + tl.arange(0, BLOCK_OC)
    q = m % W
    p = (m // W) % H
    ic_blocks = tl.cdiv(IC, BLOCK_IC)
    acc = tl.zeros((BLOCK_PIX, BLOCK_OC), dtype=tl.float32)
    for it in range(9 * ic_blocks):
        tap = it // ic_blocks
        dy = tap // 3 - 1
        dx = tap % 3 - 1
        ic = (it % ic_blocks) * BLOCK_IC + tl.arange(0, BLOCK_IC)
        inside = (m < M) & (p + dy >= 0) & (p + dy < H) & (q + dx >= 0) & (q + dx < W)
        img = tl.load(
            img_ptr + (m + dy * W + dx)[:, None] * IC + ic[None, :],
            mask=inside[:, None] & (ic < IC)[None, :],
            other=0.0,
        )
        wgt = tl.load(
            wgt_ptr + (tap * IC + ic)[:, None] * OC + oc[None, :],
            mask=(ic < IC)[:, None] & (oc < OC)[None, :],
            other=0.0,
        )
        acc = tl.dot(img, wgt, acc)
    tl.store(
        out_ptr + m[:, None] * OC + oc[None, :],
        acc.to(tl.float16),
        mask=(m < M)[:, None] & (oc < OC)[None, :],
    )


SPACE: Space = {
    "kwargs": {"BLOCK_PIX": [32, 64, 128, 256], "BLOCK_OC": [64, 128], "BLOCK_IC": [32, 64]},
    "num_warps": [4, 8],
    "num_stages": [2, 4],
}

Shape = tuple[int, int, int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    n, h, w, ic, oc = tiny if small else shape
    img = normal((n, h, w, ic), device, seed=1)
    wgt = normal((3, 3, ic, oc), device, seed=2, scale=(9 * ic) ** -0.5)
    out = unset((n, h, w, oc), device)
    return {
        "args": (img, wgt, out, n * h * w, h, w, ic, oc),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(n * h * w, meta["BLOCK_PIX"]), triton.cdiv(oc, meta["BLOCK_OC"])),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    img, wgt = data["args"][:2]
    found = torch.nn.functional.conv2d(
        img.permute(0, 3, 1, 2).float(), wgt.permute(3, 2, 0, 1).float(), padding=1
    )
    return (found.permute(0, 2, 3, 1).contiguous(),)


CASES = [
    Case(
        name=f"vis_conv3x3_nhwc/{n}x{h}x{w}x{ic}-{oc}",
        kernel=vis_conv3x3_nhwc,
        key=("M", "IC", "OC"),
        space=SPACE,
        make=partial(_make, (n, h, w, ic, oc), (1, 5, 7, 20, 40)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=2.0 * 9 * n * h * w * ic * oc,
        bytes=2.0 * (n * h * w * (ic + oc) + 9 * ic * oc),
    )
    for n, h, w, ic, oc in [
        (8, 64, 64, 128, 128),
        (2, 64, 64, 320, 320),
        (2, 32, 32, 1280, 1280),
        (1, 16, 16, 1280, 640),
        (32, 112, 112, 64, 64),
        (2, 512, 512, 128, 128),
        (4, 256, 256, 256, 256),
        (8, 32, 32, 512, 512),
        (16, 128, 128, 32, 96),
        (1, 48, 80, 192, 384),
    ]
]
