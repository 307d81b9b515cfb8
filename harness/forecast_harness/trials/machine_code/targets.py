"""Launches of a target and the compiler of its sources, as judges of machine code are given them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Outcome
from forecast_harness.clocks.compilation.nvcc import CudaBuild
from forecast_harness.clocks.compilation.requests import BuildRequest, CallCase, TensorArgument
from forecast_harness.clocks.records import BufferRole, MachineCodeError, Program
from forecast_harness.clocks.runner.messages import (
    BufferContents,
    ObservedLaunch,
    ProgramInputs,
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
from forecast_harness.verify.plan import VerificationPlan
from forecast_harness.verify.problem import DrawSpec, LaunchCase, problem_of

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


class TargetTrials(Protocol):
    """Launches of one target. Called from many threads."""

    language: str
    """The language of the sources that are compiled to machine code."""

    @property
    def calls(self) -> TrialCalls:
        """On what its nodes are launched."""

    def configs(self, job: NodeJob, check: Callable[[], None] = lambda: None) -> Sequence[TrialConfig]:
        """Configs of a node to time, at most `job.trials`. `check` raises once nobody waits for them.

        The first is the one that suits `job.against`, or the source as it stands; the second the one that is
        forecast to be the fastest.
        """

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        """How a node is compiled: for the small call, then for the timed ones."""

    def sealed(self, program: Program) -> Program:
        """A program with what its cell may not decide, such as which buffers are its outputs."""

    def implausible(self, workload: str, seconds: float) -> str:
        """Why one launch of a workload cannot have taken so few seconds; '' if it can."""

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        """Heed what was timed: seconds by workload, of configs of the node, and of the rival; NaN where a config was
        not timed."""

    def close(self) -> None:
        """End what forecasts."""


@dataclass(frozen=True)
class PreparedCall:
    """One call: without values for who compiles, with values for who launches."""

    case: LaunchCase
    arguments: CallCase
    given: ProgramInputs
    deterministic: bool

    def wrong(self, program: Program, launches: Sequence[ObservedLaunch]) -> str:
        """Describe the fault in the outputs of these launches; '' for none."""
        same = [one.outputs for one in launches if not any(one.rotation.values())]
        if self.deterministic and any(outputs != same[0] for outputs in same[1:]):
            return "two launches on equal inputs gave different bits"
        for number, one in enumerate(launches):
            inputs, outputs = self._inputs(one.rotation), self._outputs(program, one)
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

    def _outputs(self, program: Program, one: ObservedLaunch) -> list[torch.Tensor]:
        if program.plan.returned:
            kinds = [(r.dtype, r.shape) for r in program.plan.returned]
        else:
            kinds = [
                (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in self.case.outputs.values()
            ]
        return [
            tensor_from_bytes(TensorBytes(dtype, shape, data))
            for (dtype, shape), data in zip(kinds, one.outputs, strict=True)
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
        self._drawn = 0

    def draw(self, axes: Mapping[str, int] | None = None, regime: str = "normal") -> PreparedCall:
        """One call at these sizes; None draws hidden ones. Raises `RecordError` for a broken pack."""
        self._drawn += 1
        text = f"{self._seed} {self._drawn}".encode()
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"))
        case = self._problem.case(axes, DrawSpec(regime, "contiguous", generator))
        key = hashlib.sha256(text).hexdigest()
        return prepare_call(case, key, self._rotatable(case), self._problem.deterministic)

    def _rotatable(self, case: LaunchCase) -> list[str]:
        """Inputs whose values mean the same in another order: drawn one by one, by no `make`, no weights."""
        if "def make" in self._pack.reference:
            return []
        known = self._pack.definition.inputs
        return [
            name
            for name, tensor in case.tensors.items()
            if tensor.is_floating_point() and tensor.is_contiguous() and not known[name].static
        ]


def prepare_call(case: LaunchCase, key: str, rotatable: Sequence[str], deterministic: bool) -> PreparedCall:
    """A case of a problem as the runner takes it. Raises `MachineCodeError` for arguments it cannot pass."""
    if case.call.get("args") or case.state:
        raise MachineCodeError("positional arguments and modules' parameters take the way of host code")
    scalars: dict[str, Any] = {n: v["v"] for n, v in case.call["kwargs"].items() if "v" in v}
    tensors = {n: _argument(t, BufferRole.INPUT) for n, t in case.tensors.items()}
    tensors |= {n: _argument(t, BufferRole.OUTPUT) for n, t in case.outputs.items()}
    given = ProgramInputs(
        key,
        {n: BufferContents.of(bytes(tensor_to_bytes(t).data)) for n, t in case.tensors.items()},
        {n: t.numel() * t.element_size() for n, t in case.outputs.items()},
        {n: case.tensors[n].element_size() for n in rotatable},
    )
    return PreparedCall(case, CallCase(tensors, scalars), given, deterministic)


def _argument(tensor: torch.Tensor, role: BufferRole) -> TensorArgument:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    strides = torch.empty(shape, device="meta").stride()  # handed over contiguous, whatever it was drawn as
    return TensorArgument(dtype, shape, tuple(strides), role=role)


class DrawnTrials:
    """The part of `TargetTrials` that sources in any language of a pack share."""

    language: str

    def __init__(self, target: SearchTarget, plan: VerificationPlan, folder: Path) -> None:
        """`folder` is for scratch files. Raises `RecordError`, `MachineCodeError` where calls cannot be drawn."""
        folder.mkdir(parents=True, exist_ok=True)
        pack, self._target, self._plan = pack_of(target), target, plan
        drawn = PackCalls(pack, folder)
        self._timed: dict[str, PreparedCall] = {
            w.name: drawn.draw({n: int(v) for n, v in w.axes.items()})
            for w in pack.timed_workloads(plan.device, Language(self.language))
        }
        small = drawn.draw()
        self._calls = TrialCalls(small, self._timed)
        self._every = (small, *self._timed.values())
        """In the order in which a node is compiled for them."""
        self._cases = tuple(call.arguments for call in self._every)

    @property
    def calls(self) -> TrialCalls:
        """On what nodes are launched."""
        return self._calls

    def sealed(self, program: Program) -> Program:
        """As it is: whoever made its plan may say where outputs lie, and they are compared with what is right."""
        return program

    def implausible(self, workload: str, seconds: float) -> str:
        """Why one launch of a workload cannot have taken so few seconds; '' if it can."""
        case = self._timed[workload].case
        return impossible_time(seconds, case.moved_bytes, case.flops, self._plan.peaks)

    def learn(
        self, job: NodeJob, timed: Sequence[tuple[TrialConfig, Sequence[float]]], rival: Sequence[float]
    ) -> None:
        """Forecasts of packs heed no times."""

    def close(self) -> None:
        """Nothing is held."""


class PackTrials(DrawnTrials):
    """`TargetTrials` of a pack of our own format. Raises `RecordError`, `MachineCodeError` for any other."""

    language = "triton"

    def configs(self, job: NodeJob, check: Callable[[], None] = lambda: None) -> Sequence[TrialConfig]:
        """The source as it stands, the config that suits the rival's, and others as unlike these as can be."""
        try:
            listed = own_configs(job.node.source)
        except RecordError as error:
            raise Refusal(Outcome.COMPILE_ERROR, "compile", str(error)) from error
        return configs_to_time(listed, max(1, job.trials), job.against_config)

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
            listed = cuda_configs(job.node.source)
        except RecordError:  # told where it is compiled
            return [{}]
        return configs_to_time(listed, max(1, job.trials), job.against_config)

    def request(self, node: Node, config: TrialConfig) -> BuildRequest:
        """How a node is compiled: for the small call, then for the timed ones."""
        build = CudaBuild(self._signature, dict(config), self._axes)
        return BuildRequest(node.id, node.source, self._signature.entry, self._cases, cuda=build)
