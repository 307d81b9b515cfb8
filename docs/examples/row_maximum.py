"""Tune one kernel and keep its decision, which `forecast-autotune explain row_maximum` explains.

Output (numbers may differ):

    18 of 60 configs measured, chosen: BLOCK=512 warps=16 stages=1
"""

import torch
import triton
import triton.language as tl

from forecast_autotune import Space, forecast_autotune
from forecast_integrations.triton.null_device import null_device


@forecast_autotune(
    configs=Space({"BLOCK": [256, 512, 1024, 2048]}, num_warps=[1, 2, 4, 8, 16], num_stages=[1, 2, 3]),
    key=["n"],
)
@triton.jit
def row_maximum(x, out, n, BLOCK: tl.constexpr):
    """out[row] = the largest of x[row, n]."""
    row = tl.program_id(0)
    best = -float("inf")
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.max(tl.load(x + row * n + i, mask=i < n, other=-float("inf"))))
    tl.store(out + row, best)


with null_device():
    x, out = torch.randn(512, 8192), torch.empty(512)
    row_maximum[(512,)](x, out, 8192)

decision = row_maximum.decision
print(f"{decision.measured} of {decision.candidates} configs measured, chosen: {decision.chosen}")
