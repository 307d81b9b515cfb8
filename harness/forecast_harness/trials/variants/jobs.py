"""The judge's jobs: survey a base kernel, examine one variant of it, and make ready for that."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.records import Config
from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, JobContext, SandboxError
from forecast_harness.sandbox.jobs import TensorArrays
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.packs.schema import Definition, Language, Pack, TensorSpec, Workload
from forecast_harness.trials.variants.base_runner import BaseKernelRunner, is_config_error
from forecast_harness.trials.variants.call_sampling import CALL_REGIMES
from forecast_harness.trials.variants.compilation import (
    CELL_ENTRY,
    CompiledCalls,
    VariantCompiler,
    call_without_values,
)
from forecast_harness.trials.variants.files import (
    VARIANT_FILE,
    WRITE_ENTRY,
    EarlyCompilation,
    binaries_as_arrays,
    launchers_among,
)
from forecast_harness.trials.variants.kernel_survey import expected_survey, survey_kernel
from forecast_harness.trials.variants.problem import ProposedCall, VariantProblem
from forecast_harness.verify.cost_control import PhaseTimer
from forecast_harness.verify.examiner import SolutionExaminer
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import LaunchCase
from forecast_harness.verify.verdict import Reason, ReasonCode
from forecast_harness.verify.verification_job import reason_of_fault, verification_answer


def survey(work: JobContext) -> CellAnswer:
    """Find out about a base kernel. The payload has `subject` and `device`.

    The value has `survey`, or `refused` with a sentence for the user, and `steps`; the arrays are files of
    `BaseBinaries`.
    """
    torch.set_num_threads(1)
    subject, device = BaseKernel.from_json(work.payload["subject"]), work.payload["device"]
    try:
        result, binaries, steps = survey_kernel(work, subject, device, int.from_bytes(os.urandom(6)))
    except SandboxError:
        raise
    except ForecastAutotuneError as error:
        return CellAnswer({"refused": str(error)})
    return CellAnswer({"survey": result.to_json(), "steps": steps}, binaries)


def compile_early(work: JobContext) -> CellAnswer:
    """Compile a variant for what `examine` will draw if the survey, under way, finds what most do.

    The payload has `subject`, `configs`, `takes`, `plan`, `deterministic` and `architecture`; the value is an
    `EarlyCompilation`, or `refused` with the reason where nothing can be drawn.
    """
    torch.set_num_threads(1)
    request = work.payload
    subject, plan = BaseKernel.from_json(request["subject"]), VerificationPlan.from_json(request["plan"])
    nonce = os.urandom(16).hex()
    try:
        expected = expected_survey(subject, plan.device)
        reference = BaseKernelRunner(work, plan.device, random.Random())
        compiler = VariantCompiler(work, {}, architecture=request["architecture"])
        with work.cell() as cell:
            _, examination = _examination(
                request, subject, expected, reference, compiler, cell, nonce, PhaseTimer()
            )
            calls, compiled = examination.compile_early()
    except RecordError as error:
        return CellAnswer({"refused": str(error)})
    return CellAnswer(EarlyCompilation.of(nonce, calls, compiled.files, compiled.late).to_json())


def examine(work: JobContext) -> CellAnswer:
    """Examine one variant.

    The payload has `subject`, `survey`, `binaries`, `configs`, `takes`, `plan`, `deterministic`, `seed` and `early` (an
    `EarlyCompilation` with that seed, or None); the value is as of `verification_answer`, its facts have `unable`
    (configs that did not run) and the seconds of the steps of `VariantExamination` under `examine`; the arrays are
    files of `BaseBinaries` that it did not have.
    """
    torch.set_num_threads(1)
    request = work.payload
    subject, result = BaseKernel.from_json(request["subject"]), KernelSurvey.from_json(request["survey"])
    device = VerificationPlan.from_json(request["plan"]).device
    nonce = request["seed"] or os.urandom(16).hex()
    early = None if request["early"] is None else EarlyCompilation.from_json(request["early"])
    binaries = binaries_as_arrays(request.get("binaries") or {})
    reference = BaseKernelRunner(work, device, random.Random(_seed(nonce)), binaries)
    steps = PhaseTimer()
    try:
        with work.cell() as cell:
            if launchers := launchers_among(binaries):
                cell.ask(WRITE_ENTRY, {}, launchers)
            compiler = VariantCompiler(work, binaries, early=early)
            judge, examination = _examination(
                request, subject, result, reference, compiler, cell, nonce, steps
            )
            try:
                reasons = examination.run()
            except CandidateFault as fault:
                reasons = [reason_of_fault(fault, judge)]
        news = reference.newly_compiled()
    finally:
        reference.close()
    more = {"examine": steps.to_json(), "unable": examination.unable}
    return CellAnswer(verification_answer(judge, reasons, nonce, **more), news)


def _examination(
    request: Mapping[str, Any],
    subject: BaseKernel,
    result: KernelSurvey,
    reference: BaseKernelRunner,
    compiler: VariantCompiler,
    cell: Cell,
    nonce: str,
    steps: PhaseTimer,
) -> tuple[SolutionExaminer, VariantExamination]:
    """One variant's judge, and its examination; equal nonces and surveys draw equal calls."""
    plan = VerificationPlan.from_json(request["plan"])
    configs = [Config.from_json(c) for c in request["configs"]]
    deterministic = bool(request["deterministic"])
    problem = VariantProblem(
        subject, result, reference, configs, plan.device, deterministic, request["takes"]
    )
    pack = _variant_pack(subject, deterministic)
    judge = SolutionExaminer(pack, problem, cell, plan, _seed(nonce), alone=False)
    return judge, VariantExamination(judge, problem, cell, compiler, plan.device, steps)


