"""The judge's jobs: survey a base kernel, examine one variant of it, and open the base's cell before that."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from typing import Any

import torch

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records import Config
from forecast_harness.packs.schema import Definition, Pack, Workload
from forecast_harness.packs.specs import TensorSpec
from forecast_harness.sandbox.api import CandidateFault, CellAnswer, JobContext, SandboxError
from forecast_harness.variants.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.variants.verification.base_binaries import (
    WRITE_ENTRY,
    binaries_as_arrays,
    launchers_among,
)
from forecast_harness.variants.verification.base_runner import BaseKernelRunner
from forecast_harness.variants.verification.call_sampling import CALL_REGIMES
from forecast_harness.variants.verification.compile_beside import VariantCompiler
from forecast_harness.variants.verification.examination import VariantExamination
from forecast_harness.variants.verification.kernel_survey import survey_kernel
from forecast_harness.variants.verification.problem import VariantProblem
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.judge import SolutionJudge
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.verification_job import reason_of_fault


def survey(work: JobContext) -> CellAnswer:
    """Find out about a base kernel. The payload has `subject` and `device`.

    The value has `survey`, or `refused` with a sentence for the user, and `steps`; the arrays are files of
    `BaseBinaries`.
    """
    torch.set_num_threads(1)
    subject, device = BaseKernel.from_json(work.payload["subject"]), work.payload["device"]
    seed, name = int.from_bytes(os.urandom(6)), _name_of_base_cell(subject, device)
    try:
        found, binaries, steps = survey_kernel(work, subject, device, seed, name)
    except SandboxError:
        raise
    except ForecastAutotuneError as error:
        return CellAnswer({"refused": str(error)})
    return CellAnswer({"survey": found.to_json(), "steps": steps}, binaries)


def open_base(work: JobContext) -> CellAnswer:
    """Leave a base kernel's cell to the lane's next survey or examination. The payload has `subject` and `device`."""
    subject, device = BaseKernel.from_json(work.payload["subject"]), work.payload["device"]
    reference = BaseKernelRunner(work, device, random.Random(), name=_name_of_base_cell(subject, device))
    try:
        reference.open()
        reference.leave()
    finally:
        reference.close()
    return CellAnswer({})


def examine(work: JobContext) -> CellAnswer:
    """Examine one variant.

    The payload has `subject`, `survey`, `binaries`, `configs`, `takes`, `plan`, `deterministic`, `seed` and
    `leaves_base` (whether the base's cell may wait in the lane for the next verification); the value has `reasons`,
    `trials`, `unable` (configs that did not run) and `facts`, with the seconds of the steps of `VariantExamination`
    under `examine`; the arrays are files of `BaseBinaries` that it did not have.
    """
    torch.set_num_threads(1)
    asked = work.payload
    subject, found = BaseKernel.from_json(asked["subject"]), KernelSurvey.from_json(asked["survey"])
    plan = VerificationPlan.from_json(asked["plan"])
    nonce = asked["seed"] or os.urandom(16).hex()
    seed = hashlib.sha256(nonce.encode()).digest()
    binaries = binaries_as_arrays(asked.get("binaries") or {})
    reference = BaseKernelRunner(
        work,
        plan.device,
        random.Random(seed),
        binaries,
        name=_name_of_base_cell(subject, plan.device),
        own_configs=(*subject.configs, found.config),
    )
    steps = PhaseTimer()
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
            if launchers := launchers_among(binaries):
                cell.ask(WRITE_ENTRY, {}, launchers)
            pack = _variant_pack(subject, problem.deterministic)
            judge = SolutionJudge(pack, problem, cell, plan, seed, alone=False)
            compiler = VariantCompiler(work, binaries)
            examination = VariantExamination(judge, problem, cell, compiler, plan.device, steps)
            try:
                reasons = examination.run()
            except CandidateFault as fault:
                reasons = [reason_of_fault(fault, judge)]
        news = reference.newly_compiled()
        if asked["leaves_base"]:
            reference.leave()
    finally:
        reference.close()
    facts = {
        **judge.facts,
        "examine": steps.to_json(),
        "seed": nonce,
        "error_over_limit": float(f"{judge.worst_error_ratio:.4g}")
        if judge.worst_error_ratio < 1e30
        else None,
    }
    said = {"reasons": [r.to_json() for r in reasons], "trials": judge.trials, "unable": examination.unable}
    return CellAnswer({**said, "facts": facts}, news)


def _name_of_base_cell(subject: BaseKernel, device: str) -> str:
    """For all kinds of call: a cell that launches this source launches it for any of them."""
    return hashlib.sha256(f"{device} {subject.kernel} {subject.source}".encode()).hexdigest()


def _variant_pack(subject: BaseKernel, deterministic: bool) -> Pack:
    values: Mapping[str, Any] = {"call": TensorSpec(("1",), "float32", CALL_REGIMES)}
    definition = Definition(
        subject.kernel, inputs=values, destination=True, deterministic=deterministic, source="a base kernel"
    )
    return Pack(definition, "", (Workload("call", {}),))
