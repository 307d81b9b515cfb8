"""Calls to try a kernel with: sizes, values and launch grids, drawn anew each time. Runs in the judge."""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from forecast_autotune import frameworks
from forecast_autotune.errors import ForecastAutotuneError, RecordError
from forecast_autotune.records import Argument, Config
from forecast_autotune.records.captured_call import CapturedCall, TensorContents
from forecast_autotune.records.problem import ADDRESS
from forecast_autotune.store.captures import contents_file
from forecast_autotune.variants.constants import CONSTANT, decode_constant
from forecast_autotune.variants.entry import flat_arguments, grid_extent, heuristic_layers, nested_arguments
from forecast_autotune.variants.signature import (
    call_form,
    canonical_text,
    memory_span,
    places,
    pointees,
    stride_structure,
)
from forecast_harness.targets.kernels.base_kernel import BaseKernel
from forecast_harness.targets.kernels.grids import GridFormula, GridFormulaSwitch, fit_grid
from forecast_harness.targets.kernels.sizes import CallSizes, largest_tensor
from forecast_harness.targets.kernels.user_kernel import find_kernel, import_file
from forecast_harness.targets.search_target import cuda_device
from forecast_harness.trials.variants.base_runner import (
    TensorMemory,
    encode_scalars,
    gap_mask,
    raw_bits,
    tensor_view,
)
from forecast_harness.verify.inputs import draw
from forecast_harness.verify.plan import MAX_LAUNCH_BYTES

HUGE_REGIME = "huge"
CALL_REGIMES = ("normal", "uniform", "offset", "hundredth", HUGE_REGIME)
"""`huge` goes up to half of the dtype's range, but not beyond ten thousands: it shows a softmax without its
maximum. `offset` shows a variance that cancels, `hundredth` an epsilon of the wrong sign. The others as in
`inputs.draw`."""
MAX_PROGRAMS = {"cpu": 48, "cuda": 1 << 22}
"""Programs of a drawn launch at most, if possible: an interpreter runs one after another."""
MAX_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Elements of a drawn tensor at most, at first."""
_TARGET_LAUNCH_S = 1.0
_FEWEST_ELEMENTS = 2048
_MEMORY_SHARE = {"cpu": 1 / 32, "cuda": 1 / 8}
"""The share of the memory of where kernels run that one call's tensors may take: a host holds them several times."""
_SURELY_FITS = 256 << 20
"""Bytes of a call's tensors that any device has room for."""
_DRAW_ATTEMPTS = 60
_MOST_EVEN_IN_A_ROW = 2
"""Even values in a row, of all calls or of those for one config, after which a free size is odd: blocks have even
sides, and faults at their edges show at no multiple."""
_LARGEST_SIZE = 12_000
"""Two and a half of the largest common row blocks, 4096."""

GridFunction = Callable[[Mapping[str, Any]], tuple[int, ...] | None]
"""Meta-parameters -> the call's own grid; None where it is not known."""


@dataclass(frozen=True)
class DrawnCall:
    """One call. Tensors are their memory; gaps between strided rows hold NaN (integers: all bits set)."""

    arguments: tuple[Argument, ...]
    memory: TensorMemory
    scalars: Mapping[str, Any]
    """Everything that is no tensor, by name."""
    grid: GridFunction
    is_own: bool = False
    """Whether it is the program's or its user's own, values included: the base is made for it."""

    @property
    def label(self) -> str:
        """The sizes as text."""
        parts = [
            f"{a.name}{list(a.shape)}" if a.kind == "tensor" else f"{a.name}={a.value}"
            for a in self.arguments
        ]
        return " ".join(parts)


@dataclass
class SizeLimiter:
    """A limit on the size of drawn tensors, so that a launch takes about a second at most."""

    most: int
    """Elements of a tensor."""

    def note(self, call: Sequence[Argument], seconds: float) -> None:
        """Draw smaller calls from now on, if the launch of this one took longer."""
        if seconds > _TARGET_LAUNCH_S:
            size = int(largest_tensor(call) * max(0.2, 0.7 * _TARGET_LAUNCH_S / seconds))
            self.most = min(self.most, max(_FEWEST_ELEMENTS, size))


