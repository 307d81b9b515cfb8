"""The job of a compile worker: one cell without a device, asked to record one solution at some cases."""

from __future__ import annotations

import torch._subclasses.fake_tensor  # noqa: F401  # loaded in the lane's server, once for all cells
import triton.compiler  # noqa: F401

from forecast_harness.machine_code.recording import solution, tensors
from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes
from forecast_harness.sandbox.judge_process import JobContext

_WARM = tensors.TensorRecorder  # its modes' modules are what takes seconds to import


def main(work: JobContext) -> CellAnswer:
    """The payload: what `solution.record` takes, with `cases` instead of `case`.

    The value is a list: what each case gave. Arrays are named `CASE/ARRAY`.
    """
    asked = dict(work.payload)
    cases = asked.pop("cases")
    values: list[object] = []
    code: dict[str, TensorBytes] = {}
    with work.cell() as cell:
        for number, case in enumerate(cases):
            answer = cell.ask(f"{solution.__name__}:record", {**asked, "case": case})
            values.append(answer.value)
            code |= {f"{number}/{name}": one for name, one in answer.arrays.items()}
    return CellAnswer(values, code)
