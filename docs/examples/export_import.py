"""Move measurements from one machine to another: a new process there decides without measuring.

`forecast-autotune export FILE` and `forecast-autotune import FILE` do the same from a shell.

Output (numbers may differ):

    here:  measured 16 of 16
    file:  1 problem, 16 measurements
    there: measured 0 of 16, known before: 16, the same choice: True
"""

import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl

from forecast_autotune import Decision, Store, forecast_autotune, read_tables, write_tables
from forecast_integrations.triton.null_device import null_device

CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (128, 256, 512, 1024) for w in (1, 2, 4, 8)]


def scale(x, out, n, BLOCK: tl.constexpr):
    """out = 2 x, for n elements."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def decide(store: Store, mode: str) -> Decision:
    """Decide the kernel's config for one size, with what this store knows."""
    kernel = forecast_autotune(configs=CONFIGS, key=["n"], store=store, mode=mode)(triton.jit(scale))
    x = torch.empty(4096)
    kernel[lambda p: (triton.cdiv(4096, p["BLOCK"]),)](x, x, 4096)
    assert kernel.decision is not None  # it was launched
    return kernel.decision


with tempfile.TemporaryDirectory() as folder, null_device():
    here, there = Store(Path(folder, "here")), Store(Path(folder, "there"))
    first = decide(here, "exhaustive")
    print(f"here:  measured {first.measured} of {first.candidates}")

    file = Path(folder, "table.jsonl")
    write_tables(file, here.tables())
    (table,) = read_tables(file)
    print(f"file:  1 problem, {len(table.by_candidate())} measurements")

    for measurement in table.measurements:
        there.add(table.problem, measurement)
    second = decide(there, "tune")
    same = second.chosen == first.chosen
    print(
        f"there: measured {second.measured} of {second.candidates}, known before: {second.known}, "
        f"the same choice: {same}"
    )
