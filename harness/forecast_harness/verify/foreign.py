"""KernelBench and GPU MODE tasks as problems. Runs in the judge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forecast_harness.packs.schema import Format, Pack
from forecast_harness.verify.casework import CaseProblem
from forecast_harness.verify.draws import draw
from forecast_harness.verify.problem import (
    Case,
    Draw,
    Finding,
    OwnProblem,
    Problem,
    compare,
    load_module,
    seeded,
    shape_and_dtype,
)
from forecast_harness.verify.skeleton import filled, skeleton
from forecast_harness.verify.tolerance import expected, outputs_of
from forecast_harness.verify.verdict import Code


def problem_of(pack: Pack, folder: Path) -> Problem:
    """The problem that a pack describes; its code is imported from `folder`."""
    kinds: dict[Format, Callable[[Pack, Path], Problem]] = {
        Format.OWN: OwnProblem,
        Format.KERNELBENCH: KernelBenchProblem,
        Format.GPUMODE: GpuModeProblem,
        Format.CASE: CaseProblem,
    }
    return kinds[pack.definition.format](pack, folder)


class KernelBenchProblem:
    """A KernelBench task: a module, its constructor arguments and its inputs.

    Parameters are drawn by the task's own constructor, and loaded strictly into the solution's module
    before every launch, so that a solution can neither omit nor bake in any.
    """

    deterministic = True

    def __init__(self, pack: Pack, folder: Path) -> None:
        self._rule = pack.definition.tolerance
        self._module = load_module(pack.reference, folder, "kernelbench_task")
        self._models = 0
        self._state: dict[str, torch.Tensor] = {}

    def case(self, axes: Mapping[str, Any] | None, how: Draw) -> Case:
        """Inputs of `get_inputs()` with fresh values, and fresh parameters in every fourth case."""
        torch.manual_seed(int(torch.randint(0, 2**31, (), generator=how.generator)))
        init = list(self._module.get_init_inputs())
        if self._models % 4 == 0:
            model = self._module.Model(*init)
            self._state = {n: t.detach().clone() for n, t in model.state_dict().items()}
        self._models += 1
        state = self._state
        inputs = list(self._module.get_inputs())
        if how.regime != "normal":
            inputs = [_redrawn(v, how) for v in inputs]
        tensors: dict[str, torch.Tensor] = {}
        shapes = [skeleton(v, tensors) for v in inputs]
        init_shapes = [skeleton(v, {}) for v in init]
        model = self._module.Model(*init)
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            plain = outputs_of(model(*(filled(s, tensors) for s in shapes)))
        wanted = [(tuple(t.shape), t.dtype) for t in plain]
        model.double()
        seed = int(torch.randint(0, 2**31, (), generator=how.generator))

        def judge(
            given: Mapping[str, torch.Tensor], outputs: Sequence[torch.Tensor]
        ) -> tuple[Finding, float]:
            if finding := shape_and_dtype(outputs, wanted):
                return finding, 0.0

            def reference(**moved: torch.Tensor) -> Any:
                with torch.no_grad():
                    return model(*(filled(s, moved) for s in shapes))

            draws = seeded(outputs, seed)
            try:
                model.to(draws.device)
                exact = expected(
                    reference,
                    given,
                    [d for _, d in wanted],
                    compute=getattr(torch, self._rule.compute),
                    terms=int(self._rule.reduction),
                    safety=self._rule.safety,
                    floor=self._rule.floor,
                    generator=draws,
                )
            finally:
                model.to("cpu")
            return compare(outputs, exact)

        size = sum(t.numel() * t.element_size() for t in plain)
        return Case(
            f"task {how.regime}",
            {"args": shapes, "kwargs": {}, "init": init_shapes},
            tensors,
            judge,
            state=state,
            output_bytes=size,
            moved_bytes=size + sum(t.numel() * t.element_size() for t in tensors.values()),
            right=lambda: plain,
            portable=True,
        )


class GpuModeProblem:
    """A GPU MODE task: its own generator with fresh seeds, and its own checker."""

    deterministic = True

    def __init__(self, pack: Pack, folder: Path) -> None:
        self._workloads = pack.workloads
        self._module = load_module(pack.reference, folder, "gpumode_task")
        self._drawn = 0

    def case(self, axes: Mapping[str, Any] | None, how: Draw) -> Case:
        """Inputs of `generate_input`; hidden cases take the public sizes in turn, with other seeds."""
        if axes is None:
            self._drawn += 1
            axes = self._workloads[self._drawn % len(self._workloads)].axes
        generate = self._module.generate_input
        spec = dict(axes)
        if "seed" in inspect.signature(generate).parameters:
            spec["seed"] = int(torch.randint(1, 2**31, (), generator=how.generator))
        data = generate(**spec)
        tensors: dict[str, torch.Tensor] = {}
        shape = skeleton(data, tensors)

        def judge(
            given: Mapping[str, torch.Tensor], outputs: Sequence[torch.Tensor]
        ) -> tuple[Finding, float]:
            arguments = filled(shape, {n: t.clone() for n, t in given.items()})
            output = outputs[0] if len(outputs) == 1 else tuple(outputs)
            if any(t.is_floating_point() and t.isnan().any() for t in outputs) and not any(
                t.is_floating_point() and t.isnan().any() for t in given.values()
            ):
                return (Code.WRONG_VALUES, "the output has NaN, the inputs have none"), 0.0
            if wanted and (finding := shape_and_dtype(outputs, wanted)):
                return finding, 0.0
            said = self._module.check_implementation(arguments, output)
            # The tasks' checkers return a message, or (passed, message), in different years.
            passed, message = said if isinstance(said, tuple) else (not said, said)
            return (None if passed else (Code.WRONG_VALUES, str(message)[:400])), 0.0

        def right() -> list[torch.Tensor]:
            copies = {n: t.clone() for n, t in tensors.items()}
            return outputs_of(self._module.ref_kernel(filled(shape, copies)))

        known = hasattr(self._module, "ref_kernel")
        wanted = [(tuple(t.shape), t.dtype) for t in right()] if known else []
        moved = sum(t.numel() * t.element_size() for t in tensors.values())
        return Case(
            f"{' '.join(f'{k}={v}' for k, v in spec.items() if k != 'seed')}",
            {"args": [shape], "kwargs": {}},
            tensors,
            judge,
            output_bytes=max(1, moved) * 16,
            moved_bytes=moved,
            right=right if known else None,
        )


def _redrawn(value: Any, how: Draw) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return draw(value.shape, value.dtype, how.regime, how.generator)
