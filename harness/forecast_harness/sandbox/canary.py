"""A small computation with a known answer: is the machine, and the device, still fit to judge anybody?"""

from __future__ import annotations

import operator
import sys
from typing import Any

from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import ResourceLimits, TensorArrays
from forecast_harness.sandbox.judge_process import JobContext

_MATRIX_SIZE = 192


CANARY_LIMITS = ResourceLimits(wall_s=30, cpu_s=60, memory_bytes=16 << 30, processes=1024, trusted_s=30)
"""A cold CUDA context takes seconds, on a machine under load many."""


def main(work: JobContext) -> str:
    """The job: ask a cell, as every candidate gets it, for a known answer; `ok` or a sentence."""
    try:
        with work.cell() as cell:
            return str(cell.ask(f"{__name__}:sing", work.payload).value)
    except CandidateFault as error:
        return f"the canary failed: {error}"


def sing(payload: dict[str, Any], arrays: TensorArrays, state: dict[str, Any]) -> str:
    """Compute in the cell."""
    return check_device(payload["device"])


def check_device(device: str | None) -> str:
    """Compute in integers, on the device if there is one; `ok`, or a sentence on the fault.

    The answer is exact in float32 (every partial sum is an integer below 2**24), so there is no tolerance
    to argue about. Without a device torch is used only if it is loaded. On a poisoned device even
    this may hang.
    """
    rows = [[(7 * i + 3 * j) % 11 for j in range(_MATRIX_SIZE)] for i in range(_MATRIX_SIZE)]
    try:
        product = _product(rows, device)
    except Exception as error:
        return f"the canary raised {type(error).__name__}: {error}"
    step = 17  # a sample of the entries, computed in Python's integers
    columns = list(zip(*rows, strict=True))
    for i in range(0, _MATRIX_SIZE, step):
        for j in range(0, _MATRIX_SIZE, step):
            expected = sum(a * b for a, b in zip(rows[i], columns[j], strict=True))
            if product[i][j] != expected:
                return f"the canary computed {product[i][j]} at ({i}, {j}), expected {expected}"
    return "ok"


def _product(rows: list[list[int]], device: str | None) -> list[list[float]]:
    if device is None and "torch" not in sys.modules:
        columns = list(zip(*rows, strict=True))
        return [[float(sum(map(operator.mul, row, column))) for column in columns] for row in rows]
    import torch

    where = "cpu" if device is None else "cuda"
    matrix = torch.tensor(rows, dtype=torch.float32, device=where)
    # Not as a product of matrices, for which a library of its own would be opened: every first lane waits for this.
    product = (matrix[:, :, None] * matrix[None]).sum(1)
    if device is not None:
        torch.cuda.synchronize()
    result: list[list[float]] = product.cpu().tolist()
    return result
