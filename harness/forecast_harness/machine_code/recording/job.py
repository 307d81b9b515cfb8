"""The job of a compile worker: one cell without a device, asked to record one solution at some cases."""

from __future__ import annotations

from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes
from forecast_harness.sandbox.judge_process import JobContext

_RECORD = "forecast_harness.machine_code.recording.solution:record"


def main(work: JobContext) -> CellAnswer:
    """The payload: what `solution.record` takes, with `cases` and `launches` instead of `case` and `launch`.

    The value is a list: what each case gave. Arrays are named `CASE/ARRAY`.
    """
    asked = dict(work.payload)
    cases, launches = asked.pop("cases"), asked.pop("launches")
    values: list[object] = []
    code: dict[str, TensorBytes] = {}
    with work.cell() as cell:
        for number, case in enumerate(cases):
            answer = cell.ask(
                _RECORD, {**asked, "case": case, "launch": launches[number] if launches else None}
            )
            values.append(answer.value)
            code |= {f"{number}/{name}": one for name, one in answer.arrays.items()}
    return CellAnswer(values, code)
