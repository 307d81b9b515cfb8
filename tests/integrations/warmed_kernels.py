"""Tuned kernels of a program that is warmed without being run: found by module and name."""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Pair(NamedTuple):
    """Two inputs of one kernel."""

    x: Any
    more: tuple[Any, ...]


@autotune(configs=LISTED, key=["n"])
@triton.jit
def add_all(pair, out, n, BLOCK: tl.constexpr):
    """out = the sum of all tensors of a named tuple."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(pair.x + i, mask=i < n).to(tl.float32)
    for k in tl.static_range(len(pair.more)):
        value += tl.load(pair.more[k] + i, mask=i < n).to(tl.float32)
    tl.store(out + i, value, mask=i < n)


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
    for tuner in (scale, gather, add_all):
        tuner.cache.clear()
        tuner.__dict__.pop("_forecast", None)
        kernel: Any = tuner
        while hasattr(kernel, "fn") and not isinstance(kernel, triton.JITFunction):
            kernel = kernel.fn
        kernel.device_caches.clear()
    for tuner in (scale, add_all):
        tuner._engine.__init__(tuner._engine.options)
