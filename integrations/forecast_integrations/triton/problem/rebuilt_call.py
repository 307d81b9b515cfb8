"""A kernel call made again from its record.

The tuner is found by module and name, arguments are made by shape, dtype and stride. Values of tensors are not
recorded: integers that steer a kernel, or may, are made zeros, so that an index stays inside; all other numbers are
random. A kernel whose running time follows from its data is tuned for such data.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.ttir.flows import tensor_flows
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Argument, Kernel, Problem
from forecast_autotune.records.problem import ADDRESS
from forecast_autotune.store.misses import Grids, Miss
from forecast_autotune.variants.entry import nested_arguments
from forecast_integrations.device import has_accelerator
from forecast_integrations.triton.problem.describe import (
    DESCRIPTOR,
    FUNCTION,
    HEURISTICS,
    L2,
    OWN_BENCHMARK,
    Options,
    options_of,
)
from forecast_integrations.triton.problem.source import import_trouble, imported
from forecast_integrations.triton.protocols import Tuner

MAX_TENSOR_BYTES = 1 << 36
_SEED = 0
_CHUNK = 1 << 26
_MOST_TRACED = 128
"""Configs that are traced to see where integers go, some 10 ms each."""


class RebuildError(ForecastAutotuneError):
    """A recorded call that cannot be made again here."""


def find_tuner(kernel: Kernel) -> Tuner:
    """The tuner around a kernel, by the module and qualified name in its record; imports that module.

    Raises `RebuildError` where it is not there, or is no tuner.
    """
    from triton.runtime.autotuner import Autotuner

    module, name = str(kernel.extra.get("module", "")), str(kernel.extra.get("qualname", kernel.name))
    if trouble := import_trouble(module, name):
        raise RebuildError(trouble)
    try:
        owner = imported(module, name)
    except Exception as error:
        raise RebuildError(
            f"{module}:{name} cannot be imported ({type(error).__name__}: {error})"[:300]
        ) from error
    while owner is not None and not isinstance(owner, Autotuner):
        owner = getattr(owner, "fn", None)  # heuristics and others above the tuner
    if owner is None:
        raise RebuildError(f"{module}:{name} is no tuned kernel")
    tuner: Tuner = owner
    return tuner


def rebuilt_arguments(problem: Problem, names: Sequence[str]) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and keyword arguments of a call; `names` are the kernel's parameters, in order.

    As many as possible go by position, as users' pruning functions see those alone. Raises `RebuildError`.
    """
    values = nested_arguments({a.name: rebuilt_value(a) for a in problem.arguments})
    if strangers := values.keys() - set(names):
        raise RebuildError(f"the kernel has no parameter {', '.join(sorted(strangers))} any more")
    positional: list[object] = []
    for name in names:
        if name not in values:
            break
        positional.append(values.pop(name))
    return tuple(positional), values


def rebuilt_value(argument: Argument) -> object:
    """One argument made from its record, on the accelerator if there is one. Raises `RebuildError`."""
    if argument.extra.get(DESCRIPTOR):
        return _descriptor(argument)
    if argument.kind == "tensor":
        return _tensor(argument)
    if argument.kind in ("none", "tuple"):
        return None if argument.kind == "none" else ()
    if argument.dtype == "dtype":
        import torch
        import triton.language as tl

        name = str(argument.value)
        return getattr(torch, name[len("torch.") :]) if name.startswith("torch.") else tl.dtype(name)
    if argument.kind == "constexpr" and argument.dtype == "tuple":
        return ast.literal_eval(str(argument.value))
    if argument.kind == "object" or (argument.kind == "constexpr" and argument.dtype not in ("", FUNCTION)):
        raise RebuildError(
            f"argument {argument.name} is a {argument.dtype}, which cannot be made from its record"
        )
    if argument.dtype == FUNCTION:
        raise RebuildError(f"argument {argument.name} is a JIT function, of which the name alone is recorded")
    if argument.kind in ("scalar", "constexpr"):
        if argument.dtype == "fp32" and isinstance(argument.value, int | float):
            return float(argument.value)
        return argument.value
    raise RebuildError(f"argument {argument.name} is of the kind {argument.kind!r:.40}, which nobody knows")


def _descriptor(argument: Argument) -> object:
    """A TMA descriptor of a tensor; the hooks of configs set its block anew where they do so."""
    record = argument.extra[DESCRIPTOR]
    shown = (
        [record.get(name) for name in ("shape", "strides", "block")]
        if isinstance(record, Mapping)
        else [None]
    )
    if not all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in shown):
        raise RebuildError(f"argument {argument.name} is a TMA descriptor, whose block is not recorded")
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(_tensor(argument), *shown)
    except (ImportError, AssertionError, TypeError, ValueError) as error:
        raise RebuildError(
            f"argument {argument.name} cannot be made a TMA descriptor ({error})"[:300]
        ) from error


