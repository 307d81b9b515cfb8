"""The verification job: reads the pack, opens a cell for the candidate, runs the trials."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from forecast_autotune.errors import RecordError
from forecast_harness.packs.schema import Language, Pack
from forecast_harness.sandbox.cell import CandidateFault
from forecast_harness.sandbox.jobs import Answer, Fault
from forecast_harness.sandbox.worker import Work
from forecast_harness.verify.admission import refused
from forecast_harness.verify.foreign import problem_of
from forecast_harness.verify.judge import Judge
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.verdict import Code, Reason

FILE = "solution.py"


def main(work: Work) -> Answer:
    """Examine one solution of one pack. The payload has `pack`, `entry`, `language`, `plan`, `seed`.

    The value has `reasons`, `trials` and `facts`. A broken pack raises `RecordError`, which the lane
    reports as the harness's own failure.
    """
    asked = work.payload
    pack, plan = Pack.from_json(asked["pack"]), Plan.from_json(asked["plan"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, work.cell() as cell:
        # Drawn after the candidate's process began, so that no copy of it is in there.
        nonce = asked["seed"] or os.urandom(16).hex()
        problem = problem_of(pack, Path(folder))
        judge = Judge(pack, problem, cell, plan, hashlib.sha256(nonce.encode()).digest())
        try:
            reasons = judge.prepare(FILE, asked["entry"], Language(asked["language"])) or judge.examine()
        except CandidateFault as fault:
            reasons = [faulted(fault, judge)]
    facts: dict[str, Any] = {
        "seed": nonce,
        "error_over_limit": float(f"{judge.worst:.4g}") if judge.worst < 1e30 else None,
    }
    facts |= judge.facts
    return Answer({"reasons": [r.to_json() for r in reasons], "trials": judge.trials, "facts": facts})


def admit(work: Work) -> Answer:
    """Check one pack without any candidate. The payload has `pack`; the value is a list of sentences."""
    pack = Pack.from_json(work.payload["pack"])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = refused(pack, problem_of(pack, Path(folder)))
        except RecordError as error:
            found = [str(error)]
    return Answer(found)


_CODES: dict[Fault, Code] = {
    Fault.TIMEOUT: Code.TIMEOUT,
    Fault.CPU_TIME: Code.TIMEOUT,
    Fault.EXIT_UNFINISHED: Code.ESCAPE,
    Fault.FORBIDDEN_CALL: Code.ESCAPE,
    Fault.FORGED: Code.ESCAPE,
    Fault.KILLED: Code.ESCAPE,
}


def faulted(error: CandidateFault, judge: Judge) -> Reason:
    """The reason that a candidate's fault amounts to."""
    detail: Any = str(error)
    code = _CODES.get(error.fault, Code.FAILS)
    if "StateDictError" in detail:
        code = Code.STATE_DICT
    return Reason(code, detail[:2000], f"after {judge.trials} launches")
