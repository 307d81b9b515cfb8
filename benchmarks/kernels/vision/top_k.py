"""Largest k of each row by repeated maximum: values and places apart, or packed into one 64-bit key."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "sort", "vision"


@triton.heuristics({"WIDTH": lambda args: triton.next_power_of_2(args["cols"])})
@triton.jit
def vis_top_k(
    x_ptr, value_ptr, index_ptr, rows, cols, k, WIDTH: tl.constexpr, ROWS: tl.constexpr, PACKED: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    keep = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + row[:, None] * cols + col[None, :], mask=keep, other=float("-inf"))
    if PACKED:
        # Bits of a float, turned so that they order like integers; the low half prefers small places.
        bits = x.to(tl.int32, bitcast=True)
        bits ^= (bits >> 31) & 0x7FFFFFFF
        keys = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - col).to(tl.int64)[None, :]
        for i in range(k):
            best = tl.max(keys, axis=1)
            keys = tl.where(keys == best[:, None], -0x7FFFFFFFFFFFFFFF, keys)
            found = (best >> 32).to(tl.int32)
            found ^= (found >> 31) & 0x7FFFFFFF
            place = 0x7FFFFFFF - (best & 0xFFFFFFFF).to(tl.int32)
            tl.store(value_ptr + row * k + i, found.to(tl.float32, bitcast=True), mask=row < rows)
            tl.store(index_ptr + row * k + i, place, mask=row < rows)
    else:
        for i in range(k):
            value, place = tl.max(x, axis=1, return_indices=True)
            x = tl.where(col[None, :] == place[:, None], float("-inf"), x)
            tl.store(value_ptr + row * k + i, value, mask=row < rows)
            tl.store(index_ptr + row * k + i, place, mask=row < rows)


SPACE: Space = {
    "kwargs": {"ROWS": [1, 2, 4, 8, 16], "PACKED": [True, False]},
    "num_warps": [1, 2, 4, 8],
    "num_stages": [1],
    "where": lambda c: c["ROWS"] <= 8 * c["num_warps"],
}


def _make(shape: tuple[int, int, int], tiny: tuple[int, int, int], device: str, small: bool = False) -> Data:
    rows, cols, k = tiny if small else shape
    x = normal((rows, cols), device, dtype=torch.float32, seed=1)
    value = unset((rows, k), device, dtype=torch.float32)
    index = unset((rows, k), device, dtype=torch.int32)
    return {
        "args": (x, value, index, rows, cols, k),
        "kwargs": {},
        "grid": lambda meta: (triton.cdiv(rows, meta["ROWS"]),),
        "outputs": (index, value),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, k = data["args"][0], data["args"][5]
    # Stable, for equal values: the kernel takes the leftmost first.
    value, index = x.sort(dim=1, descending=True, stable=True)
    return index[:, :k].contiguous(), value[:, :k].contiguous()


CASES = [
    Case(
        name=f"vis_top_k/{rows}x{cols}-{k}",
        kernel=vis_top_k,
        key=("rows", "cols", "k"),
        space=SPACE,
        make=partial(_make, (rows, cols, k), (7, 50, 3)),
        reference=_reference,
        tolerance=(0.0, 0.0),
        flops=1.0 * rows * cols * k,
        bytes=4.0 * rows * cols + 8.0 * rows * k,
    )
    for rows, cols, k in [
        (64, 128, 4),
        (8192, 128, 8),
        (131072, 128, 2),
        (1 << 20, 96, 6),
        (256, 1024, 8),
        (8192, 1024, 4),
        (65536, 1024, 8),
        (131072, 720, 20),
        (2048, 1024, 40),
    ]
]
