"""Running maximum with its position: a scan of pairs inside a tile, a carried pair between tiles."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import grid_2d, inside, last_max, tile_range

FAMILY, HAND = "scan", "functional"


@triton.jit
def fn_cummax(x_ptr, index_ptr, value_ptr, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    rows = tile_range(tl.program_id(0), TILE_M)
    value = tl.full([TILE_M, 1], float("-inf"), dtype=tl.float32)
    index = tl.zeros([TILE_M, 1], dtype=tl.int32)
    for start in range(0, N, TILE_N):
        cols = start + tl.arange(0, TILE_N)
        at = grid_2d(rows, cols, N)
        mask = inside(rows, cols, M, N)
        x = tl.load(x_ptr + at, mask=mask, other=float("-inf"))
        place = tl.zeros([TILE_M, TILE_N], dtype=tl.int32) + cols[None, :]
        values, places = tl.associative_scan((x, place), 1, last_max)
        values, places = last_max(value, index, values, places)
        tl.store(value_ptr + at, values, mask=mask)
        tl.store(index_ptr + at, places, mask=mask)
        # Neither falls along a row, so the last column holds the maximum of both.
        value = tl.max(values, axis=1)[:, None]
        index = tl.max(places, axis=1)[:, None]


SPACE: Space = {
    "kwargs": {"TILE_M": [1, 2, 8, 32], "TILE_N": [32, 64, 128, 512, 1024, 4096]},
    "num_warps": [1, 4, 8],
    "num_stages": [1],
    "where": lambda p: 32 * p["num_warps"] <= p["TILE_M"] * p["TILE_N"] <= 8192,
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    m, n = tiny if small else shape
    x = normal((m, n), device, dtype=torch.float32, seed=1)
    index, value = unset((m, n), device, dtype=torch.int32), unset((m, n), device, dtype=torch.float32)
    return {
        "args": (x, index, value, m, n),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m, meta["TILE_M"]),),
        "outputs": (index, value),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    value, index = data["args"][0].cummax(-1)
    return index.int(), value


CASES = [
    Case(
        name=f"fn_cummax/{m}x{n}",
        kernel=fn_cummax,
        key=("M", "N"),
        space=SPACE,
        make=partial(_make, (m, n), (3, 75)),
        reference=_reference,
        tolerance=(0.0, 0.0),
        flops=1.0 * m * n,
        bytes=12.0 * m * n,
    )
    for m, n in [
        (4096, 4096),
        (65536, 256),
        (16, 65536),
        (512, 2048),
        (8192, 1024),
        (262144, 64),
        (128, 16384),
        (2048, 8192),
        (1024, 512),
    ]
]
