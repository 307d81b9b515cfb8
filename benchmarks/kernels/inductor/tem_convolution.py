"""3x3 convolution, channels last, from a template: pixels times output channels, taps inside the K loop."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "conv", "inductor"


@triton.jit
def tem_fused_convolution(
    arg_X,
    arg_W,
    in_ptr2,
    out_ptr0,
    ks0,
    ks1,
    ks2,
    ks3,
    ks4,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    X = arg_X
    W = arg_W
    BATCH = ks0
    IN_H = ks1
    IN_W = ks2
    IN_C = ks3
    OUT_C = ks4
    OUT_H = IN_H + 2 * PADDING_H - KERNEL_H + 1
    OUT_W = IN_W + 2 * PADDING_W - KERNEL_W + 1
    nhw = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    idx_y_w = nhw % OUT_W
    nh = nhw // OUT_W
    idx_y_h = nh % OUT_H
    idx_n = nh // OUT_H
    idx_y_c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    x_base = X + (IN_H * IN_W * IN_C * idx_n)[:, None]
    w_base = W + (KERNEL_H * KERNEL_W * IN_C * idx_y_c)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    BLOCK_K_COUNT = (IN_C + BLOCK_K - 1) // BLOCK_K
    for ijk in range(KERNEL_H * KERNEL_W * BLOCK_K_COUNT):
        k = (ijk % BLOCK_K_COUNT) * BLOCK_K
        ij = ijk // BLOCK_K_COUNT
        i = ij // KERNEL_W
        j = ij % KERNEL_W
        idx_x_h = i - PADDING_H + idx_y_h
        idx_x_w = j - PADDING_W + idx_y_w
        idx_x_c = tl.arange(0, BLOCK_K) + k
        x_ptrs = x_base + ((IN_W * idx_x_h + idx_x_w) * IN_C)[:, None] + idx_x_c[None, :]
        mask_x = (
            (idx_n < BATCH)[:, None]
            & (idx_x_h >= 0)[:, None]
            & (idx_x_h < IN_H)[:, None]
            & (idx_x_w >= 0)[:, None]
            & (idx_x_w < IN_W)[:, None]
            & (idx_x_c < IN_C)[None, :]
        )
        matrix_x = tl.load(x_ptrs, mask=mask_x, other=0.0)
        w_ptrs = w_base + (idx_x_c + (i * KERNEL_W + j) * IN_C)[:, None]
        mask_w = (idx_x_c < IN_C)[:, None] & (idx_y_c < OUT_C)[None, :]
        matrix_w = tl.load(w_ptrs, mask=mask_w, other=0.0)
        acc += tl.dot(matrix_x, matrix_w)
    mask = (idx_n < BATCH)[:, None] & (idx_y_c < OUT_C)[None, :]
    xindex = idx_y_c[None, :] + OUT_C * nhw[:, None]
    tmp0 = tl.load(in_ptr2 + tl.broadcast_to(idx_y_c[None, :], acc.shape), mask, other=0.0).to(tl.float32)
    tmp1 = acc + tmp0
    tl.store(out_ptr0 + tl.broadcast_to(xindex, acc.shape), tmp1, mask)


SPACE: Space = {
    "kwargs": {"BLOCK_M": [64, 128, 256], "BLOCK_N": [16, 64, 128, 256], "BLOCK_K": [16, 32, 64]},
    "num_warps": [4, 8],
    "num_stages": [2, 4],
    "where": lambda c: (
        c["num_warps"] * 1024 <= c["BLOCK_M"] * c["BLOCK_N"] <= c["num_warps"] * 4096
        and (c["num_stages"] == 2 or c["BLOCK_K"] >= 32)
    ),
}


def _make(
    shape: tuple[int, int, int, int], tiny: tuple[int, int, int, int], device: str, small: bool = False
) -> Data:
    batch, side, channels, filters = tiny if small else shape
    x = normal((batch, side, side, channels), device, seed=1)
    w = normal((filters, 3, 3, channels), device, seed=2, scale=(9 * channels) ** -0.5)
    bias = normal((filters,), device, seed=3)
    y = unset((batch, side, side, filters), device)
    return {
        "args": (x, w, bias, y, batch, side, side, channels, filters),
        "kwargs": {"KERNEL_H": 3, "KERNEL_W": 3, "PADDING_H": 1, "PADDING_W": 1},
        "grid": lambda meta: (
            triton.cdiv(batch * side * side, meta["BLOCK_M"]),
            triton.cdiv(filters, meta["BLOCK_N"]),
        ),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, w, bias = (t.float() for t in data["args"][:3])
    y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), bias, padding=1)
    return (y.permute(0, 2, 3, 1),)


CASES = [
    Case(
        name=f"tem_fused_convolution/{b}x{s}x{s}x{c}/{f}",
        kernel=tem_fused_convolution,
        key=("ks0", "ks1", "ks2", "ks3", "ks4"),
        space=SPACE,
        make=partial(_make, (b, s, c, f), (2, 7, 20, 35)),
        reference=_reference,
        tolerance=(1e-2, 1e-2),
        flops=2.0 * b * s * s * c * f * 9,
        bytes=2.0 * (b * s * s * (c + f) + 9 * c * f + f),
    )
    for b, s, c, f in [
        (32, 64, 64, 64),
        (64, 32, 128, 128),
        (128, 16, 256, 256),
        (16, 64, 320, 320),
        (16, 32, 640, 640),
        (16, 16, 1280, 1280),
        (16, 128, 16, 64),
        (16, 256, 128, 16),
        (16, 16, 512, 512),
    ]
]
