"""The judge's jobs: survey a base kernel, examine one variant of it, and make ready for that."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records import Argument, Config
from forecast_harness.sandbox.api import CandidateFault, Cell, CellAnswer, JobContext, SandboxError
from forecast_harness.sandbox.jobs import TensorArrays
from forecast_harness.targets.kernels.base_kernel import BaseKernel, KernelSurvey
from forecast_harness.targets.kernels.sizes import largest_tensor
from forecast_harness.targets.packs.schema import Definition, Language, Pack, TensorSpec, Workload
from forecast_harness.trials.configs.source_configs import work_of_a_warp
from forecast_harness.trials.variants.base_runner import (
    BaseKernelError,
    BaseKernelRun,
    BaseKernelRunner,
    TensorMemory,
    call_arguments,
    call_to_compile,
    gap_mask,
    has_nonfinite,
    is_config_error,
    memory_bytes,
    surroundings_dependence,
    tensor_view,
)
from forecast_harness.trials.variants.call_sampling import (
    CALL_REGIMES,
    HUGE_REGIME,
    LARGE_VALUES,
    CapturedCalls,
    DrawnCall,
    UserCalls,
    heuristics_of,
    unset_like,
    with_heuristics,
)
from forecast_harness.trials.variants.compilation import (
    CELL_ENTRY,
    CompiledCalls,
    CompiledForms,
    VariantCompiler,
    call_form,
    call_without_values,
)
from forecast_harness.trials.variants.files import (
    VARIANT_FILE,
    WRITE_ENTRY,
    binaries_as_arrays,
    launchers_among,
)
from forecast_harness.trials.variants.kernel_survey import (
    call_source,
    launch_base,
    order_dependence,
    survey_kernel,
    tensor_argument,
    widened_arguments,
)
from forecast_harness.verify.cost_control import HOST_DEVICE, PhaseTimer
from forecast_harness.verify.examiner import SolutionExaminer
from forecast_harness.verify.launch_cell import PEAK
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import (
    MANY_ELEMENTS,
    OUTSIDE_DOMAIN,
    CheckFinding,
    DrawSpec,
    LaunchCase,
)
from forecast_harness.verify.tolerance import compare_with_base, same_bits, widened
from forecast_harness.verify.verdict import Reason, ReasonCode
from forecast_harness.verify.verification_job import reason_of_fault, verification_answer

_OTHER_CONFIGS = 4
"""Configs of the base, about, that are tried where a variant differs from it."""
_LAUNCHES_AGAIN = 4
"""Launches of the base, beyond two that agreed, in which it may show that it differs from itself."""
_OWN_CONFIG_WORK = 16.0
"""Times the work of a warp that the variant's own config may have more than another of the base's that is tried before
it."""
_MOST_REFUSED_DRAWS = 8
"""Draws that the base may refuse in a row."""


class ProposedCall(NamedTuple):
    """How a variant will be called, unless the base refuses the call."""

    call: dict[str, Any]
    """The call as `compile_calls` takes it."""
    config: Config
    bytes: int
    """Bytes of its tensors, which stay in memory from now on."""
    work: float
    """The work of a warp, which tells about how long it takes to compile."""


@dataclass(frozen=True)
class _Proposal:
    """A call that was drawn and is yet to be shown to the base."""

    call: DrawnCall
    target: Config
    """The config that its sizes were drawn for."""
    config: Config
    """The config that it is launched with."""


class VariantProblem:
    """Cases of one variant; each is launched with the next of its configs."""

    def __init__(
        self,
        subject: BaseKernel,
        survey: KernelSurvey,
        reference: BaseKernelRunner,
        configs: Sequence[Config],
        device: str,
        deterministic: bool,
        parameters: Collection[str],
    ) -> None:
        """`parameters`: names of the variant's parameters."""
        self.deterministic = deterministic
        self.configs = list(configs)
        self._subject, self._survey, self._reference = subject, survey, reference
        self._device, self._parameters = device, frozenset(parameters)
        self._layers = heuristics_of(subject)
        self._turn = itertools.count()
        self._arguments: dict[str, tuple[Argument, ...]] = {}
        self._spare_cases: dict[str, deque[LaunchCase]] = {}
        self._proposals: dict[tuple[int | None, str], deque[_Proposal]] = {}
        self._configs_of: dict[str, tuple[Config, Hashable]] = {}
        """The config of each case, by its label, with the part of the call that decides how it is compiled."""
        self._unfit: set[tuple[Config, Hashable]] = set()
        """Configs, each with such a part of a call, that did not run."""
        self._latest: tuple[Config, Hashable] | None = None
        self._base_runs: dict[int, tuple[DrawnCall, TensorMemory, BaseKernelRun]] = {}
        """Results of the base for large calls, by the id of the call: the source gives each call again."""
        self._wide: dict[int, TensorMemory | None] = {}
        self._slow = False
        """Whether the variant took long for a call: cases that were drawn before may be too large."""
        self._differing_config: Config | None = None
        """The config under which the base last gave another result than under its own."""
        self._forms = CompiledForms()
        self._comparison_device = HOST_DEVICE
        """The device that compares outputs of many elements."""
        self._source = call_source(subject, survey, device)

    @property
    def is_large(self) -> bool:
        """See `CallSource`."""
        return self._source.is_large

    def open_base(self) -> None:
        """Have the base kernel's cell opened, which the first `case` would wait for."""
        self._reference.open()

    def case(self, axes: Mapping[str, Any] | None, how: DrawSpec) -> LaunchCase:
        """A fresh call. `axes` may name a `config` by its number; otherwise the next one is taken, or a case of `keep`.

        On a device the next one gives way to another that was compiled for such a call already, where there is one:
        a verification launches many calls, and compiling each anew would take most of its time.
        """
        self._comparison_device, number = how.where, _config_number(axes)
        spare_cases = self._spare_cases.get(how.regime) if number is None else None
        while spare_cases:
            case = spare_cases.popleft()
            self._latest = self._configs_of[case.label]
            if self.fits(case) and self._latest[0] in self.configs and self._latest not in self._unfit:
                return case
        proposal = self._next_proposal(number, how.regime)
        target = proposal.target if proposal else self._next_config(number)
        call, outputs, first_run = self._draw_accepted(how, target, proposal.call if proposal else None)
        arguments = call.arguments
        if proposal is not None and call is proposal.call:
            config = proposal.config
        else:
            config = self._compiled_config(call, target, number)
        if number is None and self._unfit:
            fitting = (c for c in (config, *self.configs) if (c, self._form(call, c)) not in self._unfit)
            config = next(fitting, config)
        tensors = {n: t for n, t in call.memory.items() if n not in outputs}
        meta = config.parameters()
        grid = call.grid(meta)
        scalars = with_heuristics(call, self._layers, meta, self._parameters)
        contents = _contents(tensors)
        # On a device the base runs while the variant compiles; an interpreter would only wait for it sooner.
        ahead = None if self._device == "cpu" else self._wide_results(call, {**tensors, **outputs})

        def judge(
            inputs: Mapping[str, torch.Tensor], results: Sequence[torch.Tensor], *, asks_domain: bool = True
        ) -> tuple[CheckFinding, float]:
            memory, same = {**inputs, **outputs}, _contents(inputs) == contents
            try:
                plain = first_run if same else self._launch_base(call, memory)
            except BaseKernelError as error:
                raise SandboxError(f"the base kernel failed on {call.label}: {error}") from error
            widen = self._wide_results if same else self._run_wide
            wide = ahead if same and self._device != "cpu" else widen(call, memory)
            actual = dict(zip(outputs, results, strict=True))
            return self._compare_outputs(call, memory, plain, wide, actual, config if asks_domain else None)

        label = f"{call.label}, {config}"
        self._arguments[label] = arguments
        self._latest = self._configs_of[label] = config, self._form(call, config)
        return LaunchCase(
            label,
            call_arguments(arguments, scalars, grid, config),
            tensors,
            judge,
            outputs,
            {a.name: "offset" for a in arguments if a.kind == "tensor" and not a.aligned},
            output_bytes=memory_bytes(outputs),
            # Values of a user's own function may hang together: they are not changed one by one.
            vary=(lambda generator: tensors) if isinstance(self._source, UserCalls | CapturedCalls) else None,
            matches=lambda inputs, results: judge(inputs, results, asks_domain=False)[0] is None,
            portable=False,
        )

    def propose(self, axes: Mapping[str, Any] | None, how: DrawSpec) -> ProposedCall:
        """Draw the call that the next `case` with these arguments will give, unless the base refuses it."""
        number = _config_number(axes)
        target = self._next_config(number)
        call = self._source.draw(how.regime, how.generator, target)
        config = self._compiled_config(call, target, number)
        proposal = _Proposal(call, target, config)
        self._proposals.setdefault((number, how.regime), deque()).append(proposal)
        request, size = self._compiled_call(call, config, self._parameters), memory_bytes(call.memory)
        return ProposedCall(request, config, size, work_of_a_warp(config))

    def _next_proposal(self, number: int | None, regime: str) -> _Proposal | None:
        """The next proposal for such a case whose config can run."""
        waiting = self._proposals.get((number, regime))
        while waiting:
            proposal = waiting.popleft()
            if proposal.config in self.configs:
                return proposal
        return None

    def _next_config(self, number: int | None) -> Config:
        turn = next(self._turn)
        return self.configs[(turn if number is None else number) % len(self.configs)]

    def _compiled_config(self, call: DrawnCall, config: Config, number: int | None) -> Config:
        """The config to launch a call with that was drawn for `config`; notes that it is compiled for the call."""
        if number is None and self._device != "cpu":  # an interpreter compiles nothing
            config = self._forms.instead_of(config, self.configs, lambda c: self._form(call, c))
        self._forms.note(config, self._form(call, config))
        return config

    def _compiled_call(
        self, call: DrawnCall, config: Config, parameters: Collection[str] | None = None
    ) -> dict[str, Any]:
        """A call as `compile_calls` takes it; `parameters`: a variant's parameters, None for the base."""
        meta = config.parameters()
        scalars = with_heuristics(call, self._layers, meta, parameters)
        return call_to_compile(call.arguments, scalars, call.grid(meta), config)

    def _form(self, call: DrawnCall, config: Config) -> Hashable | None:
        """The part of a call that decides how the variant is compiled with a config; None where it has no grid."""
        meta = config.parameters()
        if call.grid(meta) is None:
            return None
        return call_form(call.arguments, with_heuristics(call, self._layers, meta, self._parameters))

    def keep(self, regime: str, case: LaunchCase) -> None:
        """Give this case, once, to the next `case` of its regime that names no config."""
        self._spare_cases.setdefault(regime, deque()).append(case)

    def config_of(self, case: LaunchCase) -> Config:
        """The config that a case of this problem is launched with."""
        return self._configs_of[case.label][0]

    def leave_out(self) -> bool:
        """Launch calls like the latest case with other configs, as a tuner does; whether one of them may run."""
        assert self._latest is not None
        self._unfit.add(self._latest)
        return not self._unfit.issuperset((c, self._latest[1]) for c in self.configs)

    def note_launch(self, case: LaunchCase, seconds: float) -> None:
        """Draw smaller calls from now on, if the variant took long for this one."""
        before = self._source.pace.most
        self._source.pace.note(self._arguments[case.label], seconds)
        self._slow = self._slow or self._source.pace.most < before

    def fits(self, case: LaunchCase) -> bool:
        """Whether a case that was drawn earlier is no larger than those that are drawn now."""
        return not self._slow or largest_tensor(self._arguments[case.label]) <= self._source.pace.most

    def _draw_accepted(
        self, how: DrawSpec, config: Config, proposal: DrawnCall | None = None
    ) -> tuple[DrawnCall, TensorMemory, BaseKernelRun]:
        """A call that the base accepts (`proposal`, if it does), its outputs before and all memory after the base ran.

        A survey tries a few calls, and may have missed what goes wrong on one in ten. Raises `SandboxError`
        when nothing that is drawn is accepted.
        """
        for _ in range(_MOST_REFUSED_DRAWS):
            call = proposal or self._source.draw(how.regime, how.generator, config)
            proposal = None
            if id(call) in self._base_runs:
                return self._base_runs[id(call)]
            fresh = set(self._survey.writes) - set(self._survey.updates)
            outputs = {n: call.memory[n] for n in self._survey.writes}
            outputs |= {n: unset_like(outputs[n]) for n in fresh}
            memory = {**call.memory, **outputs}
            try:
                first, second = self._launch_base(call, memory), self._launch_base(call, memory)
                problem = surroundings_dependence(first, second, self._survey.writes, self._device)
                problem = problem or order_dependence(self._launch_base, call, first, self._survey.updates)
            except BaseKernelError as error:
                problem = str(error)
                continue
            if how.regime == HUGE_REGIME and has_nonfinite(call.arguments, first):
                # The base does not handle such values, so its result for them is no reference.
                how = replace(how, regime="normal")
                proposal = self._source.redraw(call, how.regime, how.generator)
            elif not problem:
                if not (new_writes := sorted(set(first.changed) - set(outputs))):
                    if isinstance(self._source, CapturedCalls) and self._source.holds(call):
                        self._base_runs[id(call)] = call, outputs, first
                    return call, outputs, first
                problem = f"it writes to {', '.join(new_writes)}, which it never did when it was surveyed"
        raise SandboxError(f"the base kernel does not accept what is drawn: {problem} ({call.label})")

    def _launch_base(self, call: DrawnCall, memory: TensorMemory) -> BaseKernelRun:
        others = self._subject.configs
        run = launch_base(self._reference, call, memory, self._survey.config, self._layers, others)
        self._source.pace.note(call.arguments, run.seconds)
        return run

    def _finding_by_configs(
        self,
        call: DrawnCall,
        memory: TensorMemory,
        plain: BaseKernelRun,
        wide: TensorMemory | None,
        outputs: Mapping[str, torch.Tensor],
        config: Config,
    ) -> float | None:
        """None where outputs that differ from the base's are wrong; else the error, or `OUTSIDE_DOMAIN`.

        The base itself may give another result under this config, or under another of its own. It may then not be made
        for the drawn call, a top 16 of 5 columns, and its result says nothing. It is made for a call of the program's:
        there outputs must be the base's under the same config or, where that is none of its own, under one of them.
        """
        for group in self._other_configs(config):
            launchable = [c for c in group if call.grid(c.parameters()) is not None]
            if len(launchable) > 1:  # alone it is compiled as soon by its launch
                self._reference.compile_ahead([self._compiled_call(call, c) for c in launchable])
            for base_config in launchable:
                try:
                    base_run = launch_base(self._reference, call, memory, base_config, self._layers)
                except BaseKernelError:
                    continue
                if not self._errors(call, base_run.memory, plain, wide)[0]:
                    continue
                self._differing_config = base_config
                if not call.is_own:
                    return OUTSIDE_DOMAIN
                problem, error = self._errors(call, outputs, base_run, None)
                if not problem:
                    return error
                if base_config == config:
                    return None
        return None

    def _errors(
        self,
        call: DrawnCall,
        outputs: TensorMemory,
        plain: BaseKernelRun,
        wide: TensorMemory | None,
    ) -> tuple[bool, float]:
        """Whether any output is wrong, and the largest error over its limit."""
        findings = [self._output_error(call, n, outputs[n], plain, wide) for n in self._survey.writes]
        return any(problem for problem, _ in findings), max((error for _, error in findings), default=0.0)

    def _other_configs(self, own: Config) -> list[list[Config]]:
        """Configs to launch the base under, to see whether it differs from itself; those of a group side by side.

        A config that differed mostly differs again, and is compiled. So is the config that results are compared with,
        which differs from itself where programs of a device race on the drawn values. Next, the variant's own says
        most. The others come by their time to compile, as one that differs is enough: a tile that spills takes a
        minute, and so the own config waits for its turn where it is far larger than the others.
        """
        configs = self._subject.configs
        first = [] if self._differing_config is None else [self._differing_config]
        pool = dict.fromkeys((own, *configs[:: max(1, len(configs) // _OTHER_CONFIGS)]))
        rest = sorted((c for c in pool if c != self._survey.config and c not in first), key=work_of_a_warp)
        repeats = [] if self._device == "cpu" else [self._survey.config] * _LAUNCHES_AGAIN
        groups = [first, *([config] for config in repeats)]
        if own in rest and work_of_a_warp(own) <= _OWN_CONFIG_WORK * work_of_a_warp(rest[0]):
            rest.remove(own)
            groups.append([own])
        return groups + [rest[i : i + 2] for i in range(0, len(rest), 2)]

    def _output_error(
        self, call: DrawnCall, name: str, flat: torch.Tensor, plain: BaseKernelRun, wide: TensorMemory | None
    ) -> tuple[str, float]:
        """The result of `compare_with_base` for one output, whose memory is `flat`."""
        argument = tensor_argument(call.arguments, name)

        def compare(device: str) -> tuple[str, float]:
            tensors = (flat, plain.memory[name], *(() if wide is None else (wide[name],)))
            own, base, *wider = (tensor_view(t.to(device), argument) for t in tensors)
            return compare_with_base(own, base, wider[0] if wider else None)

        return self._comparison_device.run(compare, portable=flat.numel() >= MANY_ELEMENTS)

    def _wide_results(self, call: DrawnCall, memory: TensorMemory) -> TensorMemory | None:
        if id(call) not in self._base_runs:
            return self._run_wide(call, memory)
        if id(call) not in self._wide:
            self._wide[id(call)] = self._run_wide(call, memory)
        return self._wide[id(call)]

    def _run_wide(self, call: DrawnCall, memory: TensorMemory) -> TensorMemory | None:
        arguments = widened_arguments(call.arguments, self._device)
        if arguments == call.arguments:
            return None
        wide = {n: widened(t, self._device) for n, t in memory.items()}
        try:
            return launch_base(
                self._reference,
                replace(call, arguments=arguments),
                wide,
                self._survey.config,
                self._layers,
            ).memory
        except BaseKernelError:
            return None  # it insists on its dtypes

    def _compare_outputs(
        self,
        call: DrawnCall,
        memory: TensorMemory,
        plain: BaseKernelRun,
        wide: TensorMemory | None,
        outputs: Mapping[str, torch.Tensor],
        config: Config | None,
    ) -> tuple[CheckFinding, float]:
        """`wide`: see `_run_wide`; `config`: where outputs differ, the base runs under it, too; None: it does not."""
        worst = 0.0
        for name, flat in outputs.items():
            if same_bits(flat, plain.memory[name]):
                continue  # the base's own result is right
            argument = tensor_argument(call.arguments, name)
            if finding := _gap_finding(argument, flat, plain.memory[name]):
                return finding, 0.0
            problem, ratio = self._output_error(call, name, flat, plain, wide)
            worst = max(worst, ratio)
            if not problem:
                continue
            if config is not None:
                error = self._finding_by_configs(call, memory, plain, wide, outputs, config)
                if error is not None:
                    return None, error
            return (ReasonCode.WRONG_VALUES, f"{name}: {problem} ({call.label})"), worst
        return None, worst


def _config_number(axes: Mapping[str, Any] | None) -> int | None:
    return None if axes is None else axes.get("config")


def _contents(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """A value that stays equal while these are the same tensors and nothing is written into them."""
    return {name: (id(t), t._version) for name, t in tensors.items()}


def _gap_finding(argument: Argument, output: torch.Tensor, base: torch.Tensor) -> CheckFinding:
    """The finding on an output that was written between the rows of a strided tensor, where the base does not."""
    gaps = gap_mask(argument)
    if gaps.any() and not same_bits(output[gaps], base[gaps]):
        return ReasonCode.OUT_OF_BOUNDS, f"wrote between the rows of {argument.name}"
    return None


# --- jobs of a lane ---


def survey(work: JobContext) -> CellAnswer:
    """Survey a base kernel. The payload has `subject` and `device`.

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


def examine(work: JobContext) -> CellAnswer:
    """Examine one variant.

    The payload has `subject`, `survey`, `binaries`, `configs`, `takes`, `plan` and `deterministic`; the value is as of
    `verification_answer`, its facts have `unable` (configs that did not run) and the seconds of the steps of
    `VariantExamination` under `examine`; the arrays are files of `BaseBinaries` that it did not have.
    """
    torch.set_num_threads(1)
    request = work.payload
    subject, result = BaseKernel.from_json(request["subject"]), KernelSurvey.from_json(request["survey"])
    plan, regimes = VerificationPlan.from_json(request["plan"]), len(CALL_REGIMES)
    configs, deterministic = [Config.from_json(c) for c in request["configs"]], bool(request["deterministic"])
    nonce = os.urandom(16).hex()
    binaries = binaries_as_arrays(request.get("binaries") or {})
    reference = BaseKernelRunner(work, plan.device, random.Random(_seed(nonce)), binaries)
    problem = VariantProblem(
        subject, result, reference, configs, plan.device, deterministic, request["takes"]
    )
    if problem.is_large:
        # Its values of a kind are drawn once: a second case would be the same.
        plan, regimes = replace(plan, cases=min(plan.cases, len(LARGE_VALUES))), 1
    pack = _variant_pack(subject, deterministic, regimes)
    steps = PhaseTimer()
    try:
        with work.cell() as cell:
            if launchers := launchers_among(binaries):
                cell.ask(WRITE_ENTRY, {}, launchers)
            judge = SolutionExaminer(pack, problem, cell, plan, _seed(nonce), alone=False)
            compiler = VariantCompiler(work, binaries)
            examination = VariantExamination(judge, problem, cell, compiler, plan.device, steps)
            try:
                reasons = examination.run()
            except CandidateFault as fault:
                reasons = [reason_of_fault(fault, judge)]
        news = reference.newly_compiled()
    finally:
        reference.close()
    size, extra = examination.memory
    facts = {"examine": steps.to_json(), "unable": examination.unable}
    facts |= {"base_peak_bytes": {"call": size}, "peak_bytes": {"call": size + extra}} if extra else {}
    return CellAnswer(verification_answer(judge, reasons, nonce, **facts), news)


def _seed(nonce: str) -> bytes:
    return hashlib.sha256(nonce.encode()).digest()


def _variant_pack(subject: BaseKernel, deterministic: bool, regimes: int = len(CALL_REGIMES)) -> Pack:
    values: Mapping[str, Any] = {"call": TensorSpec(("1",), "float32", CALL_REGIMES[:regimes])}
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
        """`steps` gets the seconds of `base` (until its cell is open), `draws`, `beside` and `compile`, of which some
        overlap, of `configs` and of `trials`."""
        self.unable: list[str] = []
        """Configs that did not run."""
        self.memory = 0, 0
        """Bytes of a call's tensors, and the most that a launch held beside them at a time."""
        self._judge, self._problem, self._cell, self._device = judge, problem, cell, device
        self._compiler, self._steps = compiler, steps
        self._cases: dict[int, LaunchCase] = {}
        """Cases by the number of the config that they will be launched with."""
        self._compiled_calls: list[Mapping[str, Any]] = []
        """Calls that the cell which launches has compiled for."""
        self._late: set[Config] = set()
        """Configs that take too long to compile: not launched."""

    def run(self) -> list[Reason]:
        """Launch all, up to the first launch with a finding. Raises `CandidateFault`, `SandboxError`."""
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

    def _prepare_while_drawing(self) -> list[Reason]:
        proposals = self._propose()
        calls = [p.call for p in proposals]
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
        self._late = {proposals[number].config for number in late}
        if self._late.issuperset(self._problem.configs):  # then one of them has to be waited for
            self._late.clear()
        # Calls that the base kernel refused were drawn anew, and may be of another form.
        cases = (*self._cases.values(), *trials)
        actual = [call_without_values(c) for c in cases if self._problem.config_of(c) not in self._late]
        remaining = actual if binaries else [call for call in actual if call not in self._compiled_calls]
        self._judge.rng.shuffle(remaining)
        self._compile(remaining, binaries)
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
            self._compiled_calls += calls
            with self._steps.phase("compile"):
                self._cell.ask(CELL_ENTRY, {"calls": [dict(call) for call in calls]}, binaries)

    def _draw_plan(self) -> list[tuple[int | None, str]]:
        """(config, or None for any; regime) of each call that is drawn before the first launch."""
        regimes = [CALL_REGIMES[n % len(CALL_REGIMES)] for n in range(len(self._problem.configs))]
        count = max(self._judge.plan.cases, len(CALL_REGIMES))
        trials = [CALL_REGIMES[n % len(CALL_REGIMES)] for n in range(count)]
        return [*enumerate(regimes), *((None, regime) for regime in (*trials, *_KERNEL_TRIAL_REGIMES))]

    def _propose(self) -> list[ProposedCall]:
        """Draw calls to launch the base kernel with, and return how the variant will be called.

        The longest compilation comes first; the order does not tell which call is for what.
        """
        proposals: list[ProposedCall] = []
        for number, regime in self._draw_plan():
            if sum(proposal.bytes for proposal in proposals) >= _MOST_HELD_BYTES:
                break
            proposals.append(self._problem.propose(_axes(number), self._judge.draw_spec(regime)))
        self._judge.rng.shuffle(proposals)
        return sorted(proposals, key=lambda p: p.work, reverse=True)

    def _draw(self, preparing: Future[list[Reason]]) -> list[LaunchCase]:
        """Cases for every config, and for the trials, which are kept for them and returned.

        Stops as soon as the variant is known to fail before any launch.
        """
        trials: list[tuple[str, LaunchCase]] = []
        size = 0
        for number, regime in self._draw_plan():
            has_failed = preparing.done() and (preparing.exception() is not None or preparing.result())
            if has_failed or size >= _MOST_HELD_BYTES:
                break
            case = self._judge.new_case(_axes(number), regime)
            size += case.input_bytes
            if number is None:
                trials.append((regime, case))
            else:
                self._cases[number] = case
        for regime, case in trials:  # not sooner: `new_case` above would have taken them
            self._problem.keep(regime, case)
        return [case for _, case in trials]

    def _launch_each_config(self) -> list[Reason]:
        """Launch every config once; those that cannot run or compile for too long are dropped, and with none left the
        variant fails.

        The seconds of a launch limit the sizes of later ones.
        """
        runnable: list[Config] = []
        last = ""
        for number, config in enumerate(self._problem.configs):
            case = self._cases.pop(number, None)
            if config in self._late:
                last = "all take too long to compile"
                self.unable.append(str(config))
                continue
            if case is None or not self._problem.fits(case):
                case = self._judge.new_case(_axes(number), CALL_REGIMES[number % len(CALL_REGIMES)])
            try:
                reply = self._judge.launch(case, watch="memory")
            except CandidateFault as fault:
                if not is_config_error(fault):
                    raise
                last = fault.detail
                self.unable.append(str(config))
                continue
            if reasons := self._judge.checked(reply):
                return reasons
            self._problem.note_launch(case, reply.seconds)
            runnable.append(config)
            call_bytes, launch_bytes = case.input_bytes + case.output_bytes, reply.operations.get(PEAK, 0)
            if launch_bytes > self.memory[1]:
                self.memory = call_bytes, launch_bytes
        self._problem.configs = runnable
        return [] if runnable else [Reason(ReasonCode.FAILS, f"no config runs: {last}"[:2000])]


def _axes(number: int | None) -> dict[str, int] | None:
    return None if number is None else {"config": number}
