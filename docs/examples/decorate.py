"""Decorate a Triton kernel: some of its 24 configs are compiled and timed, the others are forecast.

No GPU is needed: on the null device kernels are compiled for an H200, and a launch only advances a
made-up clock. On a GPU, leave out `with null_device()` and create the tensors with `device="cuda"`.

Output (numbers may differ):

    first call: 5 of 24 configs measured
    chosen: BLOCK_K=64 BLOCK_M=64 BLOCK_N=128 warps=8 stages=3
    why: measured 5 of 24; 7% risk of more than 2.0% regret is accepted
    second call: 1 launch
"""

import torch
import triton
import triton.language as tl

from forecast_autotune import forecast_autotune
from forecast_integrations.triton.null_device import null_device

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k}, num_warps=warps, num_stages=3)
    for m in (32, 64)
    for n in (32, 64, 128)
    for k in (32, 64)
    for warps in (4, 8)
]


# store=False keeps measurements in memory; without it they go to the user's cache directory.
@forecast_autotune(configs=CONFIGS, key=["M", "N", "K"], store=False)
@triton.jit
def matmul(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c[M, N] = a[M, K] @ b[K, N], row-major; sizes are multiples of the blocks."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        total += tl.dot(tl.load(a + rows[:, None] * K + inner), tl.load(b + inner[:, None] * N + columns))
    tl.store(c + rows[:, None] * N + columns, total.to(tl.float16))


def launch(size: int = 512) -> None:
    """Multiply two square matrices."""
    a, b, c = (torch.empty(size, size, dtype=torch.float16) for _ in range(3))
    matmul[lambda p: (size // p["BLOCK_M"], size // p["BLOCK_N"])](a, b, c, size, size, size)


with null_device() as device:
    launch()
    decision = matmul.decision
    print(f"first call: {decision.measured} of {decision.candidates} configs measured")
    print(f"chosen: {decision.chosen}")
    print(f"why: {decision.reason}")

    before = device.launches
    launch()
    print(f"second call: {device.launches - before} launch")
