"""Launches of a target and the compiler of its sources, as judges of machine code are given them."""

from __future__ import annotations

import hashlib
import math
import secrets
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_autotune.timing import mean_without_strays
from forecast_harness.clocks.compilation.nvcc import CudaBuild
from forecast_harness.clocks.compilation.workers import BuildRequest, CallCase, TensorArgument
from forecast_harness.clocks.paired_comparison import CANDIDATE, INCUMBENT
from forecast_harness.clocks.records import BufferRole, MachineCodeError, Program
from forecast_harness.clocks.runner.messages import (
    PAUSES,
    BufferContents,
    CheckAnswer,
    ObservedLaunch,
    ProgramFault,
    ProgramInputs,
    RunnerFaultKind,
    TimingAnswer,
    TimingLimits,
    TimingRequest,
    Violation,
)
from forecast_harness.clocks.times import impossible_time
from forecast_harness.records import Node, NodeJob, SearchTarget
from forecast_harness.sandbox.jobs import (
    TensorBytes,
    tensor_from_bytes,
    tensor_to_bytes,
)
from forecast_harness.targets.cuda.source import cuda_configs
from forecast_harness.targets.packs.schema import Language, Pack, PackFormat
from forecast_harness.targets.search_target import cuda_signature_of, pack_of
from forecast_harness.trials.configs.source_configs import (
    apply_config,
    configs_to_time,
    own_configs,
)
from forecast_harness.trials.verdict import Refusal
from forecast_harness.verify.launch_windows import rotatable_inputs
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import DrawSpec, LaunchCase, problem_of
from forecast_harness.verify.verdict import ContestantRejected, Reason, ReasonCode

TrialConfig = Mapping[str, Any]
"""A config of a source as results name it: constants of a pack's source, or a `Config` as JSON."""


class NoMachineCode(Exception):
    """A node that is to be judged as host code; the text says why."""


class PathFailed(Exception):
    """A failure of our own: nothing is known of the node; the text says what failed."""


class TrialCall(Protocol):
    """A call with known outputs, as `PreparedCall` is."""

    @property
    def arguments(self) -> CallCase:
        """The case that programs are compiled for."""

    @property
    def given(self) -> ProgramInputs:
        """The inputs of launches."""

    def wrong(self, program: Program, launches: Sequence[ObservedLaunch]) -> str:
        """Describe the fault in these outputs; '' for none."""


@dataclass(frozen=True)
class TrialCalls:
    """The calls of a target: `small` is checked, `timed` ones, by workload, are raced."""

    small: TrialCall
    timed: Mapping[str, TrialCall]


class TargetTrials(ABC):
    """Launches of one target. Called from many threads."""

    language: str
    """The language of the sources that are compiled to machine code."""
    calls: TrialCalls
    """The calls at which its nodes are launched."""

    @abstractmethod
    def configs(self, job: NodeJob, check: Callable[[], None] = lambda: None) -> Sequence[TrialConfig]:
        """Configs of a node to time, at most `job.trials`. `check` raises once nobody waits for them.

        The first is the one that suits `job.against`, or the source as it stands; the second the one that is
        forecast to be the fastest.
        """

    @abstractmethod
    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        """How a node is compiled: for the small call, then for the timed ones."""

    @abstractmethod
    def implausible(self, workload: str, seconds: float) -> str:
        """Why one launch of a workload cannot have taken so few seconds; '' if it can."""

    def sealed(self, program: Program) -> Program:
        """A program without what its cell may not decide: here nothing, as outputs are compared wherever they lie."""
        return program

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        """Heed timings: seconds by workload, of configs of the node, and of the rival; NaN where a config was not
        timed. Forecasts of packs heed no times."""
        return

    def close(self) -> None:
        """End the sandboxes of forecasts, where there are any."""
        return