class CallSource(Protocol):
    """A source of calls."""

    pace: SizeLimiter
    is_large: bool
    """Whether its every launch takes seconds: a finding from one launch is then assumed of the next."""

    def draw(self, regime: str, generator: torch.Generator, config: Config | None = None) -> DrawnCall:
        """A fresh call; for this config, if given. Raises `RecordError` when none can be made."""

    def redraw(self, call: DrawnCall, regime: str, generator: torch.Generator) -> DrawnCall:
        """The same call with fresh values, of another regime."""


class RecordedCalls:
    """Calls of a recorded form: sizes by `CallSizes`, grids by formula or as recorded, random values."""

    is_large = False
    rows_of = ""
    """The written tensor whose rows drawn indices share out, see `_row_indices`; empty: they are any that are small."""

    def __init__(self, subject: BaseKernel, device: str) -> None:
        """Raises `RecordError` when there is no recorded call."""
        self.subject, self._device = subject, device
        self.pace = SizeLimiter(MAX_ELEMENTS[device])
        self.sizes = CallSizes.of(subject.calls)
        self.formula: GridFormula | GridFormulaSwitch | None = fit_grid(subject.launches)
        if self.formula is None:
            self.sizes = self.sizes.frozen()
        self._even: Counter[tuple[Config | None, tuple[str, ...]]] = Counter()
        self._turns: list[int] = []

    def with_sizes(self, sizes: CallSizes) -> RecordedCalls:
        """The same source of calls with other sizes, at the same pace."""
        result = copy.copy(self)
        result.sizes = sizes
        result._even, result._turns = Counter(), []
        return result

    def draw(self, regime: str, generator: torch.Generator, config: Config | None = None) -> DrawnCall:
        """A call of `draw_arguments`, with values."""
        arguments = self.draw_arguments(generator, config)
        return self._make_call(arguments, partial(self.grid_of, arguments), regime, generator)

    def redraw(self, call: DrawnCall, regime: str, generator: torch.Generator) -> DrawnCall:
        """Fresh values at the same sizes, strides and alignment: a binary for the call stays of use."""
        return self._make_call(call.arguments, call.grid, regime, generator)

    def draw_arguments(
        self, generator: torch.Generator, config: Config | None = None
    ) -> tuple[Argument, ...]:
        """Sizes of few programs, some beyond the largest tile; as recorded, if none varies.

        A few cases must not leave out by chance what a wrong variant fails at: each size is large in its
        turn, and no size that may be anything is even three times running.
        """
        rng = random.Random(int(torch.randint(0, 2**62, (), generator=generator)))
        most, reach = self.pace.most, self._largest_size(config)
        best: tuple[tuple[int, int], tuple[Argument, ...]] | None = None
        free = [s for s in self.sizes.varied if s.size_class == "any"]
        if not self._turns:
            self._turns = rng.sample(range(self.sizes.draw_kinds), self.sizes.draw_kinds)
        turn = self._turns.pop() if self._turns else None
        odd = [s for s in free if max(self._even[c, s.places] for c in (None, config)) >= _MOST_EVEN_IN_A_ROW]
        sizes = self.sizes.with_classes(dict.fromkeys(odd, "odd"))
        for attempt in range(_DRAW_ATTEMPTS if self.sizes.varied else 1):
            arguments = sizes.draw(rng, most=most, reach=max(32, reach >> (attempt // 10)), turn=turn)
            programs = self._programs(partial(self.grid_of, arguments), config)
            values = places(arguments)
            # Fixed sizes under small tiles may allow no fewer programs.
            worth = max(programs, MAX_PROGRAMS[self._device]), sum(values[s.places[0]] % 2 == 0 for s in odd)
            best = min(best or (worth, arguments), (worth, arguments), key=lambda x: x[0])
            if worth == (MAX_PROGRAMS[self._device], 0):
                break
        assert best is not None
        values = places(best[1])
        for key in ((c, s.places) for s in free for c in {None, config}):
            self._even[key] = self._even[key] + 1 if values[key[1][0]] % 2 == 0 else 0
        return best[1]

    def _largest_size(self, config: Config | None) -> int:
        """The largest size: past two tiles of this config, or of any."""
        configs = self.subject.configs if config is None else (config,)
        tiles = [v for c in configs for _, v in c.kwargs if isinstance(v, int) and not isinstance(v, bool)]
        return int(min(_LARGEST_SIZE, max([*tiles, 64]) * 2.5))

    def _programs(self, grid: GridFunction, config: Config | None) -> int:
        """Programs of a launch with this config, or with the one of fewest; 0 where no grid is known."""
        configs = self.subject.configs if config is None else (config,)
        return min((grid_programs(result) for c in configs if (result := grid(c.parameters()))), default=0)

    def _make_call(
        self, arguments: tuple[Argument, ...], grid: GridFunction, regime: str, generator: torch.Generator
    ) -> DrawnCall:
        tensors = [a for a in arguments if a.kind == "tensor"]
        check_drawable(tensors)
        check_call_bytes(arguments, self._device)
        least = min((n for a in tensors for n in a.shape if n > 1), default=2)
        memory = {}
        for a in tensors:
            dtype = getattr(torch, a.dtype)
            flat = _random_values(memory_span(a), dtype, regime, least, generator)
            if a.name in self.subject.zeroed:
                flat.zero_()
            is_list = len(a.shape) == 1 and is_index_dtype(dtype)
            if is_list and self.rows_of:
                flat = _row_indices(memory_span(a), tensors, self.rows_of, generator).to(dtype)
            elif is_list and torch.rand((), generator=generator) < 0.5:
                flat = flat.sort().values  # pointers to where rows begin ascend: else there is nothing to do
            memory[a.name] = torch.where(gap_mask(a), unset_like(flat), flat) if _has_gaps(a) else flat
        scalars = {a.name: scalar_value(a) for a in arguments if a.kind != "tensor"}
        return DrawnCall(arguments, memory, scalars, grid)

    def grid_of(self, arguments: Sequence[Argument], meta: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The launch grid of a call under these meta-parameters; None where it cannot be told."""
        return recorded_grid(self.subject, self.formula, arguments, meta)


class CapturedCalls(RecordedCalls):
    """A captured call: at its recorded sizes with the values that it had, these permuted or rescaled, and drawn ones;
    at other sizes, as `RecordedCalls`, where calls of its form tell which sizes hang together.

    Wide integers keep their values at the recorded sizes: most are indices, and what else is valid nobody knows.
    """

    def __init__(self, subject: BaseKernel, device: str) -> None:
        """Raises `RecordError` for a call whose contents are not there, or are too large."""
        self.record, self._contents = read_captured_call(subject)
        try:
            super().__init__(subject, device)
        except RecordError:  # strides that overlap follow from no shape
            self.subject, self._device, self.pace = subject, device, SizeLimiter(MAX_ELEMENTS[device])
            self.sizes, self.formula = CallSizes(tuple(subject.calls[0]), ()), fit_grid(subject.launches)
            self._even, self._turns = Counter(), []
        form = call_form(subject.calls[0])
        like = {canonical_text([a.to_json() for a in c]) for c in subject.calls if call_form(c) == form}
        if len(like) < _FEWEST_LIKE_CALLS or pointees(subject.calls[0]):
            self.sizes = self.sizes.frozen()
        self.is_large = check_call_bytes(subject.calls[0], device) > _LARGE_CALL_BYTES
        self.own_values = LARGE_VALUES if self.is_large else CAPTURED_VALUES
        """The kinds of values that it is launched with at its recorded sizes."""
        self.values: tuple[str, ...] = (*self.own_values, OTHER_SIZES)
        self._number = 0
        self._large: dict[str, DrawnCall] = {}

    def with_values(self, values: Sequence[str]) -> CapturedCalls:
        """The same source with calls of these kinds in turns: of `own_values`, and `OTHER_SIZES`."""
        result = copy.copy(self)
        result.values, result._number = tuple(values), 0
        return result

    def with_sizes(self, sizes: CallSizes) -> CapturedCalls:
        """The same source of calls with other sizes."""
        result = super().with_sizes(sizes)
        assert isinstance(result, CapturedCalls)
        return result.with_values(self.values)

    def _next_values(self) -> str:
        able = [v for v in self.values if v != OTHER_SIZES or self.sizes.varied] or [CAPTURED_VALUES[0]]
        self._number += 1
        return able[(self._number - 1) % len(able)]

    def draw_arguments(
        self, generator: torch.Generator, config: Config | None = None
    ) -> tuple[Argument, ...]:
        """The recorded arguments, or at other sizes, in turns."""
        if self._next_values() == OTHER_SIZES:
            return super().draw_arguments(generator, config)
        return self.subject.calls[0]

    def draw(self, regime: str, generator: torch.Generator, config: Config | None = None) -> DrawnCall:
        """The next kind of call in turn."""
        if (values := self._next_values()) == OTHER_SIZES:
            arguments = super().draw_arguments(generator, config)
            return self._make_call(arguments, partial(self.grid_of, arguments), regime, generator)
        return self._recorded_call(values, regime, generator)

    def redraw(self, call: DrawnCall, regime: str, generator: torch.Generator) -> DrawnCall:
        """Fresh values at the same sizes."""
        if call.arguments != self.subject.calls[0]:
            return super().redraw(call, regime, generator)
        return self._recorded_call(CAPTURED_VALUES[0], regime, generator)

    def holds(self, call: DrawnCall) -> bool:
        """Whether this very call is one that is drawn again."""
        return any(call is c for c in self._large.values())

    def _recorded_call(self, values: str, regime: str, generator: torch.Generator) -> DrawnCall:
        """The call at its recorded sizes. Large ones are made once for each kind of values, as that takes long."""
        if values in self._large:
            return self._large[values]
        arguments = self.subject.calls[0]
        tensors = [a for a in arguments if a.kind == "tensor"]
        factor = 2.0 ** float(torch.empty(()).uniform_(-1.5, 1.5, generator=generator))
        memory = {}
        for a in tensors:
            flat = captured_memory(self.record, self._contents, a)
            if a.name in self.subject.zeroed:
                flat.zero_()
            elif values != CAPTURED_VALUES[0] and flat.numel() and not is_index_dtype(flat.dtype):
                flat = self._change_values(a, flat, values, factor, regime, generator)
            memory[a.name] = flat
        scalars = {a.name: scalar_value(a) for a in arguments if a.kind != "tensor"}
        is_own = values == CAPTURED_VALUES[0]
        call = DrawnCall(arguments, memory, scalars, partial(self.grid_of, arguments), is_own)
        if self.is_large:
            self._large[values] = call
        return call

    def _change_values(
        self,
        argument: Argument,
        flat: torch.Tensor,
        values: str,
        factor: float,
        regime: str,
        generator: torch.Generator,
    ) -> torch.Tensor:
        floats = flat.is_floating_point()
        if values == "drawn" and floats:
            flat = _random_values(flat.numel(), flat.dtype, regime, 2, generator)
        elif values == "rescaled" and floats:
            info = torch.finfo(flat.dtype)
            flat = (flat.to(torch.float64) * factor).clamp(info.min, info.max).to(flat.dtype)
        elif values == "permuted" and math.prod(argument.shape) <= memory_span(argument):
            view = tensor_view(flat, argument)
            raw = raw_bits(view.reshape(-1))
            order = torch.randperm(len(raw), generator=generator)
            view.copy_(raw[order].view(flat.dtype).reshape(argument.shape))
        return torch.where(gap_mask(argument), unset_like(flat), flat) if _has_gaps(argument) else flat


CAPTURED_VALUES = ("captured", "permuted", "rescaled", "drawn")
"""Kinds of values for the tensors of a captured call at its recorded sizes."""
LARGE_VALUES = ("captured", "drawn")
"""Kinds of values for a large call, whose every launch takes seconds."""
OTHER_SIZES = "other sizes"
_FEWEST_LIKE_CALLS = 2
"""Calls of one form that tell which of its sizes hang together."""
_LARGE_CALL_BYTES = 16 << 20


def read_captured_call(subject: BaseKernel) -> tuple[CapturedCall, Path]:
    """The record of a subject's first call, and the folder that its contents lie in. Raises `RecordError`."""
    path = Path(subject.captured)
    try:
        return CapturedCall.from_json(json.loads(path.read_bytes())), path.parent
    except (OSError, ValueError) as error:
        raise RecordError(f"the captured call {path} cannot be read ({error}): capture it again") from error


def captured_memory(record: CapturedCall, folder: Path, argument: Argument) -> torch.Tensor:
    """The memory of a tensor of a captured call: as it was, or drawn as its record says that it was distributed.

    Raises `RecordError` for contents that are gone.
    """
    dtype, span = getattr(torch, argument.dtype), memory_span(argument)
    contents = record.contents.get(argument.name, TensorContents())
    if not contents.digest:
        generator = torch.Generator().manual_seed(contents.seed)
        values = torch.randn(span, generator=generator).mul_(contents.deviation).add_(contents.mean)
        return values.clamp_(contents.least, contents.most).to(dtype)
    path = contents_file(folder, contents.digest)
    try:
        data = bytearray(path.read_bytes())
    except OSError as error:
        raise RecordError(
            f"the contents of {argument.name} are gone ({error}): capture the call again"
        ) from error
    if len(data) != span * dtype.itemsize:
        raise RecordError(
            f"{path} has {len(data)} bytes, and {argument.name} {span} elements of {argument.dtype}"
        )
    return torch.frombuffer(data, dtype=dtype) if span else torch.empty(0, dtype=dtype)


def check_drawable(tensors: Sequence[Argument]) -> None:
    """Raises `RecordError` for tensor descriptors, which cannot be made from a record."""
    if any(a.extra.keys() - {ADDRESS} for a in tensors):
        raise RecordError("tensor descriptors made by the caller cannot be drawn: have the kernel make them")


def check_call_bytes(arguments: Sequence[Argument], device: str) -> int:
    """The bytes of a call's tensors. Raises `RecordError` for more than a share of the memory there."""
    tensors = [a for a in arguments if a.kind == "tensor"]
    size: int = sum(memory_span(a) * getattr(torch, a.dtype).itemsize for a in tensors)
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device != "cpu" and size > _SURELY_FITS:  # asking the driver takes a second
        memory_bytes = min(cuda_device().memory_bytes or memory_bytes, 4 * memory_bytes)
    if size > (most := min(MAX_LAUNCH_BYTES, int(memory_bytes * _MEMORY_SHARE[device]))):
        raise RecordError(
            f"its tensors take {size >> 20} MiB at the recorded sizes, and at most {most >> 20} MiB are checked here: "
            "capture a smaller call, or give inputs(random)"
        )
    return size


def recorded_grid(
    subject: BaseKernel,
    formula: GridFormula | GridFormulaSwitch | None,
    arguments: Sequence[Argument],
    meta: Mapping[str, Any],
) -> tuple[int, ...] | None:
    """A call's own grid: by the formula that its recorded launches obey, else as recorded; None where neither tells."""
    parameters = {**{a.name: a.value for a in arguments if a.kind == "constexpr"}, **meta}
    if formula is not None:
        try:
            return formula(arguments, parameters)
        except (KeyError, TypeError):
            return None
    sizes = places(arguments)
    for launch in subject.launches:
        has_these_sizes = all(launch.sizes.get(p) == n for p, n in sizes.items())
        if has_these_sizes and all(parameters.get(n) == v for n, v in launch.meta.items()):
            return launch.grid
    return None


class UserCalls:
    """Calls that `inputs(random)` of the user's file draws.

    It returns a dict of the arguments by name (tensors on the CPU), and under `grid` what the kernel would be
    called with: numbers, or a function of the meta-parameters. Sizes and values should differ each time.
    """

    is_large = False

    def __init__(self, subject: BaseKernel) -> None:
        """Raises `RecordError` for a file without `inputs`, and what the file raises."""
        self.subject = subject
        self.pace = SizeLimiter(0)  # sizes are the user's to choose
        self._module = import_file(Path(subject.file))
        if not callable(getattr(self._module, "inputs", None)):
            raise RecordError(f"{subject.file} has no function inputs(random)")

    def draw(self, regime: str, generator: torch.Generator, config: Config | None = None) -> DrawnCall:
        """One call of the user's function, which chooses the regime itself."""
        rng = random.Random(int(torch.randint(0, 2**62, (), generator=generator)))
        inputs = dict(self._module.inputs(rng))
        grid = inputs.pop("grid", None)
        arguments = frameworks.triton().arguments_of(find_kernel(self._module, self.subject.name), inputs)
        constants = {a.name for a in arguments if a.kind == "constexpr"}
        values = dict(flat_arguments(inputs, constants))
        memory, scalars = {}, {}
        for argument in arguments:
            name, value = argument.name, values[argument.name]
            if argument.kind != "tensor":
                try:
                    encode_scalars({name: value})
                except RecordError as error:
                    raise RecordError(f"inputs() gave {name}: {error}") from error
                scalars[name] = value
                continue
            if stride_structure(argument) is None:
                raise RecordError(f"inputs() gave {name} with overlapping strides {list(argument.stride)}")
            tensor = value if isinstance(value, torch.Tensor) else value.base  # of a host-made descriptor
            flat = tensor.as_strided((memory_span(argument),), (1,)) if tensor.numel() else tensor.reshape(-1)
            memory[name] = torch.zeros_like(flat) if name in self.subject.zeroed else flat.clone()
        return DrawnCall(arguments, memory, scalars, partial(self._grid, grid, inputs), is_own=True)

    def redraw(self, call: DrawnCall, regime: str, generator: torch.Generator) -> DrawnCall:
        """Another call of the user's function, which draws sizes and values together."""
        return self.draw(regime, generator)

    @staticmethod
    def _grid(grid: Any, inputs: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[int, ...] | None:
        try:
            return grid_extent(grid, inputs, meta)
        except (KeyError, TypeError, ForecastAutotuneError):
            return None


def heuristics_of(subject: BaseKernel) -> Sequence[Mapping[str, Callable[[dict[str, Any]], Any]]]:
    """The `values` of every `@heuristics` above the kernel in the user's file, outermost first.

    A captured call without such a file has the values that they gave for each config.
    """
    if not subject.file:
        return [] if not subject.captured else _recorded_heuristics(read_captured_call(subject)[0])
    return heuristic_layers(find_kernel(import_file(Path(subject.file)), subject.name))


def _recorded_heuristics(record: CapturedCall) -> list[Mapping[str, Callable[[dict[str, Any]], Any]]]:
    def value_of(name: str, parameters: Mapping[str, Any]) -> Any:
        for launch in record.launches:
            if all(parameters.get(n) == v for n, v in launch.meta.items()):
                return launch.computed[name]
        if len(values := {launch.computed[name] for launch in record.launches}) == 1:
            return values.pop()
        raise RecordError(f"what heuristics make of {name} is not known for this config")

    names = dict.fromkeys(n for launch in record.launches for n in launch.computed)
    return [{name: partial(value_of, name) for name in names}] if names else []


def with_heuristics(
    call: DrawnCall,
    layers: Sequence[Mapping[str, Callable[[dict[str, Any]], Any]]],
    meta: Mapping[str, Any],
    parameters: Collection[str] | None = None,
) -> dict[str, Any]:
    """The scalars of a call with what heuristics make of it under these meta-parameters.

    With `parameters`, only of these: a variant may lack arguments that the others are made of.
    """
    if not layers:
        return dict(call.scalars)
    tensors = {a.name: tensor_view(call.memory[a.name], a) for a in call.arguments if a.kind == "tensor"}
    arguments = nested_arguments({**tensors, **call.scalars, **meta})
    results: dict[str, Any] = {}
    for layer in layers:
        for name, rule in layer.items():
            if parameters is None or name in parameters:
                results[name] = arguments[name] = rule(arguments)
    return {**call.scalars, **results}


def unset_like(memory: torch.Tensor) -> torch.Tensor:
    """Memory with all bits set: a NaN in every floating dtype, so that an element that is never written shows."""
    if memory.dtype == torch.bool:  # which has two values only
        return torch.zeros_like(memory)
    return torch.full((memory.numel() * memory.element_size(),), 255, dtype=torch.uint8).view(memory.dtype)


def _has_gaps(tensor: Argument) -> bool:
    """Whether some of its memory may belong to no element."""
    strides = [s for n, s in zip(tensor.shape, tensor.stride, strict=True) if n > 1]
    return not all(strides) or math.prod(tensor.shape) < memory_span(tensor)


def _random_values(
    count: int, dtype: torch.dtype, regime: str, least: int, generator: torch.Generator
) -> torch.Tensor:
    if regime == HUGE_REGIME and dtype.is_floating_point:
        wide = torch.float64 if dtype.itemsize > 4 else torch.float32
        return (draw((count,), wide, "normal", generator) * min(1e4, torch.finfo(dtype).max / 8)).to(dtype)
    if dtype.is_floating_point or dtype == torch.bool:
        return draw((count,), dtype, "normal" if regime == HUGE_REGIME else regime, generator)
    if is_index_dtype(dtype):  # into the smallest of all dimensions they are within bounds
        return torch.randint(0, least, (count,), generator=generator).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, (count,), generator=generator).to(dtype)


def _row_indices(
    count: int, tensors: Sequence[Argument], rows_of: str, generator: torch.Generator
) -> torch.Tensor:
    """Each row once, where a tensor of numbers has so many; else bounds of like segments of the rows of one."""
    rows = {a.name: a.shape[0] for a in tensors if a.shape and a.name not in index_tensors(tensors)}
    if count in rows.values():
        return torch.randperm(count, generator=generator)
    bounds = torch.arange(count) + torch.rand(count, generator=generator) / 2 - 0.25
    bounds[:1], bounds[-1:] = 0, max(1, count - 1)
    return bounds * (rows.get(rows_of, 1) / max(1, count - 1))


def index_tensors(arguments: Sequence[Argument]) -> list[str]:
    """The tensors of wide integers."""
    return [a.name for a in arguments if a.kind == "tensor" and is_index_dtype(getattr(torch, a.dtype))]


def is_index_dtype(dtype: torch.dtype) -> bool:
    """Whether these are wide integers, which are mostly indices."""
    return not dtype.is_floating_point and dtype.itemsize > 2


def scalar_value(argument: Argument) -> Any:
    """The value of an argument that is no tensor. Raises `RecordError` for one that its record does not hold."""
    if CONSTANT in argument.extra:
        if argument.extra[CONSTANT][0] == "function":
            return dict(argument.extra)  # nothing but a cell imports it
        return decode_constant(argument.extra)
    if argument.kind in ("none", "tuple"):
        return None if argument.kind == "none" else ()
    if argument.kind == "object":
        raise RecordError(f"{argument.name} is a {argument.dtype}, of which a record tells the type alone")
    if argument.dtype == "fp32" and isinstance(argument.value, str):
        return float(argument.value)  # JSON has no infinity
    return argument.value


def grid_programs(grid: Sequence[int]) -> int:
    """Programs of a launch."""
    return math.prod(max(0, n) for n in grid)
