"""A small library of tuned kernels, as a program imports it: three kernels, found by module and name."""

from __future__ import annotations

import triton
import triton.language as tl

LISTED = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (256, 1024) for warps in (2, 4, 8)]


@triton.autotune(configs=LISTED, key=["n"])
@triton.jit
def scaled(x, out, n, factor, BLOCK: tl.constexpr):
    """out = factor x."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, factor * tl.load(x + i, mask=i < n), mask=i < n)


@triton.autotune(configs=LISTED, key=["n"])
@triton.jit
def added(x, y, out, n, BLOCK: tl.constexpr):
    """out = x + y."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


@triton.autotune(configs=LISTED, key=["n"])
@triton.jit
def gathered(x, where, out, n, BLOCK: tl.constexpr):
    """out = x[where]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(where + i, mask=i < n, other=0)
    tl.store(out + i, tl.load(x + at, mask=i < n), mask=i < n)


def first_pass(keys: int) -> int:
    """Launch every kernel at so many sizes; returns how many keys that were."""
    import torch

    where_to = "cuda" if torch.cuda.is_available() else "cpu"
    for number in range(keys):
        n = 4096 + 1000 * number
        x = torch.ones(n, dtype=torch.float16, device=where_to)
        where = torch.zeros(n, dtype=torch.int64, device=where_to)

        def grid(meta: dict[str, int], n: int = n) -> tuple[int]:
            return (triton.cdiv(n, meta["BLOCK"]),)

        scaled[grid](x, x, n, 0.5)
        added[grid](x, x, x, n)
        gathered[grid](x, where, x, n)
    return 3 * keys