@dataclass(frozen=True)
class PreparedCall:
    """One call: without values for the compiler, with values for the runner."""

    case: LaunchCase
    arguments: CallCase
    given: ProgramInputs
    deterministic: bool

    def wrong(self, program: Program, launches: Sequence[ObservedLaunch]) -> str:
        """Describe the fault in the outputs of these launches; '' for none."""
        same = [launch.outputs for launch in launches if not any(launch.rotation.values())]
        if self.deterministic and any(outputs != same[0] for outputs in same[1:]):
            return "two launches on equal inputs gave different bits"
        for number, launch in enumerate(launches):
            inputs, outputs = self._inputs(launch.rotation), self._outputs(program, launch)
            # At real sizes a judgement takes seconds, and the quick check a sixth of them.
            if self.case.quick is not None and self.case.quick(inputs, outputs):
                continue
            finding, _ = self.case.judge(inputs, outputs)
            if finding is not None:
                return f"launch {number}: {finding[0]}: {finding[1]}"[:2000]
        return ""

    def _inputs(self, rotation: Mapping[str, int]) -> dict[str, torch.Tensor]:
        results = {}
        for name, tensor in self.case.tensors.items():
            turn = rotation.get(name, 0) // tensor.element_size()
            flat = tensor.contiguous().reshape(-1)
            results[name] = torch.roll(flat, -turn).reshape(tensor.shape) if turn else tensor
        return results

    def _outputs(self, program: Program, launch: ObservedLaunch) -> list[torch.Tensor]:
        if program.plan.returned:
            kinds = [(r.dtype, r.shape) for r in program.plan.returned]
        else:
            kinds = [
                (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in self.case.outputs.values()
            ]
        return [
            tensor_from_bytes(TensorBytes(dtype, shape, data))
            for (dtype, shape), data in zip(kinds, launch.outputs, strict=True)
        ]


class PackCalls:
    """Draws calls of one pack of our own format. Raises `RecordError` for a pack of another one."""

    def __init__(self, pack: Pack, folder: Path, seed: str = "") -> None:
        """`folder`: where the reference's text is put to be imported; `seed`: '' draws one."""
        if pack.definition.format is not PackFormat.OWN:
            raise RecordError(
                f"pack {pack.definition.name} is in the {pack.definition.format} format; machine code is "
                "launched for packs of the own format only, so bench this one as host code"
            )
        self._pack, self._problem = pack, problem_of(pack, folder)
        self._seed = seed or secrets.token_hex(16)
        self._count = 0

    def draw(self, axes: Mapping[str, int] | None = None, regime: str = "normal") -> PreparedCall:
        """One call at these sizes; None draws hidden ones. Raises `RecordError` for a broken pack."""
        self._count += 1
        text = f"{self._seed} {self._count}".encode()
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))
        case = self._problem.case(axes, DrawSpec(regime, "contiguous", generator))
        key = hashlib.sha256(text).hexdigest()
        rotatable = [n for n in rotatable_inputs(self._pack, case) if case.tensors[n].is_contiguous()]
        return prepare_call(case, key, rotatable, self._problem.deterministic)


def prepare_call(case: LaunchCase, key: str, rotatable: Sequence[str], deterministic: bool) -> PreparedCall:
    """A case of a problem as the runner takes it. Raises `MachineCodeError` for arguments it cannot pass."""
    if case.call.get("args") or case.state:
        raise MachineCodeError("positional arguments and modules' parameters take the way of host code")
    scalars: dict[str, Any] = {n: v["v"] for n, v in case.call["kwargs"].items() if "v" in v}
    tensors = {n: _argument(t, BufferRole.INPUT) for n, t in case.tensors.items()}
    tensors |= {n: _argument(t, BufferRole.OUTPUT) for n, t in case.outputs.items()}
    inputs = ProgramInputs(
        key,
        {n: BufferContents.of(bytes(tensor_to_bytes(t).data)) for n, t in case.tensors.items()},
        {n: t.numel() * t.element_size() for n, t in case.outputs.items()},
        {n: case.tensors[n].element_size() for n in rotatable},
    )
    return PreparedCall(case, CallCase(tensors, scalars), inputs, deterministic)


def _argument(tensor: torch.Tensor, role: BufferRole) -> TensorArgument:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    strides = torch.empty(shape, device="meta").stride()  # handed over contiguous, in any layout of the draw
    return TensorArgument(dtype, shape, tuple(strides), role=role)


class DrawnTrials(TargetTrials):
    """The part of `TargetTrials` that sources in any language of a pack share."""

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path) -> None:
        """`folder` is for scratch files. Raises `RecordError`, `MachineCodeError` where calls cannot be drawn."""
        folder.mkdir(parents=True, exist_ok=True)
        pack, self._target, self._plan = pack_of(target), target, plan
        source = PackCalls(pack, folder)
        self._timed_calls: dict[str, PreparedCall] = {
            w.name: source.draw({n: int(v) for n, v in w.axes.items()})
            for w in pack.timed_workloads(plan.device, Language(self.language))
        }
        small = source.draw()
        self.calls = TrialCalls(small, self._timed_calls)
        self._every = (small, *self._timed_calls.values())
        """The calls in the order in which a node is compiled for them."""
        self._cases = tuple(call.arguments for call in self._every)

    def implausible(self, workload: str, seconds: float) -> str:
        """Why one launch of a workload cannot have taken so few seconds; '' if it can."""
        case = self._timed_calls[workload].case
        return impossible_time(seconds, case.moved_bytes, case.flops, self._plan.peaks)


