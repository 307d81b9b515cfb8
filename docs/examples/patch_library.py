"""Tune kernels that a library decorates with triton.autotune itself, without changing the library.

`forecast-autotune run SCRIPT` and FORECAST_AUTOTUNE=1 do the same without a line of code.

Output (numbers may differ; the first line goes to stderr):

    forecast_autotune scale: 16 candidates, all forecast, 8 measured, 8 trusted; ... chose BLOCK=128 ...
    patched: 8 of 16 configs timed, by Autotuner
    unpatched: 16 of 16 configs timed, by Autotuner
"""

import os
import tempfile

import torch
import triton
import triton.language as tl

from forecast_autotune import patch_triton, unpatch_triton
from forecast_integrations.triton.null_device import null_device

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256, 512, 1024) for w in (1, 2, 4, 8)]


# This part stands for the library.
@triton.autotune(configs=CONFIGS, key=["n"])
@triton.jit
def scale(x, out, n, BLOCK: tl.constexpr):
    """out = 2 x, for n elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def launch(n: int) -> str:
    """Launch for n elements, which asks for a decision; say what was timed for it, and by what."""
    x = torch.empty(n)
    scale[lambda p: (triton.cdiv(n, p["BLOCK"]),)](x, x, n)
    return f"{len(scale.configs_timings)} of {len(CONFIGS)} configs timed, by {type(scale).__name__}"


with null_device(), tempfile.TemporaryDirectory() as store:
    os.environ["FORECAST_AUTOTUNE_CACHE_DIR"] = store  # by default the user's cache directory
    os.environ["FORECAST_AUTOTUNE_SUMMARY"] = "1"  # one line per decision
    patch_triton()  # every tuner of the process, whether made before or after
    print("patched:", launch(4096))
    unpatch_triton()  # what is decided stays decided
    print("unpatched:", launch(8192))
