"""The judge's two jobs: survey a base kernel, and examine one variant of it."""

from __future__ import annotations

import hashlib
import os
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records import Config
from forecast_harness.packs.schema import Definition, Language, Pack, Workload
from forecast_harness.packs.specs import TensorSpec
from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, Fault, JobContext, SandboxError
from forecast_harness.variants.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.variants.verification.base_binaries import (
    WRITE_ENTRY,
    binaries_as_arrays,
    launchers_among,
)
from forecast_harness.variants.verification.base_runner import BaseKernelRunner
from forecast_harness.variants.verification.call_sampling import CALL_REGIMES
from forecast_harness.variants.verification.compile_ahead import CELL_ENTRY, call_without_values
from forecast_harness.variants.verification.kernel_survey import survey_kernel
from forecast_harness.variants.verification.launch_file import VARIANT_FILE
from forecast_harness.variants.verification.problem import VariantProblem
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.judge import SolutionJudge
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problems.problem import LaunchCase
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
_MOST_HELD_BYTES = 1 << 29
"""Of arguments that are drawn before they are launched."""
CompileAhead = Callable[[Sequence[LaunchCase]], None]
"""Has a variant compiled for cases that will be launched."""


def survey(work: JobContext) -> CellAnswer:
    """Find out about a base kernel. The payload has `subject` and `device`.

    The value has `survey`, or `refused` with a sentence for the user, and `steps`; the arrays are files of
    `BaseBinaries`.
    """
    torch.set_num_threads(1)
    subject = BaseKernel.from_json(work.payload["subject"])
    try:
        found, binaries, steps = survey_kernel(
            work, subject, work.payload["device"], int.from_bytes(os.urandom(6))
        )
    except SandboxError:
        raise
    except ForecastAutotuneError as error:
        return CellAnswer({"refused": str(error)})
    return CellAnswer({"survey": found.to_json(), "steps": steps}, binaries)


def examine(work: JobContext) -> CellAnswer:
    """Examine one variant.

    The payload has `subject`, `survey`, `binaries`, `configs`, `takes`, `plan`, `deterministic` and `seed`; the value
    has `reasons`, `trials`, `unable` (configs that did not run) and `facts`, with the seconds of launching each config
    and of the trials, and of compiling ahead in both, under `examine`.
    """
    torch.set_num_threads(1)
    asked = work.payload
    subject, found = BaseKernel.from_json(asked["subject"]), KernelSurvey.from_json(asked["survey"])
    plan = VerificationPlan.from_json(asked["plan"])
    nonce = asked["seed"] or os.urandom(16).hex()
    seed = hashlib.sha256(nonce.encode()).digest()
    reference = BaseKernelRunner(work, plan.device, random.Random(seed), asked.get("binaries"))
    unable: list[str] = []
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
            if launchers := launchers_among(binaries_as_arrays(asked.get("binaries") or {})):
                cell.ask(WRITE_ENTRY, {}, launchers)
            judge = SolutionJudge(_variant_pack(subject, problem.deterministic), problem, cell, plan, seed)
            try:
                reasons = judge.prepare(VARIANT_FILE, "run", Language.TRITON)
                ahead = _ahead_in(cell, plan.device, steps)
                with steps.phase("configs"):
                    reasons = reasons or _launch_each_config(judge, problem, unable, ahead)
                with steps.phase("trials"):
                    reasons = reasons or _compile_trials(judge, problem, ahead) or judge.examine(timed=False)
            except CandidateFault as fault:
                reasons = [reason_of_fault(fault, judge)]
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
    said = {"reasons": [r.to_json() for r in reasons], "trials": judge.trials, "unable": unable}
    return CellAnswer({**said, "facts": facts})


def _launch_each_config(
    judge: SolutionJudge, problem: VariantProblem, unable: list[str], compile_ahead: CompileAhead
) -> list[Reason]:
    """Launch every config once; those that cannot run are dropped, and with none left the variant fails.

    The first is launched before others are drawn: how long it takes tells how large they may be.
    """
    able: list[Config] = []
    last = ""
    waiting = deque(enumerate(problem.configs))
    while waiting:
        drawn: list[tuple[Config, LaunchCase]] = []
        held = 0
        while waiting and held < _MOST_HELD_BYTES:
            number, config = waiting.popleft()
            drawn.append(
                (config, judge.new_case({"config": number}, CALL_REGIMES[number % len(CALL_REGIMES)]))
            )
            held += drawn[-1][1].input_bytes
            if number == 0:
                break
        compile_ahead([case for _, case in drawn])
        for config, case in drawn:
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
            problem.note_launch(case, reply.seconds)
            able.append(config)
    problem.configs = able
    return [] if able else [Reason(ReasonCode.FAILS, f"no config runs: {last}"[:2000])]


def _compile_trials(
    judge: SolutionJudge, problem: VariantProblem, compile_ahead: CompileAhead
) -> list[Reason]:
    """Draw what the trials will ask for, and have all of it compiled at once. Finds nothing itself."""
    cases: list[LaunchCase] = []
    for n in range(max(judge.plan.cases, len(CALL_REGIMES))):
        if sum(case.input_bytes for case in cases) >= _MOST_HELD_BYTES:
            break
        regime = CALL_REGIMES[n % len(CALL_REGIMES)]
        cases.append(judge.new_case(None, regime))
        problem.keep(regime, cases[-1])
    compile_ahead(cases)
    return []


def _ahead_in(cell: Cell, device: str, steps: PhaseTimer) -> CompileAhead:
    def ask(cases: Sequence[LaunchCase]) -> None:
        # Alone it is compiled as soon by its launch; an interpreter compiles nothing.
        if device == "cpu" or len(cases) < 2:
            return
        with steps.phase("compile"):
            cell.ask(CELL_ENTRY, {"calls": [call_without_values(case) for case in cases]})

    return ask


def _variant_pack(subject: BaseKernel, deterministic: bool) -> Pack:
    values: Mapping[str, Any] = {"call": TensorSpec(("1",), "float32", CALL_REGIMES)}
    definition = Definition(
        subject.kernel, inputs=values, destination=True, deterministic=deterministic, source="a base kernel"
    )
    return Pack(definition, "", (Workload("call", {}),))