def _seed(nonce: str) -> bytes:
    return hashlib.sha256(nonce.encode()).digest()


def _variant_pack(subject: BaseKernel, deterministic: bool) -> Pack:
    values: Mapping[str, Any] = {"call": TensorSpec(("1",), "float32", CALL_REGIMES)}
    definition = Definition(
        subject.kernel, inputs=values, destination=True, deterministic=deterministic, source="a base kernel"
    )
    return Pack(definition, "", (Workload("call", {}),))


_MOST_HELD_BYTES = 1 << 29
"""The most bytes of arguments that are drawn before they are launched."""
_NONE: TensorArrays = {}
_KERNEL_TRIAL_REGIMES = ("normal", "normal")
"""The regimes of the calls that show whose kernels compute, beyond those of varied trials: see
`SolutionExaminer.examine`."""


class VariantExamination:
    """Launches every config once, then the trials.

    On a device a cell takes seconds to open the device and to compile, and the base kernel's cell to work on what is
    drawn: all of it goes on side by side. An interpreter compiles nothing, and draws call by call.
    """

    def __init__(
        self,
        judge: SolutionExaminer,
        problem: VariantProblem,
        cell: Cell,
        compiler: VariantCompiler,
        device: str,
        steps: PhaseTimer,
    ) -> None:
        """`steps` is told the seconds of `base` (until its cell is open), `draws`, `beside` and `compile`, of which
        some overlap, of `configs` and of `trials`."""
        self.unable: list[str] = []
        """Configs that did not run."""
        self._judge, self._problem, self._cell, self._device = judge, problem, cell, device
        self._compiler, self._steps = compiler, steps
        self._drawn: dict[int, LaunchCase] = {}
        """By the number of the config that each will be launched with."""
        self._compiled: list[Mapping[str, Any]] = []
        """Calls that the cell which launches has compiled for."""
        self._late: set[Config] = set()
        """Configs that take too long to compile: not launched."""

    def run(self) -> list[Reason]:
        """All of it, up to the first launch that finds something. Raises `CandidateFault`, `SandboxError`."""
        reasons = self._prepare() if self._device == "cpu" else self._prepare_while_drawing()
        with self._steps.phase("configs"):
            reasons = reasons or self._launch_each_config()
        with self._steps.phase("trials"):
            for _ in self._problem.configs:
                try:
                    return reasons or self._judge.examine(timed=False)
                except CandidateFault as fault:
                    if not is_config_error(fault) or not self._problem.leave_out():
                        raise
            return reasons or self._judge.examine(timed=False)

    def compile_early(self) -> tuple[list[dict[str, Any]], CompiledCalls]:
        """Only have compiled what `run` would draw; the calls, and what came of them."""
        calls = [proposed.call for proposed in self._propose()]
        return calls, self._compile_beside(calls)

    def _prepare_while_drawing(self) -> list[Reason]:
        proposed = self._propose()
        calls = [p.call for p in proposed]
        with ThreadPoolExecutor(2, "prepare") as pool:
            compiling = pool.submit(self._compile_beside, calls)
            # A device is opened by one cell after the other: first by that which drawing waits for.
            with self._steps.phase("base"):
                self._problem.open_base()
            preparing = pool.submit(self._prepare, calls, compiling)
            with self._steps.phase("draws"):
                trials = self._draw(preparing)
            if reasons := preparing.result():
                return reasons
            binaries, late = compiling.result()
        self._late = {proposed[number].config for number in late}
        if self._late.issuperset(self._problem.configs):  # then one of them has to be waited for
            self._late.clear()
        # Calls that the base kernel refused were drawn anew, and may be of another form.
        cases = (*self._drawn.values(), *trials)
        drawn = [call_without_values(c) for c in cases if self._problem.config_of(c) not in self._late]
        left = drawn if binaries else [call for call in drawn if call not in self._compiled]
        self._judge.rng.shuffle(left)
        self._compile(left, binaries)
        return []

    def _prepare(
        self, calls: Sequence[Mapping[str, Any]] = (), compiling: Future[CompiledCalls] | None = None
    ) -> list[Reason]:
        """Have the variant imported, and compiled for these calls where that failed elsewhere; reasons to go no
        further."""
        reasons = self._judge.prepare(VARIANT_FILE, "run", Language.TRITON)
        if not reasons and compiling is not None and compiling.done() and not compiling.result().files:
            self._compile(calls)
        return reasons

    def _compile_beside(self, calls: Sequence[Mapping[str, Any]]) -> CompiledCalls:
        with self._steps.phase("beside"):
            return self._compiler.compiled(calls)

    def _compile(self, calls: Sequence[Mapping[str, Any]], binaries: TensorArrays = _NONE) -> None:
        """Have this cell compile, or read it from `binaries`, which are files for its cache."""
        if len(calls) > 1 or binaries:  # alone it is compiled as soon by its launch
            self._compiled += calls
            with self._steps.phase("compile"):
                self._cell.ask(CELL_ENTRY, {"calls": [dict(call) for call in calls]}, binaries)

    def _wanted(self) -> list[tuple[int | None, str]]:
        """(config, or None for any; regime) of what is drawn before anything is launched."""
        regimes = [CALL_REGIMES[n % len(CALL_REGIMES)] for n in range(len(self._problem.configs))]
        trials = max(self._judge.plan.cases, len(CALL_REGIMES))
        varied = [CALL_REGIMES[n % len(CALL_REGIMES)] for n in range(trials)]
        return [*enumerate(regimes), *((None, regime) for regime in (*varied, *_KERNEL_TRIAL_REGIMES))]

    def _propose(self) -> list[ProposedCall]:
        """Draw what the base kernel will be asked about, and tell how the variant is called then.

        The longest compilation comes first; the order does not tell which call is for what.
        """
        results: list[ProposedCall] = []
        for number, regime in self._wanted():
            if sum(proposed.bytes for proposed in results) >= _MOST_HELD_BYTES:
                break
            results.append(self._problem.propose(_axes(number), self._judge.draw_spec(regime)))
        self._judge.rng.shuffle(results)
        return sorted(results, key=lambda p: p.work, reverse=True)

    def _draw(self, preparing: Future[list[Reason]]) -> list[LaunchCase]:
        """Cases for every config, and for the trials, which are kept for them and returned.

        Stops as soon as the variant is known to fail before any launch.
        """
        trials: list[tuple[str, LaunchCase]] = []
        held = 0
        for number, regime in self._wanted():
            failed = preparing.done() and (preparing.exception() is not None or preparing.result())
            if failed or held >= _MOST_HELD_BYTES:
                break
            case = self._judge.new_case(_axes(number), regime)
            held += case.input_bytes
            if number is None:
                trials.append((regime, case))
            else:
                self._drawn[number] = case
        for regime, case in trials:  # not sooner: whoever asks for a case is given what is kept
            self._problem.keep(regime, case)
        return [case for _, case in trials]

    def _launch_each_config(self) -> list[Reason]:
        """Launch every config once; those that cannot run or compile for too long are dropped, and with none left the
        variant fails.

        How long a launch takes tells how large what is launched later may be.
        """
        able: list[Config] = []
        last = ""
        for number, config in enumerate(self._problem.configs):
            case = self._drawn.pop(number, None)
            if config in self._late:
                last = "all take too long to compile"
                self.unable.append(str(config))
                continue
            if case is None or not self._problem.fits(case):
                case = self._judge.new_case(_axes(number), CALL_REGIMES[number % len(CALL_REGIMES)])
            try:
                reply = self._judge.launch(case)
            except CandidateFault as fault:
                if not is_config_error(fault):
                    raise
                last = fault.detail
                self.unable.append(str(config))
                continue
            if reasons := self._judge.checked(reply):
                return reasons
            self._problem.note_launch(case, reply.seconds)
            able.append(config)
        self._problem.configs = able
        return [] if able else [Reason(ReasonCode.FAILS, f"no config runs: {last}"[:2000])]


def _axes(number: int | None) -> dict[str, int] | None:
    return None if number is None else {"config": number}
