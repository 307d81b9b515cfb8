"""Group norm with an optional SiLU, forward: one group of one image a program."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "norm", "rows"


@triton.jit
def rows_group_norm(
    Y_ptr,
    X_ptr,
    X_row_stride,
    X_col_stride,
    W_ptr,
    B_ptr,
    Mean_ptr,
    RSTD_ptr,
    n_groups,
    channels_per_group,
    plane,
    eps,
    BLOCK_SIZE: tl.constexpr,
    ONE_PASS: tl.constexpr,
    STAGES: tl.constexpr,
    SILU: tl.constexpr,
):
    batch_idx = tl.program_id(0).to(tl.int64)
    group_idx = tl.program_id(1)
    X_ptr += batch_idx * X_row_stride + group_idx * X_col_stride
    Y_ptr += batch_idx * X_row_stride + group_idx * X_col_stride
    hidden_size = channels_per_group * plane

    if ONE_PASS:
        s = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
        squared = tl.zeros((BLOCK_SIZE,), dtype=tl.float32)
        for i in tl.range(0, hidden_size, BLOCK_SIZE, num_stages=STAGES):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            x = tl.load(X_ptr + offsets, mask=offsets < hidden_size, other=0.0).to(tl.float32)
            s += x
            squared += x * x
        m = tl.sum(s) / hidden_size
        var = tl.sum(squared) / hidden_size - m * m
    else:
        total = 0.0
        for i in tl.range(0, hidden_size, BLOCK_SIZE, num_stages=STAGES):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            x = tl.load(X_ptr + offsets, mask=offsets < hidden_size, other=0.0).to(tl.float32)
            total += tl.sum(x)
        m = total / hidden_size
        spread = 0.0
        for i in tl.range(0, hidden_size, BLOCK_SIZE, num_stages=STAGES):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            mask = offsets < hidden_size
            x = tl.load(X_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
            centered = tl.where(mask, x - m, 0.0)
            spread += tl.sum(centered * centered)
        var = spread / hidden_size
    rstd = tl.rsqrt(var + eps)
    tl.store(Mean_ptr + batch_idx * n_groups + group_idx, m)
    tl.store(RSTD_ptr + batch_idx * n_groups + group_idx, rstd)

    for c in range(0, channels_per_group):
        channel = group_idx * channels_per_group + c
        scale = tl.load(W_ptr + channel).to(tl.float32) * rstd
        shift = tl.load(B_ptr + channel).to(tl.float32) - m * scale
        for i in range(0, plane, BLOCK_SIZE):
            offsets = i + tl.arange(0, BLOCK_SIZE)
            mask = offsets < plane
            x = tl.load(X_ptr + c * plane + offsets, mask=mask, other=0.0).to(tl.float32)
            y = x * scale + shift
            if SILU:
                y = y * tl.sigmoid(y)
            tl.store(Y_ptr + c * plane + offsets, y, mask=mask)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE": [256, 512, 1024, 2048, 4096, 8192],
        "ONE_PASS": [True, False],
        "STAGES": [1, 4],
    },
    "num_warps": [4, 8, 16],
    "num_stages": [1],
}


def _make(
    shape: tuple[int, int, int, int], tiny: tuple[int, int, int, int], device: str, small: bool = False
) -> Data:
    batch, channels, plane, groups = tiny if small else shape
    each = channels // groups
    x = normal((batch, channels, plane), device, seed=1)
    w, b = normal((channels,), device, seed=2), normal((channels,), device, seed=3)
    y = unset((batch, channels, plane), device)
    mean = unset((batch, groups), device, dtype=torch.float32)
    rstd = unset((batch, groups), device, dtype=torch.float32)
    return {
        "args": (y, x, channels * plane, each * plane, w, b, mean, rstd, groups, each, plane, 1e-5),
        "kwargs": {"SILU": True},
        "grid": lambda _: (batch, groups),
        "outputs": (y, mean, rstd),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    _, x, _, _, w, b, _, _, groups, _, _, eps = data["args"]
    grouped = x.float().view(x.shape[0], groups, -1)
    mean, var = grouped.mean(-1), grouped.var(-1, correction=0)
    y = torch.nn.functional.group_norm(x.float(), groups, w.float(), b.float(), eps)
    return torch.nn.functional.silu(y), mean, (var + eps).rsqrt()


CASES = [
    Case(
        name=f"rows_group_norm/{batch}x{channels}x{plane}g{groups}",
        kernel=rows_group_norm,
        key=("channels_per_group", "plane"),
        space=SPACE,
        make=partial(_make, (batch, channels, plane, groups), tiny),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        flops=10.0 * batch * channels * plane,
        bytes=4.0 * batch * channels * plane + 4.0 * channels + 8.0 * batch * groups,
    )
    for (batch, channels, plane, groups), tiny in [
        ((2, 320, 4096, 32), (2, 6, 90, 3)),
        ((16, 320, 4096, 32), (1, 4, 50, 2)),
        ((2, 1280, 256, 32), (1, 4, 50, 2)),
        ((16, 640, 1024, 32), (1, 4, 50, 2)),
        ((8, 1280, 64, 32), (1, 4, 50, 2)),
        ((1, 128, 262144, 32), (1, 4, 50, 2)),
        ((4, 128, 65536, 32), (1, 4, 50, 2)),
        ((64, 256, 1024, 32), (1, 4, 50, 2)),
        ((2, 960, 4096, 32), (1, 4, 50, 2)),
    ]
]
