"""Kernels kept elsewhere as problems: their own inputs with shuffled values, their own tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forecast_autotune.errors import RecordError
from forecast_harness.targets.packs.schema import Pack
from forecast_harness.verify.problems.argument_codec import decode_arguments, encode_arguments
from forecast_harness.verify.problems.module_loading import load_module
from forecast_harness.verify.problems.problem import (
    CheckFinding,
    DrawSpec,
    LaunchCase,
    compare_outputs,
)
from forecast_harness.verify.tolerance import ExpectedOutput


class CaseProblem:
    """A module with a `CASE`; see `forecast_harness.targets.packs.cases.pack_from_case`."""

    def __init__(self, pack: Pack, folder: Path) -> None:
        module = load_module(pack.reference, folder, "kernel_case")
        if not hasattr(module, "CASE"):
            raise RecordError(f"pack {pack.definition.name}: its module has no CASE")
        self._kept: Any = module.CASE
        self._small, self._shuffled = (bool(pack.workloads[0].axes[n]) for n in ("small", "shuffled"))
        self.deterministic = pack.definition.deterministic

    def case(self, axes: Mapping[str, Any] | None, how: DrawSpec) -> LaunchCase:
        """The kept inputs, every floating one with its values in a new random order."""
        data = self._kept.make("cpu", small=self._small)
        arguments = list(data["args"])
        results = [_output_position(arguments, output) for output in data["outputs"]]
        zeroed = {self._kept.kernel.arg_names.index(n) for n in self._kept.reset_to_zero}
        for n, value in enumerate(arguments):
            fixed = not self._shuffled or n in results or not isinstance(value, torch.Tensor)
            if not fixed and value.is_floating_point():
                order = torch.randperm(value.numel(), generator=how.generator)
                arguments[n] = value.reshape(-1)[order].reshape(value.shape)
        held: dict[str, torch.Tensor] = {}
        shapes: dict[str, Any] = {}
        tensors: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        for n, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                shapes[f"a{n}"] = {"t": f"a{n}"}
                written = n in results or n in zeroed
                (outputs if written else tensors)[f"a{n}"] = (
                    _unset_output(value, n in zeroed) if written else value
                )
            else:
                shapes[f"a{n}"] = encode_arguments(value, held)
        order_of_outputs = [int(name[1:]) for name in outputs]

        def right(given: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
            whole = [decode_arguments(shapes[f"a{n}"], {**outputs, **given}) for n in range(len(arguments))]
            found = self._kept.reference(
                {**data, "args": tuple(whole), "outputs": tuple(whole[n] for n in results)}
            )
            return list(found)

        def judge(
            given: Mapping[str, torch.Tensor], written: Sequence[torch.Tensor]
        ) -> tuple[CheckFinding, float]:
            atol, rtol = self._kept.tolerance
            by_position = dict(zip(order_of_outputs, written, strict=True))
            wanted = []
            for n, want in zip(results, right(given), strict=True):
                dtype = arguments[n].dtype
                if not dtype.is_floating_point:
                    wanted.append(ExpectedOutput(want, dtype, None))
                else:
                    exact = want.double()
                    wanted.append(ExpectedOutput(exact, dtype, atol + rtol * exact.abs()))
            return compare_outputs([by_position[n] for n in results], wanted)

        moved = sum(t.numel() * t.element_size() for t in (*tensors.values(), *outputs.values()))
        return LaunchCase(
            f"{self._kept.name}{' small' if self._small else ''}",
            {"args": [], "kwargs": shapes},
            tensors,
            judge,
            outputs,
            vary=None if self._shuffled else lambda generator: tensors,
            output_bytes=sum(t.numel() * t.element_size() for t in outputs.values()),
            moved_bytes=0 if self._small else min(moved, int(self._kept.bytes) or moved),
            flops=0 if self._small else int(self._kept.flops),
        )


def _output_position(arguments: Sequence[Any], output: torch.Tensor) -> int:
    for n, value in enumerate(arguments):
        if value is output:
            return n
    raise RecordError("an output of a case must be one of its arguments")


def _unset_output(like: torch.Tensor, zero: bool) -> torch.Tensor:
    if zero:
        return torch.zeros_like(like)
    return torch.full_like(like, math.nan if like.is_floating_point() else 77)
