"""What the kernels of this hand share: blocks of strided matrices, and the order of tiles."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

SMS = 132
"""Multiprocessors of the device that the persistent grids were sized for."""


@triton.jit
def load_block(
    base,
    shape_0,
    shape_1,
    stride_0,
    stride_1,
    offset_0,
    offset_1,
    SIDE_0: tl.constexpr,
    SIDE_1: tl.constexpr,
    CHECK_0: tl.constexpr = True,
    CHECK_1: tl.constexpr = True,
):
    # 64-bit offsets, and zeros wherever a checked side reaches over the boundary.
    at_0 = (offset_0 + tl.arange(0, SIDE_0)).to(tl.int64)[:, None]
    at_1 = (offset_1 + tl.arange(0, SIDE_1)).to(tl.int64)[None, :]
    pointers = base + at_0 * stride_0 + at_1 * stride_1
    if CHECK_0 and CHECK_1:
        inside = (at_0 >= 0) & (at_0 < shape_0) & (at_1 >= 0) & (at_1 < shape_1)
        block = tl.load(pointers, mask=inside, other=0.0)
    elif CHECK_0:
        block = tl.load(pointers, mask=(at_0 >= 0) & (at_0 < shape_0), other=0.0)
    elif CHECK_1:
        block = tl.load(pointers, mask=(at_1 >= 0) & (at_1 < shape_1), other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def store_block(
    base,
    value,
    shape_0,
    shape_1,
    stride_0,
    stride_1,
    offset_0,
    offset_1,
    SIDE_0: tl.constexpr,
    SIDE_1: tl.constexpr,
):
    at_0 = (offset_0 + tl.arange(0, SIDE_0)).to(tl.int64)[:, None]
    at_1 = (offset_1 + tl.arange(0, SIDE_1)).to(tl.int64)[None, :]
    pointers = base + at_0 * stride_0 + at_1 * stride_1
    inside = (at_0 < shape_0) & (at_1 < shape_1)
    tl.store(pointers, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_line(base, shape, offset, SIDE: tl.constexpr):
    at = offset + tl.arange(0, SIDE)
    return tl.load(base + at, mask=at < shape, other=0.0)


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    # Down GROUP_M rows of tiles, then one column to the right: neighbours share operands in L2.
    band = GROUP_M * tiles_n
    top = (tile // band) * GROUP_M
    height = tl.minimum(tiles_m - top, GROUP_M)
    within = tile % band
    return top + within % height, within // height


@triton.jit
def halves(tile, ROWS: tl.constexpr, COLS: tl.constexpr):
    # The left and the right half of a tile, to be stored one after the other.
    pair = tl.permute(tl.reshape(tile, (ROWS, 2, COLS // 2)), (0, 2, 1))
    return tl.split(pair)
