"""Kernels of the GPU tests: addition, in-place addition, and a matrix product that can ask for too much."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    """out = x + y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def accumulate(acc, x, n, BLOCK: tl.constexpr):
    """acc += x, in place: each extra launch shows in the result."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(acc + i, tl.load(acc + i, mask=inside) + tl.load(x + i, mask=inside), mask=inside)


@triton.jit
def matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr):
    """c = a b for contiguous fp16 matrices whose M and N are multiples of the blocks."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        at = k * BK + inner
        if EVEN_K:
            left = tl.load(a + rows[:, None] * K + at[None, :])
            right = tl.load(b + at[:, None] * N + columns[None, :])
        else:
            left = tl.load(a + rows[:, None] * K + at[None, :], mask=at[None, :] < K, other=0.0)
            right = tl.load(b + at[:, None] * N + columns[None, :], mask=at[:, None] < K, other=0.0)
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(tl.float16))
