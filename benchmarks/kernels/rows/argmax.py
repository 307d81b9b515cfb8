"""Greedy sampling: the largest logit of each row and its first index."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, normal, unset

FAMILY, HAND = "sort", "rows"


@triton.jit
def rows_argmax(
    X_ptr,
    X_stride,
    value_ptr,
    index_ptr,
    n_cols,
    BLOCK_SIZE: tl.constexpr,
    PER_LANE: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_idx = tl.program_id(0).to(tl.int64)
    X_ptr += row_idx * X_stride
    lanes = tl.arange(0, BLOCK_SIZE)
    if PER_LANE:
        # Every lane keeps its own best; lanes meet once, at the end.
        best = tl.full((BLOCK_SIZE,), float("-inf"), dtype=tl.float32)
        where = tl.zeros((BLOCK_SIZE,), dtype=tl.int32)
        for i in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
            offsets = i + lanes
            x = tl.load(X_ptr + offsets, mask=offsets < n_cols, other=float("-inf")).to(tl.float32)
            where = tl.where(x > best, offsets, where)
            best = tl.maximum(best, x)
        top = tl.max(best, axis=0)
        chosen = tl.min(tl.where(best == top, where, n_cols), axis=0)
    else:
        top = float("-inf")
        chosen = 0
        for i in tl.range(0, n_cols, BLOCK_SIZE, num_stages=STAGES):
            offsets = i + lanes
            x = tl.load(X_ptr + offsets, mask=offsets < n_cols, other=float("-inf")).to(tl.float32)
            value, lane = tl.max(x, axis=0, return_indices=True)
            chosen = tl.where(value > top, i + lane, chosen)
            top = tl.maximum(top, value)
    tl.store(value_ptr + row_idx, top)
    tl.store(index_ptr + row_idx, chosen)


SPACE: Space = {
    "kwargs": {
        "BLOCK_SIZE": [256, 1024, 2048, 4096, 8192, 16384],
        "PER_LANE": [True, False],
        "STAGES": [1, 3],
    },
    "num_warps": [4, 8, 16],
    "num_stages": [1],
}


def _make(shape: tuple[int, int], tiny: tuple[int, int], device: str, small: bool = False) -> Data:
    rows, cols = tiny if small else shape
    x = normal((rows, cols), device, dtype=torch.bfloat16, seed=1)
    value = unset((rows,), device, dtype=torch.float32)
    index = unset((rows,), device, dtype=torch.int64)
    return {
        "args": (x, x.stride(0), value, index, cols),
        "kwargs": {},
        "grid": lambda _: (rows,),
        "outputs": (index, value),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    x, _, _, _, cols = data["args"]
    value = x.amax(-1)
    # torch.argmax may name any of several equal logits.
    place = torch.arange(cols, device=x.device, dtype=torch.int32)
    return torch.where(x == value[:, None], place, cols).amin(-1).long(), value.float()


CASES = [
    Case(
        name=f"rows_argmax/{rows}x{cols}",
        kernel=rows_argmax,
        key=("n_cols",),
        space=SPACE,
        make=partial(_make, (rows, cols), tiny),
        reference=_reference,
        tolerance=(1e-3, 1e-3),
        flops=1.0 * rows * cols,
        bytes=2.0 * rows * cols + 12.0 * rows,
    )
    for (rows, cols), tiny in [
        ((256, 128256), (4, 1500)),
        ((16, 128256), (2, 100)),
        ((2048, 151936), (2, 100)),
        ((1024, 32000), (2, 100)),
        ((64, 32000), (2, 100)),
        ((16384, 4096), (2, 100)),
        ((65536, 1024), (2, 100)),
        ((131072, 256), (2, 100)),
        ((4096, 50272), (2, 100)),
    ]
]