def _tensor(argument: Argument) -> object:
    import torch

    dtype = getattr(torch, argument.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise RebuildError(f"argument {argument.name} has dtype {argument.dtype!r:.40}, which torch has not")
    shape, stride = argument.shape, argument.stride
    if len(stride) != len(shape) or any(s < 0 for s in stride):
        raise RebuildError(f"argument {argument.name} has shape {shape} and strides {stride}")
    elements = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    size = torch.empty((), dtype=dtype).element_size()
    # An address within a line is the base's, which lies on one, and as much more.
    offset = int(argument.extra.get(ADDRESS, 0)) // size if argument.aligned else 1
    if (elements + offset) * size > MAX_TENSOR_BYTES:
        raise RebuildError(f"argument {argument.name} takes {elements * size} bytes")
    where = "cuda" if has_accelerator() else "cpu"
    flat = torch.zeros(elements + offset, dtype=dtype, device=where)
    if dtype.is_floating_point:
        generator = torch.Generator(where).manual_seed(_SEED)
        for part in flat.split(_CHUNK):  # what a dtype cannot draw is drawn in another one, a part at a time
            drawn = part if size >= 2 else torch.empty(len(part), dtype=torch.float32, device=where)
            drawn.normal_(generator=generator)
            if size < 2:
                _copied_if_possible(part, drawn)
    return torch.as_strided(flat, shape, stride, offset)


def _copied_if_possible(target: Any, values: Any) -> None:
    """Round values to a small dtype; scales are powers of two and have no sign, and a packed dtype stays zero."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        target.copy_(values.abs_().clamp_(0.25) if "e8m0" in str(target.dtype) else values)


def fill_integers(
    tuner: Tuner,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    arguments: Sequence[Argument],
    made: Collection[str],
) -> None:
    """Make those integer tensors random, of the ones that were `made`, that steer no launch of any config.

    Zeros take less power than a program's numbers, and other configs may be the fastest on them.
    """
    import torch

    named = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    integers = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    whole = {n: v for n in made if getattr(v := named.get(n), "dtype", None) in integers}
    configs = list(tuner.configs)
    if not whole or len(configs) > _MOST_TRACED:
        return
    options = {n: v for n, v in kwargs.items() if n not in ("grid", "warmup")}
    texts = trace_many(tuner.fn, args, options, [config.all_kwargs() for config in configs])
    try:
        for _, text in texts:
            for name in tensor_flows(str(text), arguments).steering:
                whole.pop(name, None)
    except FeatureError:  # it cannot be told, or is not to be compiled: an index may be among them
        return
    for value in whole.values():
        flat: Any = value
        info, generator = torch.iinfo(flat.dtype), torch.Generator(flat.device).manual_seed(_SEED)
        flat.random_(max(info.min, -(2**31)), min(info.max, 2**31 - 1), generator=generator)


def recorded_grid(miss: Miss) -> object:
    """The launch grid of a call: the recorded one, or a function that looks it up by its meta-parameters."""
    if miss.problem.grid is not None:
        return miss.problem.grid
    return RecordedGrids(tuple((dict(parameters), grid) for parameters, grid in miss.grids))


@dataclass(frozen=True)
class RecordedGrids:
    """A grid function that looks the launch grid up by the meta-parameters that it was recorded with."""

    known: Grids

    def __call__(self, meta: Mapping[str, object]) -> tuple[int, ...]:
        """The grid under these meta-parameters. Raises `RebuildError` where none was recorded."""
        given = {name: getattr(value, "value", value) for name, value in meta.items()}
        for parameters, extent in self.known:
            if all(given.get(name, value) == value for name, value in parameters.items()):
                return extent
        raise RebuildError("no launch grid was recorded for this config")


def call_again(miss: Miss) -> None:
    """Call a recorded kernel once more, which tunes it under the modes and settings in force.

    Raises `RebuildError` where that cannot be done, and whatever the kernel's tuner raises.
    """
    tuner: Any = find_tuner(miss.problem.kernel)
    args, kwargs = rebuilt_arguments(miss.problem, list(tuner.arg_names))
    kwargs |= _rebuilt_options(miss.problem)
    arguments = miss.problem.arguments
    fill_integers(tuner, args, kwargs, arguments, [a.name for a in arguments])
    tuner.run(*args, grid=recorded_grid(miss), warmup=False, **kwargs)


def _rebuilt_options(problem: Problem) -> Options:
    ours = (OWN_BENCHMARK, HEURISTICS, L2)
    options = {name: value for name, value in options_of(problem).items() if name not in ours}
    if strange := [n for n, v in options.items() if not isinstance(v, bool | int | float | str | None)]:
        raise RebuildError(
            f"launch option {', '.join(strange)} is no number or text: its value is not recorded"
        )
    return options


def rebound_function(function: FunctionType, moved: Callable[[object, str], object]) -> FunctionType:
    """A copy of a function in which `moved(value, name)` stands for whatever it has closed over, or reads by default
    or from its module; the function itself stays as it is."""
    code = function.__code__
    cells = tuple(
        CellType(moved(_content(cell), called))
        for called, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
    )
    named = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    new_defaults = tuple(
        moved(value, called)
        for called, value in zip(named[len(named) - len(defaults) :], defaults, strict=True)
    )
    read = function.__globals__
    shared = {n: new for n in code.co_names if n in read and (new := moved(read[n], n)) is not read[n]}
    rebound = FunctionType(
        code, {**read, **shared} if shared else read, function.__name__, new_defaults or None, cells or None
    )
    rebound.__kwdefaults__ = {n: moved(v, n) for n, v in (function.__kwdefaults__ or {}).items()} or None
    return rebound


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