class PackTrials(DrawnTrials):
    """`TargetTrials` of a pack of our own format. Raises `RecordError`, `MachineCodeError` for any other."""

    language = "triton"

    def configs(self, job: NodeJob, check: Callable[[], None] = lambda: None) -> Sequence[TrialConfig]:
        """The source as it stands, the config that suits the rival's, and others as unlike these as can be."""
        try:
            own = own_configs(job.node.source)
        except RecordError as error:
            raise Refusal(Outcome.COMPILE_ERROR, "compile", str(error)) from error
        return configs_to_time(own, max(1, job.trials), job.against_config)

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        """How a node is compiled: for the small call, then for the timed ones."""
        return BuildRequest(node.id, apply_config(node.source, config), self._target.entry, self._cases)


class CudaTrials(DrawnTrials):
    """`TargetTrials` of a CUDA kernel with a declared signature."""

    language = "cuda"

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path) -> None:
        """`folder` is for scratch files. Raises `RecordError`, `MachineCodeError` where calls cannot be drawn."""
        super().__init__(target, plan, folder)
        self._signature = cuda_signature_of(target)
        self._axes = tuple(dict(call.case.sizes or {}) for call in self._every)

    def configs(self, job: NodeJob, check: Callable[[], None] = lambda: None) -> Sequence[TrialConfig]:
        """The source as it stands, the config that suits the rival's, and others as unlike these as can be."""
        try:
            own = cuda_configs(job.node.source)
        except RecordError:  # the compilation raises it again
            return [{}]
        return configs_to_time(own, max(1, job.trials), job.against_config)

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        """How a node is compiled: for the small call, then for the timed ones."""
        build = CudaBuild(self._signature, dict(config), self._axes)
        return BuildRequest(node.id, node.source, self._signature.entry, self._cases, cuda=build)


# --- the clock of machine code ---


_BLOCK = 4
"""Launches that are taken together, where they are not behind pauses."""
_MOST_STRAYS = 0.25
"""The share of a block's launches that somebody else may have held up."""

AskRunner = Callable[[Sequence[TimingRequest]], Sequence[TimingAnswer]]
"""Has a runner time programs at several calls, as `RunnerClient.time_calls` does."""


class RunnerClock:
    """A `TrialClock` over launches of two programs at all calls, which a runner times in batches.

    A time is that of launches which are taken together: behind each pause once, or some in a row. `strays`: see
    `block_means`. `implausible` says of a call and seconds why a launch cannot have taken so few; '' if it can.
    """

    def __init__(
        self,
        ask: AskRunner,
        calls: Mapping[str, TrialCall],
        programs: Mapping[str, Sequence[Program]],
        implausible: Callable[[str, float], str],
        batch: TimingLimits,
        *,
        strays: bool = True,
        checks_by_chance: Callable[[], bool] = lambda: False,
    ) -> None:
        """`programs`: the baseline's and the source's, by call. `checks_by_chance`: whether a batch that `sample` asks
        for is compared with what is right."""
        self._ask, self._calls, self._programs, self._implausible = ask, calls, programs, implausible
        self._batch, self._strays, self._checks_by_chance = batch, strays, checks_by_chance
        self._waiting: tuple[deque[float], deque[float]] = (deque(), deque())
        self.seconds: dict[tuple[int, str], list[float]] = {}
        self.checks = 0
        """Launches whose outputs were compared with the right ones."""

    def place(self) -> None:
        """Nothing: the runner places, loads and warms up programs with each batch."""

    def sample(self, which: int, fresh: bool) -> float:
        """Seconds of one launch, over calls their geometric mean. Raises `ContestantRejected`, `RunnerLost`."""
        while not self._waiting[which]:
            self._measure(compares=self._checks_by_chance())
        return self._waiting[which].popleft()

    def check(self) -> None:
        """Time a batch whose outputs are compared with the right ones. Raises as `sample`."""
        self._measure(compares=True)

    def _measure(self, *, compares: bool) -> None:
        limits = self._batch if compares else replace(self._batch, checks=0)
        requests = {name: (pair, limits) for name, pair in self._programs.items()}
        means = list[list[list[float]]]()
        for name, answer in time_programs(self._ask, self._calls, requests).items():
            if wrong := self._calls[name].wrong(self._programs[name][CANDIDATE], answer.launches):
                raise ContestantRejected(CANDIDATE, [Reason(ReasonCode.WRONG_VALUES, wrong)])
            self.checks += len(answer.launches)
            means.append([block_means(s, answer.recorded, strays=self._strays) for s in answer.seconds])
            for which, blocks in enumerate(means[-1]):
                self.seconds.setdefault((which, name), []).extend(blocks)
                if problem := self._implausible(name, statistics.median(blocks)):
                    raise ContestantRejected(which, [Reason(ReasonCode.IMPOSSIBLE, problem)])
        for which in (INCUMBENT, CANDIDATE):
            for together in zip(*(means_of_call[which] for means_of_call in means), strict=False):
                self._waiting[which].append(math.exp(statistics.fmean(map(math.log, together))))


