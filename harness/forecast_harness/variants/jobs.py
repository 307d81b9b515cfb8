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
from forecast_harness.packs.schema import Definition, Language, Pack, Workload
from forecast_harness.packs.specs import TensorSpec
from forecast_harness.sandbox.api import CandidateFault, CellAnswer, Fault, JobContext, SandboxError
from forecast_harness.variants.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.variants.base_runner import BaseKernelRunner
from forecast_harness.variants.call_sampling import CALL_REGIMES
from forecast_harness.variants.kernel_survey import survey_kernel
from forecast_harness.variants.launch_file import VARIANT_FILE
from forecast_harness.variants.problem import VariantProblem
from forecast_harness.verify.judge import SolutionJudge
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verdict import Reason, ReasonCode
from forecast_harness.verify.verification_job import reason_of_fault

_CONFIG_ERRORS = (
    "OutOfResources",
    "CompilationError",
    "CompileTimeAssertionFailure",
    "PTXASError",
    "RecordError",
)
"""What a config may raise without its variant being wrong: tuning will find it a failed candidate. The last
one says that the call's own grid is not known for its meta-parameters."""


def survey(work: JobContext) -> CellAnswer:
    """Find out about a base kernel. The payload has `subject` and `device`.

    The value has `survey`, or `refused` with a sentence for the user.
    """
    torch.set_num_threads(1)
    subject = BaseKernel.from_json(work.payload["subject"])
    try:
        found = survey_kernel(work, subject, work.payload["device"], int.from_bytes(os.urandom(6)))
    except SandboxError:
        raise
    except ForecastAutotuneError as error:
        return CellAnswer({"refused": str(error)})
    return CellAnswer({"survey": found.to_json()})


def examine(work: JobContext) -> CellAnswer:
    """Examine one variant.

    The payload has `subject`, `survey`, `configs`, `takes`, `plan`, `deterministic` and `seed`; the value
    has `reasons`, `trials`, `unable` (configs that did not run) and `facts`.
    """
    torch.set_num_threads(1)
    asked = work.payload
    subject, found = BaseKernel.from_json(asked["subject"]), KernelSurvey.from_json(asked["survey"])
    plan = VerificationPlan.from_json(asked["plan"])
    nonce = asked["seed"] or os.urandom(16).hex()
    seed = hashlib.sha256(nonce.encode()).digest()
    reference = BaseKernelRunner(work, plan.device, random.Random(seed))
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
            judge = SolutionJudge(_variant_pack(subject, problem.deterministic), problem, cell, plan, seed)
            try:
                reasons = judge.prepare(VARIANT_FILE, "run", Language.TRITON)
                reasons = reasons or _launch_each_config(judge, problem, unable) or judge.examine(timed=False)
            except CandidateFault as fault:
                reasons = [reason_of_fault(fault, judge)]
    finally:
        reference.close()
    facts = {
        "seed": nonce,
        "error_over_limit": float(f"{judge.worst_error_ratio:.4g}")
        if judge.worst_error_ratio < 1e30
        else None,
    }
    said = {"reasons": [r.to_json() for r in reasons], "trials": judge.trials, "unable": unable}
    return CellAnswer({**said, "facts": facts})


def _launch_each_config(judge: SolutionJudge, problem: VariantProblem, unable: list[str]) -> list[Reason]:
    """Launch every config once; those that cannot run are dropped, and with none left the variant fails."""
    able = []
    last = ""
    for number, config in enumerate(list(problem.configs)):
        case = judge.new_case({"config": number}, CALL_REGIMES[number % len(CALL_REGIMES)])
        try:
            reply = judge.launch(case)
        except CandidateFault as fault:
            if fault.fault is not Fault.EXCEPTION or fault.kind not in _CONFIG_ERRORS:
                raise
            last = fault.detail
            unable.append(str(config))
            continue
        if reasons := judge.checked(reply):
            return reasons
        problem.note(reply.seconds)
        able.append(config)
    problem.configs = able
    return [] if able else [Reason(ReasonCode.FAILS, f"no config runs: {last}"[:2000])]


def _variant_pack(subject: BaseKernel, deterministic: bool) -> Pack:
    values: Mapping[str, Any] = {"call": TensorSpec(("1",), "float32", CALL_REGIMES)}
    definition = Definition(
        subject.kernel, inputs=values, destination=True, deterministic=deterministic, source="a base kernel"
    )
    return Pack(definition, "", (Workload("call", {}),))
