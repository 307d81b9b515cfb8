"""Variance and mean of rows: Welford states grow lane by lane and are combined by a custom reduction."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import (
    grid_2d,
    inside,
    tile_range,
    welford_combine,
    welford_push,
)

FAMILY, HAND = "reduction", "functional"


@triton.jit
def fn_var_mean(x_ptr, var_ptr, mean_ptr, M, N, correction, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    rows = tile_range(tl.program_id(0), TILE_M)
    mean = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    m2 = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    count = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
    for start in range(0, N, TILE_N):
        cols = start + tl.arange(0, TILE_N)
        mask = inside(rows, cols, M, N)
        x = tl.load(x_ptr + grid_2d(rows, cols, N), mask=mask, other=0.0).to(tl.float32)
        mean, m2, count = welford_push(mean, m2, count, x, mask)
    mean, m2, count = tl.reduce((mean, m2, count), axis=1, combine_fn=welford_combine)
    tl.store(var_ptr + rows, m2 / (count - correction), mask=rows < M)
    tl.store(mean_ptr + rows, mean, mask=rows < M)


SPACE: Space = {
    "kwargs": {"TILE_M": [1, 2, 4, 8, 16], "TILE_N": [64, 256, 1024, 2048, 8192]},
    "num_warps": [2, 4, 8, 16],
    "num_stages": [2],
    "where": lambda p: 32 * p["num_warps"] <= p["TILE_M"] * p["TILE_N"] <= 8192,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    m, n = tiny if small else shape
    x = normal((m, n), device, dtype=torch.float32, seed=1) + 3.0
    var, mean = (unset((m,), device, dtype=torch.float32) for _ in range(2))
    return {
        "args": (x, var, mean, m, n, 1.0),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["TILE_M"]),),
        "outputs": (var, mean),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x = data["args"][0]
    var, mean = torch.var_mean(x.double() if x.numel() < 2**27 else x, -1, correction=1)
    return var, mean


CASES = [
    Case(
        name=f"fn_var_mean/{m}x{n}",
        kernel=fn_var_mean,
        key=("M", "N"),
        space=SPACE,
        make=partial(_make, (m, n), (3, 600)),
        reference=_reference,
        tolerance=(1e-4, 1e-4),
        # Running mean and squared deviation.
        flops=5.0 * m * n,
        bytes=4.0 * m * n + 8.0 * m,
    )
    for m, n in [
        (8192, 8192),
        (64, 65536),
        (1024, 1024),
        (65536, 768),
        (131072, 128),
        (16, 1048576),
        (4096, 4096),
        (256, 16384),
        (2048, 40960),
    ]
]