def time_programs(
    ask: AskRunner,
    calls: Mapping[str, TrialCall],
    requests: Mapping[str, tuple[Sequence[Program], TimingLimits]],
) -> dict[str, TimingAnswer]:
    """The runner's answer by call: one program alone, or two side by side of which the second is on trial.

    Raises `ContestantRejected` for a program that fails or breaks a rule, `RunnerLost`.
    """
    if not requests:
        return {}
    contestants = next(iter(requests.values()))[0]
    batch = [TimingRequest(programs, calls[n].given, limits) for n, (programs, limits) in requests.items()]
    try:
        answers = ask(batch)
    except ProgramFault as fault:
        is_first = len(contestants) > 1 and fault.candidate == contestants[INCUMBENT].candidate
        raise ContestantRejected(INCUMBENT if is_first else CANDIDATE, [_fault_reason(fault)]) from fault
    if reason := violation_reason(answers[-1].violations):
        which = answers[-1].violations[0].contestant if len(contestants) > 1 else CANDIDATE
        raise ContestantRejected(which, [reason])
    return dict(zip(requests, answers, strict=True))


def check_on_call(
    check: Callable[[Program, ProgramInputs], CheckAnswer], call: TrialCall, program: Program
) -> None:
    """The stage "right on one call". Raises `ContestantRejected` for a program that is not, `RunnerLost`.

    `check`: as `RunnerClient.check`.
    """
    try:
        answer = check(program, call.given)
    except ProgramFault as fault:
        raise ContestantRejected(CANDIDATE, [_fault_reason(fault)]) from fault
    reason = violation_reason(answer.violations)
    if reason is None and (wrong := call.wrong(program, answer.launches)):
        reason = Reason(ReasonCode.WRONG_VALUES, wrong)
    if reason is not None:
        raise ContestantRejected(CANDIDATE, [reason])


def violation_reason(violations: Sequence[Violation]) -> Reason | None:
    """The first thing that a right program does not do; None for none."""
    if not violations:
        return None
    is_outside = violations[0].rule == "out of bounds"
    code = ReasonCode.OUT_OF_BOUNDS if is_outside else ReasonCode.MUTATED_INPUT
    return Reason(code, f"{violations[0].rule}: {violations[0].detail}")


def _fault_reason(fault: ProgramFault) -> Reason:
    code = ReasonCode.TIMEOUT if fault.kind is RunnerFaultKind.HANG else ReasonCode.FAILS
    return Reason(code, fault.detail[:2000])


def block_means(seconds: Sequence[float], recorded: bool, *, strays: bool = True) -> list[float]:
    """Mean seconds of launches that are taken together: behind each pause once where `recorded`, or some in a row.

    `strays`: launches far above a block's median count, too. Few blocks cannot do with those that somebody else on
    the host or the device has held up; what is proven by many needs them, as a source may be slow now and then.
    """
    size = PAUSES if recorded else min(_BLOCK, len(seconds))
    mean = statistics.fmean if strays else _mean_of_usual
    return [mean(seconds[n : n + size]) for n in range(0, len(seconds) - size + 1, size)]


def _mean_of_usual(seconds: Sequence[float]) -> float:
    """The mean without strays, of which there are a few at the most: a source that is often slow is slow."""
    most = sorted(seconds)[: len(seconds) - int(_MOST_STRAYS * len(seconds))]
    return max(mean_without_strays(seconds), statistics.fmean(most))
