"""Small kernels that leave their BLOCK in `tag`, so that a clock can tell which config it has just run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def double(x, out, tag, n, BLOCK: tl.constexpr):
    """out = 2 x."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, 2 * tl.load(x + i, mask=inside), mask=inside)
    tl.store(tag, BLOCK)


@triton.jit
def double_even(x, out, tag, n, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """out = 2 x; without a mask if EVEN, so a wrong EVEN writes beyond n. Leaves EVEN in tag[1]."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(out + i, 2 * tl.load(x + i))
    else:
        inside = i < n
        tl.store(out + i, 2 * tl.load(x + i, mask=inside), mask=inside)
    tl.store(tag, BLOCK)
    tl.store(tag + 1, EVEN)


@triton.jit
def accumulate(acc, x, tag, n, BLOCK: tl.constexpr):
    """acc += x, in place: each extra launch shows in the result. `acc` may be None."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    if acc is not None:
        tl.store(acc + i, tl.load(acc + i, mask=inside) + tl.load(x + i, mask=inside), mask=inside)
    tl.store(tag, BLOCK)


@triton.jit
def double_shaped(x, out, tag, n, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """out = 2 x; SHAPE is any Python value, also an unhashable one."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, 2 * tl.load(x + i, mask=inside), mask=inside)
    tl.store(tag, BLOCK)
