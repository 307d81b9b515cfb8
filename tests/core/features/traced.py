"""Facts of kernels that tests define, traced as a call would be and without a device."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from forecast_autotune.features.trace import trace
from forecast_autotune.features.ttir.extraction import TtirFacts, extract_facts
from forecast_autotune.records import Argument


def read(fn: Any, args: tuple[Any, ...], meta: dict[str, int], grid: tuple[int, ...] = (64,)) -> TtirFacts:
    """Facts of a kernel called with tensors (given as dtype and shape) and integers."""
    live = [a if isinstance(a, int) else torch.empty(a[1], dtype=a[0], device="meta") for a in args]
    described = [
        Argument(name, "scalar", value=a)
        if isinstance(a, int)
        else Argument(name, "tensor", str(a.dtype), tuple(a.shape))
        for name, a in zip(fn.arg_names, live, strict=False)
    ]
    return extract_facts(trace(fn, live, {}, meta), described, grid)


@triton.jit
def gathered(x, index, y, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + tl.load(index + i)))
