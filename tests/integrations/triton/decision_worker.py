"""Decides one kernel for two sizes on the null device; says which of the modules it is told about that loaded."""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from forecast_autotune import forecast_autotune
from forecast_integrations.triton.null_device import null_device
from tests.integrations.null import by_launch_options


@forecast_autotune(
    configs=[
        triton.Config({"BLOCK": block}, num_warps=warps)
        for block in (64, 128, 256, 512, 1024)
        for warps in (1, 2, 4, 8)
    ],
    key=["n"],
)
@triton.jit
def doubled(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) * 2, mask=offsets < n)


def main() -> None:
    with null_device(by_launch_options):
        for n in (100_000, 300_000):
            x, y = (torch.zeros(n, device="meta") for _ in range(2))
            doubled[lambda meta, n=n: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n)
    print(sorted(set(sys.argv[1:]) & sys.modules.keys()))


if __name__ == "__main__":
    main()
