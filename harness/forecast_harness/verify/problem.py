"""From a pack to launches: drawn arguments, and the results of a correct solution.

Runs in the judge. A pack's reference is trusted code: its admission is a person's decision.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from forecast_autotune.errors import RecordError
from forecast_harness.targets.packs.schema import Definition, Pack, PackFormat, TensorSpec, evaluate
from forecast_harness.verify.cost_control import HOST_DEVICE, ComputeDevice
from forecast_harness.verify.inputs import (
    DERIVED_REGIMES,
    InputMutator,
    can_mutate,
    decode_arguments,
    draw,
    encode_arguments,
    perturb_values,
)
from forecast_harness.verify.tolerance import (
    ExpectedOutput,
    expected_outputs,
    mismatch,
    narrow_limits,
    surely_right,
    tensors_of,
)
from forecast_harness.verify.verdict import ReasonCode

CheckFinding = tuple[ReasonCode, str] | None
MANY_ELEMENTS = 1 << 20
"""Elements from which on a tensor is drawn on the device."""

OUTSIDE_DOMAIN = -1.0
"""Stands for an error over its limit where the reference is not made for these arguments."""


@dataclass(frozen=True)
class DrawSpec:
    """The way to draw the arguments of one launch."""

    regime: str
    layout: str
    generator: torch.Generator
    where: ComputeDevice = HOST_DEVICE
    """The device that draws large tensors; they are handed over on the host."""


@dataclass(frozen=True)
class LaunchCase:
    """The arguments of one launch. `call` is a skeleton in which `{"t": name}` stands for a tensor."""

    label: str
    call: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    judge: Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], tuple[CheckFinding, float]]
    """(input tensors, outputs) -> the fault (None: right), and the largest error over its limit."""
    outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Unset outputs for a solution that writes into given ones."""
    layouts: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Parameters that a module is given before the launch."""
    output_bytes: int = 0
    moved_bytes: int = 0
    """Bytes that must cross the memory bus once."""
    flops: int = 0
    right: Callable[[], Sequence[torch.Tensor]] | None = None
    """The reference's own outputs in the dtypes asked for; for a pack's admission."""

    vary: Callable[[torch.Generator], Mapping[str, torch.Tensor]] | None = None
    """Nearly the same inputs, where changing them one by one could break what the pack promises."""
    drifting: Callable[[], InputMutator | None] | None = None
    """The mutator of inputs that are changed in place, where they can be; in place of `vary`."""
    mutator: InputMutator | None = None
    """The mutator that changes these tensors in place, once that has begun."""
    quick: Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], bool] | None = None
    """(input tensors, outputs) -> whether these are right for sure, for a small part of the cost of `judge`."""
    matches: Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], bool] | None = None
    """(input tensors, outputs) -> whether these are the reference's, where a `judge` does more for wrong ones."""
    portable: bool = True
    """Whether `judge` takes tensors that are on a device; one that knows its inputs again by identity does not."""
    sizes: Mapping[str, Any] | None = None
    """Axes that give a case of the same sizes, where there are any."""

    @property
    def input_bytes(self) -> int:
        """The bytes of all tensors that are handed over, given outputs included."""
        return sum(t.numel() * t.element_size() for t in (*self.tensors.values(), *self.outputs.values()))

    def with_mutator(self) -> LaunchCase:
        """The same case, whose tensors `next` will change in place; unchanged where they must not be."""
        if self.drifting is not None:
            return replace(self, mutator=self.drifting())
        if not can_mutate(self.tensors, self.tensors):
            return self
        names = () if self.vary is None else self.tensors
        return replace(self, mutator=InputMutator(self.tensors, self.tensors, names))

    def next(self, generator: torch.Generator) -> LaunchCase:
        """The arguments of the next launch, nearly the same: a twin, or this case, changed in place."""
        if self.mutator is None:
            return self.twin(generator)
        self.mutator.step(generator)
        return self

    def check(
        self, outputs: Sequence[torch.Tensor], where: ComputeDevice = HOST_DEVICE
    ) -> tuple[CheckFinding, float]:
        """The fault of these outputs (None: right), and the largest error over its limit.

        `OUTSIDE_DOMAIN` instead, where the right result is not known.
        """

        def judge(device: str) -> tuple[CheckFinding, float]:
            return self.judge(
                {n: t.to(device) for n, t in self.tensors.items()}, [t.to(device) for t in outputs]
            )

        return where.run(judge, portable=self.portable)

    def is_surely_right(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether these outputs are right by the quick check; False where only `check` can say."""
        return self.quick is not None and self.quick(self.tensors, outputs)

    @property
    def already_right(self) -> bool:
        """Whether the outputs that a solution is given are right already: nothing is left to do."""
        outputs = list(self.outputs.values())
        if self.matches is not None:
            return bool(outputs) and self.matches(self.tensors, outputs)
        return bool(outputs) and self.check(outputs)[0] is None

    def twin(self, generator: torch.Generator) -> LaunchCase:
        """The same launch with a few elements of its floating inputs changed."""
        values: Mapping[str, torch.Tensor]
        if self.vary is not None:
            values = self.vary(generator)
        else:
            values = {
                n: perturb_values(t, generator) if t.is_floating_point() else t
                for n, t in self.tensors.items()
            }
        return replace(self, label=f"{self.label} nearly the same", tensors=values)


class VerificationProblem(Protocol):
    """The judge's interface to a pack, whichever convention the pack follows."""

    deterministic: bool

    def case(self, axes: Mapping[str, Any] | None, how: DrawSpec) -> LaunchCase:
        """Arguments at these axes; None draws hidden ones. Raises `RecordError` for a broken pack."""


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of this name."""
    result: torch.dtype = getattr(torch, name)
    return result


def form_finding(
    outputs: Sequence[torch.Tensor], wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]
) -> CheckFinding:
    """The fault in number, shapes and dtypes of outputs; None when they are as wanted."""
    if len(outputs) != len(wanted):
        return ReasonCode.WRONG_STRUCTURE, f"{len(outputs)} outputs instead of {len(wanted)}"
    for n, (output, (shape, dtype)) in enumerate(zip(outputs, wanted, strict=True)):
        if tuple(output.shape) != shape:
            return ReasonCode.WRONG_SHAPE, f"output {n} has shape {list(output.shape)}, not {list(shape)}"
        if output.dtype != dtype:
            return ReasonCode.WRONG_DTYPE, f"output {n} is {output.dtype}, not {dtype}"
    return None


def seeded_generator(outputs: Sequence[torch.Tensor], seed: int) -> torch.Generator:
    """A generator for where these tensors are."""
    return torch.Generator(outputs[0].device if outputs else "cpu").manual_seed(seed)


def compare_outputs(
    outputs: Sequence[torch.Tensor], wanted: Sequence[ExpectedOutput]
) -> tuple[CheckFinding, float]:
    """The first output that breaks its limits, and the largest error over its limit."""
    worst = 0.0
    for n, (output, expected) in enumerate(zip(outputs, wanted, strict=True)):
        problem, ratio = mismatch(output, expected)
        worst = max(worst, ratio)
        if problem:
            return (ReasonCode.WRONG_VALUES, f"output {n}: {problem}"), worst
    return None, worst


class NativeProblem:
    """A pack of our own format."""

    def __init__(self, pack: Pack, folder: Path) -> None:
        self._definition: Definition = pack.definition
        self.deterministic = pack.definition.deterministic
        self._row_scales: dict[tuple[Any, ...], list[float]] = {}
        """`ExpectedOutput.row_scale` of each output, by regime and sizes."""
        self._runs: list[int] = []
        """Rows of an orthogonal array: of four hidden draws, every pair of axes has each small beside each large."""
        self._static: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        module = load_module(pack.reference, folder, "pack_reference")
        result = getattr(module, "reference", None)
        self._make = getattr(module, "make", None)
        if not callable(result):
            raise RecordError(f"pack {pack.definition.name}: reference.py lacks a function `reference`")
        self._reference: Callable[..., Any] = result

    def _axes(self, axes: Mapping[str, Any] | None, generator: torch.Generator) -> dict[str, int]:
        results = {}
        if axes is None:
            self._runs = self._runs or [int(n) for n in torch.randperm(4, generator=generator)]
            row = self._runs.pop()
            halves = itertools.cycle((row & 1, row >> 1, (row & 1) ^ (row >> 1)))
        for name, axis in self._definition.axes.items():
            if axis.value is not None:
                results[name] = axis.value
            elif axes is not None:
                results[name] = int(axes[name])
            else:
                low, high = -(-axis.low // axis.multiple), axis.high // axis.multiple
                results[name] = _draw_size(low, high, next(halves), generator) * axis.multiple
        return results

    def case(self, axes: Mapping[str, Any] | None, how: DrawSpec) -> LaunchCase:
        """Arguments at these axes; None draws hidden ones. Raises `RecordError` for a broken pack."""
        definition, sizes = self._definition, self._axes(axes, how.generator)
        values: dict[str, Any] = {}
        layouts = {}
        for name, spec in definition.inputs.items():
            values[name] = self._draw_input(name, spec, spec.sizes(sizes), how)
            if how.layout in spec.layouts:
                layouts[name] = how.layout
        draws, state = dict(values), how.generator.get_state()
        versions = [t._version for t in draws.values()]  # a `make` that writes into them is not repeatable
        if self._make is not None:
            values = self._make(sizes, values, how.generator)
        is_unchanged = versions == [t._version for t in draws.values()]

        def inputs_from(fresh: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            if self._make is None:
                return fresh
            result = self._make(sizes, dict(fresh), torch.Generator().manual_seed(0).set_state(state))
            return {n: v for n, v in result.items() if isinstance(v, torch.Tensor)}

        def vary(generator: torch.Generator) -> Mapping[str, torch.Tensor]:
            neighbours = {
                n: t
                if definition.inputs[n].static or not t.is_floating_point()
                else perturb_values(t, generator)
                for n, t in draws.items()
            }
            return inputs_from(neighbours)

        def drifting() -> InputMutator | None:
            inputs = {n: v for n, v in draws.items() if isinstance(v, torch.Tensor)}
            if not is_unchanged or not can_mutate(inputs, tensors):
                return None
            static = [n for n in draws if definition.inputs[n].static]
            return InputMutator(inputs, tensors, static, None if self._make is None else inputs_from)

        tensors = {n: v for n, v in values.items() if isinstance(v, torch.Tensor)}
        self._check_inputs(tensors, sizes)
        forms = [(t.sizes(sizes), dtype_of(t.dtype)) for t in definition.outputs.values()]
        unset = {}
        if definition.destination:
            for (name, spec), (shape, dtype) in zip(definition.outputs.items(), forms, strict=True):
                unset[name] = _unset_output(shape, dtype)
                if how.layout in spec.layouts:
                    layouts[name] = how.layout
        scalars = {n: v for n, v in values.items() if n not in tensors}
        seed = int(torch.randint(0, 2**31, (), generator=how.generator))
        output_bytes = sum(_bytes(shape, dtype) for shape, dtype in forms)
        input_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        arguments = {n: {"t": n} for n in (*tensors, *unset)} | {n: {"v": v} for n, v in scalars.items()}
        return LaunchCase(
            f"{' '.join(f'{n}={v}' for n, v in sizes.items())} {how.regime} {how.layout}",
            {"args": [], "kwargs": arguments},
            tensors,
            lambda inputs, outputs: self._judge(
                {**scalars, **inputs}, outputs, forms, sizes, seed, how.regime
            ),
            unset,
            layouts,
            output_bytes=output_bytes,
            moved_bytes=evaluate(definition.bytes, sizes) if definition.bytes else output_bytes + input_bytes,
            flops=evaluate(definition.flops, sizes),
            right=lambda: self._right(values, forms),
            quick=self._quick_check(scalars, forms, sizes, how.regime),
            vary=vary,
            drifting=drifting,
            sizes=sizes,
        )

    def _draw_input(self, name: str, spec: TensorSpec, shape: tuple[int, ...], how: DrawSpec) -> torch.Tensor:
        """Fresh values, or the ones that a static input of this shape has got already."""
        if (name, shape) in self._static:
            return self._static[name, shape].clone()
        regimes = (*spec.values, *(DERIVED_REGIMES if "normal" in spec.values else ()))
        regime = how.regime if how.regime in regimes and not spec.static else spec.values[0]
        dtype = dtype_of(spec.dtype)
        if math.prod(shape) < MANY_ELEMENTS:
            value = draw(shape, dtype, regime, how.generator)
        else:
            value = how.where.run(lambda device: draw(shape, dtype, regime, how.generator, device))
        if spec.static:
            self._static[name, shape] = value.clone()
        return value

    def _right(
        self, values: Mapping[str, Any], forms: Sequence[tuple[tuple[int, ...], torch.dtype]]
    ) -> list[torch.Tensor]:
        exact = {
            n: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for n, v in values.items()
        }
        result = tensors_of(self._reference(**exact))
        if len(result) != len(forms):
            raise RecordError(
                f"the reference returns {len(result)} outputs, the definition lists {len(forms)}"
            )
        return [t.to(dtype) for t, (_, dtype) in zip(result, forms, strict=True)]

    def _check_inputs(self, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        for name, spec in self._definition.inputs.items():
            tensor, shape = tensors.get(name), spec.sizes(sizes)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype_of(spec.dtype):
                raise RecordError(
                    f"pack {self._definition.name}: make() must give {name} as {spec.dtype}{list(shape)}"
                )

    def _judge(
        self,
        inputs: Mapping[str, Any],
        outputs: Sequence[torch.Tensor],
        forms: Sequence[tuple[tuple[int, ...], torch.dtype]],
        sizes: Mapping[str, int],
        seed: int,
        regime: str,
    ) -> tuple[CheckFinding, float]:
        if finding := form_finding(outputs, forms):
            return finding, 0.0
        rule = self._definition.tolerance
        exact = expected_outputs(
            self._reference,
            inputs,
            [dtype for _, dtype in forms],
            compute=dtype_of(rule.compute),
            terms=evaluate(rule.reduction, sizes),
            safety=rule.safety,
            floor=_scaled_floor(rule.floor, inputs.values()),
            generator=seeded_generator(outputs, seed),
        )
        key = (regime, *sizes.items())
        scales = self._row_scales.get(key, [1.0] * len(exact))
        self._row_scales[key] = [min(k, e.row_scale) for k, e in zip(scales, exact, strict=True)]
        return compare_outputs(outputs, exact)

    def _quick_check(
        self,
        scalars: Mapping[str, Any],
        forms: Sequence[tuple[tuple[int, ...], torch.dtype]],
        sizes: Mapping[str, int],
        regime: str,
    ) -> Callable[[Mapping[str, torch.Tensor], Sequence[torch.Tensor]], bool]:
        """A check of one case's outputs that computes its reference once."""
        rule, scale_key = self._definition.tolerance, (regime, *sizes.items())
        cache: dict[tuple[int, ...], tuple[list[torch.Tensor], list[ExpectedOutput]]] = {}

        def check(inputs: Mapping[str, torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
            scales = self._row_scales.get(scale_key)
            if scales is None or form_finding(outputs, forms):
                return False
            key = tuple(n for t in inputs.values() for n in (id(t), t._version))
            if (entry := cache.get(key)) is None:
                exact = {n: v.double() if v.is_floating_point() else v.clone() for n, v in inputs.items()}
                narrow = narrow_limits(
                    tensors_of(self._reference(**scalars, **exact)),
                    [dtype for _, dtype in forms],
                    scales,
                    compute=dtype_of(rule.compute),
                    terms=evaluate(rule.reduction, sizes),
                    safety=rule.safety,
                    floor=_scaled_floor(rule.floor, inputs.values()),
                )
                # The entry keeps its tensors, so that no new one gets their id. Other threads may ask, too.
                cache.clear()
                entry = cache[key] = list(inputs.values()), narrow
            return all(surely_right(o, e) for o, e in zip(outputs, entry[1], strict=True))

        return check


def _draw_size(low: int, high: int, half: int, generator: torch.Generator) -> int:
    """A size of the lower (0) or upper (1) half: mostly the last one, or beside a power of two, or any."""
    middle = (low + high + half) // 2
    least, most = (middle, high) if half else (low, middle)
    size, kind = (int(torch.randint(n, m, (), generator=generator)) for n, m in ((least, most + 1), (0, 6)))
    if kind < 4:
        return high if half else low
    if kind == 4:
        size = min(most, max(least, (1 << size.bit_length()) + size % 3 - 1))
    return size


def _scaled_floor(floor: float, inputs: Iterable[Any]) -> float:
    """The size of intermediate results that cancel, for these inputs, in proportion to which it grows."""
    if not floor:
        return floor
    floats = [
        t.double() for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point() and t.numel()
    ]
    return floor * max(1.0, *(float(t.square().mean().sqrt().nan_to_num(1.0, 1.0)) for t in floats), 1.0)


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * int(dtype.itemsize)


def _unset_output(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory with all bits set: a NaN in every floating dtype, so that an element that is never written shows."""
    raw = torch.full((max(1, _bytes(shape, dtype)),), 255, dtype=torch.uint8)
    return raw[: _bytes(shape, dtype)].view(dtype).reshape(tuple(shape))


def problem_of(pack: Pack, folder: Path) -> VerificationProblem:
    """The problem that a pack describes; its code is imported from `folder`."""
    kinds: dict[PackFormat, Callable[[Pack, Path], VerificationProblem]] = {
        PackFormat.OWN: NativeProblem,
        PackFormat.KERNELBENCH: KernelBenchProblem,
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
        forms = [(tuple(t.shape), t.dtype) for t in plain]
        model.double()
        seed = int(torch.randint(0, 2**31, (), generator=how.generator))

        def judge(
            arguments: Mapping[str, torch.Tensor], outputs: Sequence[torch.Tensor]
        ) -> tuple[CheckFinding, float]:
            if finding := form_finding(outputs, forms):
                return finding, 0.0

            def reference(**values: torch.Tensor) -> Any:
                with torch.no_grad():
                    return model(*(decode_arguments(s, values) for s in shapes))

            draws = seeded_generator(outputs, seed)
            try:
                model.to(draws.device)
                exact = expected_outputs(
                    reference,
                    arguments,
                    [d for _, d in forms],
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
        )


def _redraw_values(value: Any, how: DrawSpec) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return draw(value.shape, value.dtype, how.regime, how.generator)


_MODULE_COUNTER = itertools.count()


def load_module(text: str, folder: Path, name: str) -> ModuleType:
    """Import trusted Python text from a file, so that tracebacks and Triton find its source."""
    title = f"{name}_{next(_MODULE_COUNTER)}"
    file = folder / f"{title}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(title, file)
    if spec is None or spec.loader is None:
        raise RecordError(f"cannot import {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module
    spec.loader.exec_module(module)
    return module
