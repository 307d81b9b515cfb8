"""Group sizes that vary from call to call, so that a few decisions serve all of them.

Output (numbers may differ):

    exact: 5 sizes, 5 decisions
    pow2:  5 sizes, 2 decisions, for n up to 2048 and 4096
"""

import torch
import triton
import triton.language as tl

from forecast_autotune import ForecastAutotuner, forecast_autotune
from forecast_integrations.triton.null_device import null_device

CONFIGS = [triton.Config({"BLOCK": 128}, num_warps=w) for w in (2, 4, 8)]
SIZES = (1040, 1500, 2048, 2064, 4000)


def scale(x, out, n, BLOCK: tl.constexpr):
    """out = 2 x, for n elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def launch_all(bucket: str) -> ForecastAutotuner:
    """Launch once per size; `bucket` may also be a function (name, value) -> value."""
    kernel = forecast_autotune(configs=CONFIGS, key=["n"], bucket=bucket, store=False)(triton.jit(scale))
    for n in SIZES:
        x = torch.empty(n)
        kernel[lambda p, n=n: (triton.cdiv(n, p["BLOCK"]),)](x, x, n)
    return kernel


with null_device():
    print(f"exact: {len(SIZES)} sizes, {len(launch_all('exact').cache)} decisions")
    decided = launch_all("pow2").cache
    print(f"pow2:  {len(SIZES)} sizes, {len(decided)} decisions, for n up to", end=" ")
    print(" and ".join(str(key[0]) for key in decided))
