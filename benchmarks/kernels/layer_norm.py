"""Layer normalisation, forward, in the idiom of Triton's tutorial: one row a program, three loops."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "norm", "tutorial"


@triton.jit
def _layer_norm_fwd_fused(
    X,
    Y,
    W,
    B,
    Mean,
    Rstd,
    stride,
    N,
    eps,
    BLOCK_SIZE: tl.constexpr,
):
    row = tl.program_id(0)
    Y += row * stride
    X += row * stride
    _mean = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        a = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        _mean += a
    mean = tl.sum(_mean, axis=0) / N
    _var = tl.zeros([BLOCK_SIZE], dtype=tl.float32)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        x = tl.load(X + cols, mask=cols < N, other=0.0).to(tl.float32)
        x = tl.where(cols < N, x - mean, 0.0)
        _var += x * x
    var = tl.sum(_var, axis=0) / N
    rstd = 1 / tl.sqrt(var + eps)
    tl.store(Mean + row, mean)
    tl.store(Rstd + row, rstd)
    for off in range(0, N, BLOCK_SIZE):
        cols = off + tl.arange(0, BLOCK_SIZE)
        mask = cols < N
        w = tl.load(W + cols, mask=mask)
        b = tl.load(B + cols, mask=mask)
        x = tl.load(X + cols, mask=mask, other=0.0).to(tl.float32)
        y = (x - mean) * rstd * w + b
        tl.store(Y + cols, y, mask=mask)


SPACE: Space = {
    "kwargs": {"BLOCK_SIZE": [64, 128, 256, 512, 1024, 2048, 4096, 8192]},
    "num_warps": [1, 2, 4, 8, 16],
    "num_stages": [1, 3],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    m, n = tiny if small else shape
    x = normal((m, n), device, seed=1)
    if device != "meta":  # there any arithmetic has torch import its compiler, for a second
        x += 0.5
    w, b = normal((n,), device, seed=2), normal((n,), device, seed=3)
    y = unset((m, n), device)
    mean, rstd = unset((m,), device, dtype=torch.float32), unset((m,), device, dtype=torch.float32)
    return {
        "args": (x, y, w, b, mean, rstd, x.stride(0), n, 1e-5),
        "kwargs": {},
        "grid": lambda _: (m,),
        "outputs": (y, mean, rstd),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, _, w, b, _, _, _, _, eps = data["args"]
    x = x.float()
    mean = x.mean(-1)
    rstd = (x.var(-1, correction=0) + eps).rsqrt()
    return (x - mean[:, None]) * rstd[:, None] * w.float() + b.float(), mean, rstd


CASES = [
    Case(
        name=f"layer_norm/{m}x{n}",
        kernel=_layer_norm_fwd_fused,
        key=("N",),
        space=SPACE,
        make=partial(_make, (m, n), tiny),
        reference=_reference,
        tolerance=(5e-3, 5e-3),
        # Mean 1, variance 3, normalise and scale 4.
        flops=8.0 * m * n,
        bytes=2.0 * (2 * m * n + 2 * n) + 4.0 * 2 * m,
    )
    for (m, n), tiny in [((8192, 8192), (3, 300)), ((16384, 1024), (4, 64)), ((2048, 2560), (2, 1000))]
]
