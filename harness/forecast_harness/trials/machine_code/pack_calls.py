"""Calls of a pack's problem for the runner: their inputs as bytes, and what their outputs have to be."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from forecast_autotune.errors import RecordError
from forecast_harness.clocks.compilation.requests import CallCase, TensorArgument
from forecast_harness.clocks.records import BufferRole, MachineCodeError, Program
from forecast_harness.clocks.runner.messages import BufferContents, ObservedLaunch, ProgramInputs
from forecast_harness.sandbox.jobs import TensorBytes, tensor_from_bytes, tensor_to_bytes
from forecast_harness.targets.packs.schema import Pack, PackFormat
from forecast_harness.verify.problems.external_tasks import problem_of
from forecast_harness.verify.problems.problem import DrawSpec, LaunchCase


@dataclass(frozen=True)
class PreparedCall:
    """One call: without values for who compiles, with values for who launches."""

    case: LaunchCase
    arguments: CallCase
    given: ProgramInputs
    deterministic: bool

    def wrong(self, program: Program, launches: Sequence[ObservedLaunch]) -> str:
        """What is wrong with the outputs of these launches; '' if nothing is."""
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
        found = {}
        for name, tensor in self.case.tensors.items():
            turn = rotation.get(name, 0) // tensor.element_size()
            flat = tensor.contiguous().reshape(-1)
            found[name] = torch.roll(flat, -turn).reshape(tensor.shape) if turn else tensor
        return found

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
