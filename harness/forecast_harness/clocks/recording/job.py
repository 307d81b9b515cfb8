"""The job of a compile worker: one cell without a device, asked to record one solution at some cases."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from forecast_harness.sandbox.cell import CandidateFault, Cell
from forecast_harness.sandbox.jobs import CellAnswer, Fault, TensorBytes
from forecast_harness.sandbox.judge_process import JobContext

_RECORD = "forecast_harness.clocks.recording.solution:record"


def main(work: JobContext) -> CellAnswer:
    """The payload: what `solution.record` takes, with `cases` instead of `case` and with `requests`, each of which has
    `options`, `choice` and `launches`, one for each case or none.

    The value is a list, of each request `cases` (what each case gave) and `seconds`; None for one of several that
    raised: asked alone, it says why. Arrays are named `REQUEST/CASE/ARRAY`.
    """
    asked = dict(work.payload)
    cases, requests = asked.pop("cases"), asked.pop("requests")
    told: list[dict[str, Any] | None] = []
    code: dict[str, TensorBytes] = {}
    with work.cell() as cell:
        for number, request in enumerate(requests):
            began = time.perf_counter()
            try:
                values, images = _recorded(cell, {**asked, **request}, cases)
            except CandidateFault as fault:
                if len(requests) == 1 or fault.fault is not Fault.EXCEPTION:  # after which the cell is gone
                    raise
                told.append(None)
                continue
            told.append({"cases": values, "seconds": time.perf_counter() - began})
            code |= {f"{number}/{name}": image for name, image in images.items()}
    return CellAnswer(told, code)


def _recorded(
    cell: Cell, asked: dict[str, Any], cases: Sequence[Mapping[str, Any]]
) -> tuple[list[Any], dict[str, TensorBytes]]:
    """What the cell says of each case, and the arrays, by `CASE/ARRAY`. Raises `CandidateFault`."""
    launches = asked.pop("launches")
    values: list[Any] = []
    images: dict[str, TensorBytes] = {}
    for number, case in enumerate(cases):
        launch = launches[number] if launches else None
        answer = cell.ask(_RECORD, {**asked, "case": case, "launch": launch})
        values.append(answer.value)
        images |= {f"{number}/{name}": one for name, one in answer.arrays.items()}
    return values, images
