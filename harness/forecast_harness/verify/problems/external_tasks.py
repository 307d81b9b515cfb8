"""KernelBench and GPU MODE tasks as problems. Runs in the judge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forecast_harness.targets.packs.schema import Pack, PackFormat
from forecast_harness.verify.problems.argument_codec import decode_arguments, encode_arguments
from forecast_harness.verify.problems.input_values import draw
from forecast_harness.verify.problems.module_loading import load_module
from forecast_harness.verify.problems.problem import (
    CheckFinding,
    DrawSpec,
    LaunchCase,
    NativeProblem,
    VerificationProblem,
    compare_outputs,
    form_finding,
    seeded_generator,
)
from forecast_harness.verify.tolerance import expected_outputs, tensors_of
from forecast_harness.verify.verdict import ReasonCode


def problem_of(pack: Pack, folder: Path) -> VerificationProblem:
    """The problem that a pack describes; its code is imported from `folder`."""
    kinds: dict[PackFormat, Callable[[Pack, Path], VerificationProblem]] = {
        PackFormat.OWN: NativeProblem,
        PackFormat.KERNELBENCH: KernelBenchProblem,
        PackFormat.GPUMODE: GpuModeProblem,
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

    def case(self, axes: Mapping[str, Any] | None, how: DrawSpec) -> LaunchCase:
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
            inputs = [_redraw_values(v, how) for v in inputs]
        tensors: dict[str, torch.Tensor] = {}
        shapes = [encode_arguments(v, tensors) for v in inputs]
        init_shapes = [encode_arguments(v, {}) for v in init]
        model = self._module.Model(*init)
        model.load_state_dict(state)
        model.eval()
        with torch.no_grad():
            plain = tensors_of(model(*(decode_arguments(s, tensors) for s in shapes)))
        wanted = [(tuple(t.shape), t.dtype) for t in plain]
        model.double()
        seed = int(torch.randint(0, 2**31, (), generator=how.generator))

        def judge(
            given: Mapping[str, torch.Tensor], outputs: Sequence[torch.Tensor]
        ) -> tuple[CheckFinding, float]:
            if finding := form_finding(outputs, wanted):
                return finding, 0.0

            def reference(**moved: torch.Tensor) -> Any:
                with torch.no_grad():
                    return model(*(decode_arguments(s, moved) for s in shapes))

            draws = seeded_generator(outputs, seed)
            try:
                model.to(draws.device)
                exact = expected_outputs(
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
            return compare_outputs(outputs, exact)

        size = sum(t.numel() * t.element_size() for t in plain)
        return LaunchCase(
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

    def case(self, axes: Mapping[str, Any] | None, how: DrawSpec) -> LaunchCase:
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
        shape = encode_arguments(data, tensors)

        def judge(
            given: Mapping[str, torch.Tensor], outputs: Sequence[torch.Tensor]
        ) -> tuple[CheckFinding, float]:
            arguments = decode_arguments(shape, {n: t.clone() for n, t in given.items()})
            output = outputs[0] if len(outputs) == 1 else tuple(outputs)
            if any(t.is_floating_point() and t.isnan().any() for t in outputs) and not any(
                t.is_floating_point() and t.isnan().any() for t in given.values()
            ):
                return (ReasonCode.WRONG_VALUES, "the output has NaN, the inputs have none"), 0.0
            if wanted and (finding := form_finding(outputs, wanted)):
                return finding, 0.0
            said = self._module.check_implementation(arguments, output)
            # The tasks' checkers return a message, or (passed, message), in different years.
            passed, message = said if isinstance(said, tuple) else (not said, said)
            return (None if passed else (ReasonCode.WRONG_VALUES, str(message)[:400])), 0.0

        def right() -> list[torch.Tensor]:
            copies = {n: t.clone() for n, t in tensors.items()}
            return tensors_of(self._module.ref_kernel(decode_arguments(shape, copies)))

        known = hasattr(self._module, "ref_kernel")
        wanted = [(tuple(t.shape), t.dtype) for t in right()] if known else []
        moved = sum(t.numel() * t.element_size() for t in tensors.values())
        return LaunchCase(
            f"{' '.join(f'{k}={v}' for k, v in spec.items() if k != 'seed')}",
            {"args": [shape], "kwargs": {}},
            tensors,
            judge,
            output_bytes=max(1, moved) * 16,
            moved_bytes=moved,
            right=right if known else None,
        )


def _redraw_values(value: Any, how: DrawSpec) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return draw(value.shape, value.dtype, how.regime, how.generator)
