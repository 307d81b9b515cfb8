"""The verification job: reads the pack, opens a cell for the candidate, runs the trials."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from forecast_autotune.errors import RecordError
from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import CellAnswer, Fault
from forecast_harness.sandbox.judge_process import JobContext
from forecast_harness.targets.packs.schema import Language, Pack
from forecast_harness.verify.admission import admission_failures
from forecast_harness.verify.judge import SolutionJudge
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problems.external_tasks import problem_of
from forecast_harness.verify.verdict import Reason, ReasonCode

SOLUTION_FILE = "solution.py"
_SHARE_OF_LIMIT = 0.3
"""Of a cell's wall seconds, after which no launch is asked for that the trials do not have."""


def main(work: JobContext) -> CellAnswer:
    """Examine one solution of one pack. The payload has `pack`, `entry`, `language`, `plan`, `seed`.

    The value has `reasons`, `trials`, `checked` and `facts`. A broken pack raises `RecordError`, which the lane
    reports as the harness's own failure.
    """
    asked = work.payload
    pack, plan = Pack.from_json(asked["pack"]), VerificationPlan.from_json(asked["plan"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, work.cell() as cell:
        # Drawn after the candidate's process began, so that no copy of it is in there.
        nonce = asked["seed"] or os.urandom(16).hex()
        problem = problem_of(pack, Path(folder))
        judge = SolutionJudge(pack, problem, cell, plan, hashlib.sha256(nonce.encode()).digest())
        judge.ends = time.perf_counter() + _SHARE_OF_LIMIT * work.limits.wall_s
        try:
            reasons = (
                judge.prepare(SOLUTION_FILE, asked["entry"], Language(asked["language"])) or judge.examine()
            )
        except CandidateFault as fault:
            reasons = [reason_of_fault(fault, judge)]
    facts: dict[str, Any] = {
        "seed": nonce,
        "error_over_limit": float(f"{judge.worst_error_ratio:.4g}")
        if judge.worst_error_ratio < 1e30
        else None,
    }
    facts |= judge.facts
    said = {"reasons": [r.to_json() for r in reasons], "trials": judge.trials}
    return CellAnswer({**said, "checked": judge.checked_launches.to_json(), "facts": facts})


def admit(work: JobContext) -> CellAnswer:
    """Check one pack without any candidate. The payload has `pack`; the value is a list of sentences."""
    pack = Pack.from_json(work.payload["pack"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = admission_failures(pack, problem_of(pack, Path(folder)))
        except RecordError as error:
            found = [str(error)]
    return CellAnswer(found)


_CODE_BY_FAULT: dict[Fault, ReasonCode] = {
    Fault.TIMEOUT: ReasonCode.TIMEOUT,
    Fault.CPU_TIME: ReasonCode.TIMEOUT,
    Fault.EXIT_UNFINISHED: ReasonCode.ESCAPE,
    Fault.FORBIDDEN_CALL: ReasonCode.ESCAPE,
    Fault.FORGED: ReasonCode.ESCAPE,
    Fault.KILLED: ReasonCode.ESCAPE,
    Fault.RAN_WHILE_STOPPED: ReasonCode.ESCAPE,
}


def reason_of_fault(error: CandidateFault, judge: SolutionJudge) -> Reason:
    """The reason that a candidate's fault amounts to."""
    detail: Any = str(error)
    code = _CODE_BY_FAULT.get(error.fault, ReasonCode.FAILS)
    if "StateDictError" in detail:
        code = ReasonCode.STATE_DICT
    return Reason(code, detail[:2000], f"after {judge.trials} launches")
