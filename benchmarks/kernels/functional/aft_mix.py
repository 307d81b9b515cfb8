"""Attention-free mixing: exponentiated position biases weigh exponentiated keys, two products a tile."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import grid_2d, inside, tile_range

FAMILY, HAND = "linear_attention", "functional"


@triton.jit
def position_weights(w_ptr, rows, cols, steps, dtype: tl.constexpr):
    """exp(w), zero for the future and past the end."""
    seen = inside(rows, cols, steps, steps) & (cols[None, :] <= rows[:, None])
    w = tl.load(w_ptr + grid_2d(rows, cols, steps), mask=seen, other=float("-inf"))
    return tl.exp(w.to(tl.float32)).to(dtype)


@triton.jit
def fn_aft_mix(
    q_ptr,
    k_ptr,
    v_ptr,
    w_ptr,
    y_ptr,
    steps,
    channels,
    TILE_T: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_S: tl.constexpr,
):
    batch = tl.program_id(2).to(tl.int64)
    pid_t = tl.num_programs(1) - 1 - tl.program_id(1)
    times = tile_range(pid_t, TILE_T)
    lanes = tile_range(tl.program_id(0), TILE_D)
    base = batch * steps * channels
    top = tl.zeros([TILE_T, TILE_D], dtype=tl.float32)
    bottom = tl.zeros([TILE_T, TILE_D], dtype=tl.float32)
    for start in range(0, min((pid_t + 1) * TILE_T, steps), TILE_S):
        past = start + tl.arange(0, TILE_S)
        mask = inside(past, lanes, steps, channels)
        at = base + grid_2d(past, lanes, channels)
        weights = position_weights(w_ptr, times, past, steps, q_ptr.dtype.element_ty)
        k = tl.exp(tl.load(k_ptr + at, mask=mask, other=0.0).to(tl.float32))
        v = tl.load(v_ptr + at, mask=mask, other=0.0).to(tl.float32)
        top = tl.dot(weights, (k * v).to(weights.dtype), top)
        bottom = tl.dot(weights, k.to(weights.dtype), bottom)
    at = base + grid_2d(times, lanes, channels)
    mask = inside(times, lanes, steps, channels)
    gate = tl.sigmoid(tl.load(q_ptr + at, mask=mask, other=0.0).to(tl.float32))
    tl.store(y_ptr + at, (gate * top / bottom).to(y_ptr.dtype.element_ty), mask=mask)


SPACE: Space = {
    "kwargs": {"TILE_T": [32, 64, 128], "TILE_D": [32, 64, 128], "TILE_S": [32, 64]},
    "num_warps": [4, 8],
    "num_stages": [2, 3],
}

Shape = tuple[int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    batch, steps, channels = tiny if small else shape
    dtype = torch.float16 if small else torch.bfloat16  # the interpreter has no dot product of bf16
    q, k, v = (normal((batch, steps, channels), device, dtype=dtype, seed=n) for n in (1, 2, 3))
    w = normal((steps, steps), device, dtype=dtype, seed=4, scale=0.5)
    y = unset((batch, steps, channels), device, dtype=dtype)
    return {
        "args": (q, k, v, w, y, steps, channels),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(channels, meta["TILE_D"]),
            triton.cdiv(steps, meta["TILE_T"]),
            batch,
        ),
        "outputs": (y,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    q, k, v, w = (t.float() for t in data["args"][:4])
    weights, k = w.exp().tril_(), k.exp()
    return (q.sigmoid() * (weights @ (k * v)) / (weights @ k),)


CASES = [
    Case(
        name=f"fn_aft_mix/{batch}x{steps}x{channels}",
        kernel=fn_aft_mix,
        key=("steps", "channels"),
        space=SPACE,
        make=partial(_make, (batch, steps, channels), (2, 70, 50)),
        reference=_reference,
        tolerance=(2e-2, 2e-2),
        # Two products over the visible half.
        flops=2.0 * batch * steps * steps * channels,
        bytes=8.0 * batch * steps * channels + 2.0 * steps * steps,
    )
    for batch, steps, channels in [
        (8, 1024, 768),
        (1, 4096, 1024),
        (2, 2048, 2560),
        (64, 256, 512),
        (1, 512, 4096),
        (16, 1024, 256),
        (4, 8192, 128),
        (32, 512, 1024),
        (1, 2048, 512),
    ]
]
