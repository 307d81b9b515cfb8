"""A job for the sandbox's tests: the timed launches of a verification, with a limit of seconds."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from forecast_harness.sandbox.api import JobContext
from forecast_harness.targets.packs.schema import Language, Pack
from forecast_harness.verify import examiner as judging
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import problem_of


def timed_launches(work: JobContext) -> dict[str, Any]:
    """`launches` that were timed of those that were planned, and the `codes` of what was found."""
    pack, plan = Pack.from_json(work.payload["pack"]), VerificationPlan.from_json(work.payload["plan"])
    torch.set_num_threads(1)
    before = judging._MOST_TIMED_S
    judging._MOST_TIMED_S = {"cpu": float(work.payload["most_s"])}
    try:
        with tempfile.TemporaryDirectory() as folder, work.cell() as cell:
            judge = judging.SolutionExaminer(pack, problem_of(pack, Path(folder)), cell, plan, b"seed")
            assert judge.prepare("solution.py", "run", Language.TORCH) == []
            reasons = judge._timed_trials()
    finally:
        judging._MOST_TIMED_S = before
    return {"launches": len(judge._history), "codes": [str(r.code) for r in reasons]}
