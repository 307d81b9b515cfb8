"""Give a space instead of a list: value lists with constraints, expanded when the kernel is first called.

Output (numbers may differ):

    product of the lists: 144, allowed by the constraints: 114
    measured: 4
    chosen: BLOCK=2048 warps=8 stages=1 maxnreg=64
"""

import torch
import triton
import triton.language as tl

from forecast_autotune import Budget, Space, forecast_autotune
from forecast_integrations.triton.null_device import null_device

SPACE = Space(
    {"BLOCK": [64, 128, 256, 512, 1024, 2048]},
    num_warps=[1, 2, 4, 8],
    num_stages=[1, 2, 3],
    maxnreg=[None, 64],
    # Called with every parameter by name, launch options included; false leaves the candidate out.
    where=[lambda p: 32 * p["num_warps"] <= p["BLOCK"], lambda p: p["BLOCK"] < 2048 or p["num_warps"] > 2],
)


# On a real device the default budget measures more where the forecasts are unsure.
@forecast_autotune(configs=SPACE, key=["n"], budget=Budget(measurements=4), store=False)
@triton.jit
def row_sums(x, out, n, BLOCK: tl.constexpr):
    """out[row] = sum of x[row, :n]."""
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + row * n + i, mask=i < n, other=0.0))
    tl.store(out + row, total)


with null_device():
    x = torch.empty(256, 4096)
    row_sums[(256,)](x, torch.empty(256), 4096)

decision = row_sums.decision
print(f"product of the lists: {SPACE.upper_bound()}, allowed by the constraints: {decision.candidates}")
print(f"measured: {decision.measured}")
print(f"chosen: {decision.chosen}")
