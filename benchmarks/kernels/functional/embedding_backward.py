"""Gradient of an embedding table: rows of tokens are added atomically where their index points."""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from benchmarks.kernels import Case, Data, Space, integers, normal
from benchmarks.kernels.functional.helpers import inside, tile_range

FAMILY, HAND = "atomics", "functional"


@triton.jit
def scatter_rows(out_ptr, index, keep, cols, values, N):
    at = index[:, None] * N + cols[None, :]
    tl.atomic_add(out_ptr + at, values, mask=keep[:, None] & (cols[None, :] < N), sem="relaxed")


@triton.jit
def fn_embedding_backward(
    grad_ptr,
    index_ptr,
    out_ptr,
    M,
    N,
    padding_index,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    SWEEP: tl.constexpr,
):
    rows = tile_range(tl.program_id(0), TILE_M)
    index = tl.load(index_ptr + rows, mask=rows < M, other=-1).to(tl.int64)
    keep = (rows < M) & (index != padding_index)
    for step in tl.static_range(SWEEP):
        cols = tile_range(tl.program_id(1) * SWEEP + step, TILE_N)
        at = rows[:, None].to(tl.int64) * N + cols[None, :]
        grad = tl.load(grad_ptr + at, mask=inside(rows, cols, M, N), other=0.0, eviction_policy="evict_first")
        scatter_rows(out_ptr, index, keep, cols, grad.to(tl.float32), N)


SPACE: Space = {
    "kwargs": {"TILE_M": [1, 2, 8, 32], "TILE_N": [64, 256, 512, 2048], "SWEEP": [1, 4]},
    "num_warps": [1, 4, 8],
    "num_stages": [1],
    "where": lambda p: 64 <= p["TILE_M"] * p["TILE_N"] // p["num_warps"] <= 2048,
}

Shape = tuple[int, int, int, float]


def _make(shape: Shape, tiny: Shape, device: str, small: bool = False) -> Data:
    tokens, vocabulary, hidden, skew = tiny if small else shape
    grad = normal((tokens, hidden), device, dtype=torch.bfloat16, seed=1)
    index = integers(0, vocabulary, (tokens,), device, dtype=torch.int64, seed=2)
    if skew > 1:
        # As words do, small indices come up far more often.
        index = (((index + 0.5) / vocabulary) ** skew * vocabulary).long()
    out = torch.zeros(vocabulary, hidden, dtype=torch.float32, device=device)
    return {
        "args": (grad, index, out, tokens, hidden, 0),
        "kwargs": {},
        "grid": lambda meta: (
            triton.cdiv(tokens, meta["TILE_M"]),
            triton.cdiv(hidden, meta["TILE_N"] * meta["SWEEP"]),
        ),
        "outputs": (out,),
    }


def _reference(data: Data) -> tuple[torch.Tensor, ...]:
    grad, index, out = data["args"][:3]
    want = torch.zeros_like(out).index_add_(0, index, grad.float())
    want[0] = 0.0
    return (want,)


CASES = [
    Case(
        name=f"fn_embedding_backward/{tokens}x{vocabulary}x{hidden}{'_skewed' * (skew > 1)}",
        kernel=fn_embedding_backward,
        key=("M", "N"),
        space=SPACE,
        make=partial(_make, (tokens, vocabulary, hidden, skew), (21, 9, 150, skew)),
        reference=_reference,
        tolerance=(2e-3, 1e-3),
        reset_to_zero=("out_ptr",),
        flops=1.0 * tokens * hidden,
        bytes=2.0 * tokens * hidden + 8.0 * tokens + 4.0 * vocabulary * hidden,
    )
    for tokens, vocabulary, hidden, skew in [
        (8192, 32000, 4096, 1.0),
        (16384, 32000, 4096, 3.0),
        (4096, 50304, 768, 1.0),
        (65536, 1024, 128, 1.0),
        (32768, 30528, 1024, 4.0),
        (512, 32000, 2048, 1.0),
        (262144, 8192, 64, 2.0),
        (2048, 256, 8192, 1.0),
        (16384, 64, 512, 1.0),
    ]
]
