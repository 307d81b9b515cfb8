"""The judge's jobs: survey a base kernel, examine one variant of it, and make ready for that."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.records import Config
from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, JobContext, SandboxError
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.packs.schema import Definition, Pack, TensorSpec, Workload
from forecast_harness.trials.variants.base_runner import BaseKernelRunner
from forecast_harness.trials.variants.call_sampling import CALL_REGIMES
from forecast_harness.trials.variants.compilation.base_binaries import (
    WRITE_ENTRY,
    binaries_as_arrays,
    launchers_among,
)
from forecast_harness.trials.variants.compilation.compile_beside import VariantCompiler
from forecast_harness.trials.variants.compilation.early_compilation import EarlyCompilation
from forecast_harness.trials.variants.examination import VariantExamination
from forecast_harness.trials.variants.expected_survey import expected_survey
from forecast_harness.trials.variants.kernel_survey import survey_kernel
from forecast_harness.trials.variants.problem import VariantProblem
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
    _open_and_leave(work, subject, device)
    return CellAnswer({})


def compile_early(work: JobContext) -> CellAnswer:
    """Compile a variant for what `examine` will draw if the survey, under way, finds what most do; see `open_base`.

    The payload has `subject`, `configs`, `takes`, `plan`, `deterministic` and `architecture`; the value is an
    `EarlyCompilation`, or `refused` with the reason where nothing can be drawn.
    """
    torch.set_num_threads(1)
    asked = work.payload
    subject, plan = BaseKernel.from_json(asked["subject"]), VerificationPlan.from_json(asked["plan"])
    nonce = os.urandom(16).hex()
    with ThreadPoolExecutor(1, "open-base") as pool:
        opening = pool.submit(_open_and_leave, work, subject, plan.device)
        try:
            expected = expected_survey(subject, plan.device)
            reference = BaseKernelRunner(work, plan.device, random.Random())
            compiler = VariantCompiler(work, {}, architecture=asked["architecture"])
            with work.cell() as cell:
                _, examination = _examination(
                    asked, subject, expected, reference, compiler, cell, nonce, PhaseTimer()
                )
                calls, compiled = examination.compile_early()
        except RecordError as error:
            return CellAnswer({"refused": str(error)})
        finally:
            opening.result()
    return CellAnswer(EarlyCompilation.of(nonce, calls, compiled.files, compiled.late).to_json())


def examine(work: JobContext) -> CellAnswer:
    """Examine one variant.

    The payload has `subject`, `survey`, `binaries`, `configs`, `takes`, `plan`, `deterministic`, `seed`, `early` (an
    `EarlyCompilation` with that seed, or None) and `leaves_base` (whether the base's cell may wait in the lane for the
    next verification); the value has `reasons`, `trials`, `unable` (configs that did not run) and `facts`, with the
    seconds of the steps of `VariantExamination` under `examine`; the arrays are files of `BaseBinaries` that it did not
    have.
    """
    torch.set_num_threads(1)
    asked = work.payload
    subject, found = BaseKernel.from_json(asked["subject"]), KernelSurvey.from_json(asked["survey"])
    device = VerificationPlan.from_json(asked["plan"]).device
    nonce = asked["seed"] or os.urandom(16).hex()
    early = None if asked["early"] is None else EarlyCompilation.from_json(asked["early"])
    binaries = binaries_as_arrays(asked.get("binaries") or {})
    reference = BaseKernelRunner(
        work,
        device,
        random.Random(_seed(nonce)),
        binaries,
        name=_name_of_base_cell(subject, device),
        own_configs=(*subject.configs, found.config),
    )
    steps = PhaseTimer()
    try:
        with work.cell() as cell:
            if launchers := launchers_among(binaries):
                cell.ask(WRITE_ENTRY, {}, launchers)
            compiler = VariantCompiler(work, binaries, early=early)
            judge, examination = _examination(asked, subject, found, reference, compiler, cell, nonce, steps)
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


def _examination(
    asked: Mapping[str, Any],
    subject: BaseKernel,
    found: KernelSurvey,
    reference: BaseKernelRunner,
    compiler: VariantCompiler,
    cell: Cell,
    nonce: str,
    steps: PhaseTimer,
) -> tuple[SolutionJudge, VariantExamination]:
    """One variant's judge, and its examination; equal nonces and surveys draw equal calls."""
    plan = VerificationPlan.from_json(asked["plan"])
    configs = [Config.from_json(c) for c in asked["configs"]]
    deterministic = bool(asked["deterministic"])
    problem = VariantProblem(subject, found, reference, configs, plan.device, deterministic, asked["takes"])
    pack = _variant_pack(subject, deterministic)
    judge = SolutionJudge(pack, problem, cell, plan, _seed(nonce), alone=False)
    return judge, VariantExamination(judge, problem, cell, compiler, plan.device, steps)


def _seed(nonce: str) -> bytes:
    return hashlib.sha256(nonce.encode()).digest()


def _open_and_leave(work: JobContext, subject: BaseKernel, device: str) -> None:
    reference = BaseKernelRunner(work, device, random.Random(), name=_name_of_base_cell(subject, device))
    try:
        reference.open()
        reference.leave()
    finally:
        reference.close()


def _name_of_base_cell(subject: BaseKernel, device: str) -> str:
    """For all kinds of call: a cell that launches this source launches it for any of them."""
    return hashlib.sha256(f"{device} {subject.kernel} {subject.source}".encode()).hexdigest()


def _variant_pack(subject: BaseKernel, deterministic: bool) -> Pack:
    values: Mapping[str, Any] = {"call": TensorSpec(("1",), "float32", CALL_REGIMES)}
    definition = Definition(
        subject.kernel, inputs=values, destination=True, deterministic=deterministic, source="a base kernel"
    )
    return Pack(definition, "", (Workload("call", {}),))
