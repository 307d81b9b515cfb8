"""Jobs of compile workers that compile nothing."""

from __future__ import annotations

from forecast_harness.sandbox.jobs import CellAnswer
from forecast_harness.sandbox.judge_process import JobContext


def say(work: JobContext) -> CellAnswer:
    return CellAnswer(work.payload["word"])
