"""The judge's two jobs: survey a base kernel, and examine one variant of it."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from typing import Any

import torch

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records import Config
from forecast_harness.packs.parts import Tensor
from forecast_harness.packs.schema import Definition, Language, Pack, Workload
from forecast_harness.sandbox.api import Answer, CandidateFault, Fault, SandboxError, Work
from forecast_harness.variants.drawing import REGIMES
from forecast_harness.variants.exploring import explored
from forecast_harness.variants.launcher import FILE
from forecast_harness.variants.problem import VariantProblem
from forecast_harness.variants.reference import Reference
from forecast_harness.variants.subject import Subject, Survey
from forecast_harness.verify.judge import Judge
from forecast_harness.verify.plan import Plan
from forecast_harness.verify.verdict import Code, Reason
from forecast_harness.verify.worker import faulted

_UNABLE = (
    "OutOfResources",
    "CompilationError",
    "CompileTimeAssertionFailure",
    "PTXASError",
    "RecordError",
)
"""What a config may raise without its variant being wrong: tuning will find it a failed candidate. The last
one says that the call's own grid is not known for its meta-parameters."""


def survey(work: Work) -> Answer:
    """Find out about a base kernel. The payload has `subject` and `device`.

    The value has `survey`, or `refused` with a sentence for the user.
    """
    torch.set_num_threads(1)
    subject = Subject.from_json(work.payload["subject"])
    try:
        found = explored(work, subject, work.payload["device"], int.from_bytes(os.urandom(6)))
    except SandboxError:
        raise
    except ForecastAutotuneError as error:
        return Answer({"refused": str(error)})
    return Answer({"survey": found.to_json()})


def examine(work: Work) -> Answer:
    """Examine one variant.

    The payload has `subject`, `survey`, `configs`, `takes`, `plan`, `deterministic` and `seed`; the value
    has `reasons`, `trials`, `unable` (configs that did not run) and `facts`.
    """
    torch.set_num_threads(1)
    asked = work.payload
    subject, found = Subject.from_json(asked["subject"]), Survey.from_json(asked["survey"])
    plan = Plan.from_json(asked["plan"])
    nonce = asked["seed"] or os.urandom(16).hex()
    seed = hashlib.sha256(nonce.encode()).digest()
    reference = Reference(work, plan.device, random.Random(seed))
    unable: list[str] = []
    try:
        problem = VariantProblem(
            subject,
            found,
            reference,
            [Config.from_json(c) for c in asked["configs"]],
            plan.device,
            bool(asked["deterministic"]),
            asked["takes"],
        )
        with work.cell() as cell:
            judge = Judge(_pack(subject, problem.deterministic), problem, cell, plan, seed)
            try:
                reasons = judge.prepare(FILE, "run", Language.TRITON)
                reasons = reasons or _each_config(judge, problem, unable) or judge.examine(timed=False)
            except CandidateFault as fault:
                reasons = [faulted(fault, judge)]
    finally:
        reference.close()
    facts = {"seed": nonce, "error_over_limit": float(f"{judge.worst:.4g}") if judge.worst < 1e30 else None}
    said = {"reasons": [r.to_json() for r in reasons], "trials": judge.trials, "unable": unable}
    return Answer({**said, "facts": facts})


def _each_config(judge: Judge, problem: VariantProblem, unable: list[str]) -> list[Reason]:
    """Launch every config once; those that cannot run are dropped, and with none left the variant fails."""
    able = []
    last = ""
    for number, config in enumerate(list(problem.configs)):
        case = judge.new_case({"config": number}, REGIMES[number % len(REGIMES)])
        try:
            reply = judge.launch(case)
        except CandidateFault as fault:
            if fault.fault is not Fault.EXCEPTION or fault.kind not in _UNABLE:
                raise
            last = fault.detail
            unable.append(str(config))
            continue
        if reasons := judge.checked(reply):
            return reasons
        problem.note(reply.seconds)
        able.append(config)
    problem.configs = able
    return [] if able else [Reason(Code.FAILS, f"no config runs: {last}"[:2000])]


def _pack(subject: Subject, deterministic: bool) -> Pack:
    values: Mapping[str, Any] = {"call": Tensor(("1",), "float32", REGIMES)}
    definition = Definition(
        subject.kernel, inputs=values, destination=True, deterministic=deterministic, source="a base kernel"
    )
    return Pack(definition, "", (Workload("call", {}),))
