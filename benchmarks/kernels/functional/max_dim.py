"""Maximum and its index along a middle dimension, by a reduction over (value, index) pairs."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset
from benchmarks.kernels.functional.helpers import first_max, tile_range

FAMILY, HAND = "sort", "functional"


@triton.jit
def fn_max_dim(
    x_ptr,
    index_ptr,
    value_ptr,
    rows_total,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    REDUCE_LATE: tl.constexpr,
):
    # A row is an (outer, inner) pair, so that short inner dimensions still fill a tile.
    rows = tile_range(tl.program_id(0), TILE_M).to(tl.int64)
    base = rows // K * N * K + rows % K
    inner = rows < rows_total
    if REDUCE_LATE:
        values = tl.full([TILE_N, TILE_M], float("-inf"), dtype=tl.float32)
        indices = tl.zeros([TILE_N, TILE_M], dtype=tl.int32) + tl.arange(0, TILE_N)[:, None]
    else:
        value = tl.full([TILE_M], float("-inf"), dtype=tl.float32)
        index = tl.zeros([TILE_M], dtype=tl.int32)
    for start in range(0, N, TILE_N):
        cols = start + tl.arange(0, TILE_N)
        mask = (cols < N)[:, None] & inner[None, :]
        at = base[None, :] + cols[:, None] * K
        x = tl.load(x_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
        where = tl.zeros([TILE_N, TILE_M], dtype=tl.int32) + cols[:, None]
        if REDUCE_LATE:
            values, indices = first_max(values, indices, x, where)
        else:
            value_tile, index_tile = tl.reduce((x, where), axis=0, combine_fn=first_max)
            value, index = first_max(value, index, value_tile, index_tile)
    if REDUCE_LATE:
        value, index = tl.reduce((values, indices), axis=0, combine_fn=first_max)
    tl.store(index_ptr + rows, index.to(tl.int64), mask=inner)
    tl.store(value_ptr + rows, value.to(value_ptr.dtype.element_ty), mask=inner)


SPACE: Space = {
    "kwargs": {
        "TILE_M": [8, 32, 128, 256],
        "TILE_N": [4, 16, 64, 256],
        "REDUCE_LATE": [False, True],
    },
    "num_warps": [2, 4, 8],
    "num_stages": [2],
    "where": lambda p: max(256, 64 * p["num_warps"]) <= p["TILE_M"] * p["TILE_N"] <= 8192,
}

Shape = tuple[int, int, int]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    m, n, k = tiny if small else shape
    x = normal((m, n, k), device, seed=1)
    index, value = unset((m, k), device, dtype=torch.int64), unset((m, k), device)
    return {
        "args": (x, index, value, m * k, n, k),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(m * k, meta["TILE_M"]),),
        "outputs": (index, value),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x = data["args"][0]
    value = x.amax(1)
    # The first of equal values, said so that no library's choice among them matters.
    place = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)[None, :, None]
    return torch.where(x == value[:, None], place, x.shape[1]).amin(1).long(), value.float()


CASES = [
    Case(
        name=f"fn_max_dim/{m}x{n}x{k}",
        kernel=fn_max_dim,
        key=("rows_total", "N", "K"),
        space=SPACE,
        make=partial(_make, (m, n, k), (3, 21, 9)),
        reference=_reference,
        tolerance=(0.0, 0.0),
        flops=1.0 * m * n * k,
        bytes=2.0 * m * n * k + 10.0 * m * k,
    )
    for m, n, k in [
        (8, 32, 65536),
        (16, 160, 16384),
        (1, 4096, 4096),
        (64, 512, 256),
        (32, 8192, 16),
        (1024, 1024, 64),
        (1, 1024, 16384),
        (256, 96, 784),
        (4096, 128, 128),
    ]
]
