"""Tuned kernels of a program that is warmed without being run: found by module and name."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from forecast_autotune import autotune

LISTED = [triton.Config({"BLOCK": b}, num_warps=w) for b in (64, 128) for w in (2, 4)]


@autotune(configs=LISTED, key=["n"])
@triton.jit
def scale(x, out, n, factor, BLOCK: tl.constexpr):
    """out = factor x."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, factor * tl.load(x + i, mask=i < n), mask=i < n)


@triton.autotune(configs=LISTED, key=["n", "SIGNED"])
@triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
@triton.jit
def gather(x, where, out, n, SIGNED: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """out = x[where], of a library that knows nothing of us."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(where + i, mask=i < n, other=0)
    tl.store(out + i, tl.load(x + at), mask=i < n)


def run_program() -> list[Any]:
    """What the program launches: two kernels, two keys each; the compiled kernels."""
    done = []
    for n in (1000, 100_000):
        x, where = torch.randn(n, dtype=torch.float16), torch.zeros(n, dtype=torch.int64)
        grid = lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)  # noqa: E731
        done.append(scale[grid](x, x, n, 0.5))
        done.append(gather[grid](x, where, x, n, SIGNED=True))
    return done


def forget() -> None:
    """Make the kernels what they are in a new process: nothing decided, nothing compiled."""
    for tuner in (scale, gather):
        tuner.cache.clear()
        tuner.__dict__.pop("_forecast", None)
        kernel: Any = tuner
        while hasattr(kernel, "fn") and not isinstance(kernel, triton.JITFunction):
            kernel = kernel.fn
        kernel.device_caches.clear()
    scale._engine.__init__(scale._engine.options)
