"""Bound what a decision may spend, or forbid it to measure at all.

Output (numbers may differ):

    budget of 3:    measured 3, evidence: measured
    exhaustive:     measured 16, evidence: measured
    skip:           measured 0, evidence: forecast
    deterministic:  measured 0, evidence: forecast
    frozen, stored: measured 0, evidence: stored
    frozen, new:    FrozenMissError
"""

import tempfile
from typing import Any

import torch
import triton
import triton.language as tl

from forecast_autotune import Budget, ForecastAutotuner, FrozenMissError, forecast_autotune
from forecast_integrations.triton.null_device import null_device

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256, 512, 1024) for w in (1, 2, 4, 8)]


def scale(x, out, n, BLOCK: tl.constexpr):
    """out = 2 x, for n elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def tune(label: str, n: int = 4096, **options: Any) -> None:
    """Decorate the kernel anew, launch it once and print what was decided."""
    kernel: ForecastAutotuner = forecast_autotune(configs=CONFIGS, key=["n"], **options)(triton.jit(scale))
    x = torch.empty(n)
    kernel[lambda p: (triton.cdiv(n, p["BLOCK"]),)](x, x, n)
    decision = kernel.decision
    print(f"{label:15} measured {decision.measured}, evidence: {decision.evidence}")


# Every option has a variable that sets it for a whole process, e.g. FORECAST_AUTOTUNE_MODE=skip.
with null_device(), tempfile.TemporaryDirectory() as store:
    tune("budget of 3:", budget=Budget(measurements=3, seconds=60), store=store)
    tune("exhaustive:", mode="exhaustive", store=False)
    tune("skip:", mode="skip", store=False)
    tune("deterministic:", mode="deterministic", store=False)
    tune("frozen, stored:", mode="frozen", store=store)
    try:
        tune("frozen, new:", n=8192, mode="frozen", store=store)
    except FrozenMissError as error:
        print(f"{'frozen, new:':15} {type(error).__name__}")
