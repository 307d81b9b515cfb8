"""A kernel call made again from its record, at the recorded size or at another one.

The tuner is found by module and name, arguments are made by shape, dtype and stride. Values of tensors are not
recorded: integers that steer a kernel, or may, are made zeros, so that an index stays inside; all other numbers are
random. A kernel whose running time follows from its data is tuned for such data.

At another size, a dimension of a tensor follows the argument if it is equal to it, and strides follow the dimensions;
a formula must give all of the recorded grids. Where that is not enough the call is refused, with the reason: a wrong
guess would time another problem. Every tensor has at least the storage of both sizes, so that even a wrong guess reads
and writes nothing else.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.features.trace import trace_many
from forecast_autotune.features.ttir.flows import tensor_flows
from forecast_autotune.features.ttir.parser import FeatureError
from forecast_autotune.records import Argument, Kernel, Problem
from forecast_autotune.store.misses import Grids, Miss
from forecast_autotune.variants.entry import nested_arguments
from forecast_autotune.variants.signature import span_of
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
_MOST_TRACES = 128
"""Configs that are traced to see where integers go, some 10 ms each."""


class RebuildError(ForecastAutotuneError):
    """A recorded call that this process cannot rebuild."""


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


def rebuilt_arguments(
    problem: Problem, names: Sequence[str], elements: Mapping[str, int] | None = None
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and keyword arguments of a call; `names` are the kernel's parameters, in order.

    `elements` is storage that tensors get at least, by name. As many as possible go by position, as users' pruning
    functions see those alone. Raises `RebuildError`.
    """
    values = nested_arguments(
        {a.name: rebuilt_value(a, (elements or {}).get(a.name, 0)) for a in problem.arguments}
    )
    if strangers := values.keys() - set(names):
        raise RebuildError(f"the kernel has no parameter {', '.join(sorted(strangers))} any more")
    positional: list[object] = []
    for name in names:
        if name not in values:
            break
        positional.append(values.pop(name))
    return tuple(positional), values


def rebuilt_value(argument: Argument, elements: int = 0) -> object:
    """One argument made from its record; a tensor with storage for so many elements at least.

    It is on the accelerator if there is one. Raises `RebuildError`.
    """
    if argument.extra.get(DESCRIPTOR):
        return _descriptor(argument, elements)
    if argument.kind == "tensor":
        return _tensor(argument, elements)
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


def _descriptor(argument: Argument, least: int) -> object:
    """A TMA descriptor of a tensor; the hooks of configs set its block anew where they do so."""
    record = argument.extra[DESCRIPTOR]
    layout = (
        [record.get(name) for name in ("shape", "strides", "block")]
        if isinstance(record, Mapping)
        else [None]
    )
    if not all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in layout):
        raise RebuildError(f"argument {argument.name} is a TMA descriptor, whose block is not recorded")
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(_tensor(argument, least), *layout)
    except (ImportError, AssertionError, TypeError, ValueError) as error:
        raise RebuildError(
            f"argument {argument.name} cannot be made a TMA descriptor ({error})"[:300]
        ) from error


def _tensor(argument: Argument, least: int) -> object:
    import torch

    dtype = getattr(torch, argument.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise RebuildError(f"argument {argument.name} has dtype {argument.dtype!r:.40}, which torch has not")
    shape, stride = _checked_layout(argument)
    elements = max(span_of(shape, stride), least)
    size = torch.empty((), dtype=dtype).element_size()
    offset = argument.elements_ahead(size)
    if (elements + offset) * size > MAX_TENSOR_BYTES:
        raise RebuildError(f"argument {argument.name} takes {elements * size} bytes")
    device = "cuda" if has_accelerator() else "cpu"
    flat = torch.zeros(elements + offset, dtype=dtype, device=device)
    if dtype.is_floating_point:
        generator = torch.Generator(device).manual_seed(_SEED)
        for part in flat.split(_CHUNK):  # what a dtype cannot draw is drawn in another one, a part at a time
            buffer = part if size >= 2 else torch.empty(len(part), dtype=torch.float32, device=device)
            buffer.normal_(generator=generator)
            if size < 2:
                _copy_if_possible(part, buffer)
    return torch.as_strided(flat, shape, stride, offset)


def _checked_layout(tensor: Argument) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if len(tensor.stride) != len(tensor.shape) or any(s < 0 for s in tensor.stride):
        raise RebuildError(f"argument {tensor.name} has shape {tensor.shape} and strides {tensor.stride}")
    return tensor.shape, tensor.stride


def _copy_if_possible(target: Any, values: Any) -> None:
    """Round values to a small dtype; scales are powers of two and have no sign, and a packed dtype stays zero."""
    with contextlib.suppress(RuntimeError, NotImplementedError):
        target.copy_(values.abs_().clamp_(0.25) if "e8m0" in str(target.dtype) else values)


def fill_integers(
    tuner: Tuner,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    arguments: Sequence[Argument],
    names: Collection[str],
) -> None:
    """Fill rebuilt integer tensors, by `names`, with random values unless they steer a launch of some config.

    Zeros take less power than a program's numbers, and other configs may be the fastest on them.
    """
    import torch

    values = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    integers = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    candidates = {n: v for n in names if getattr(v := values.get(n), "dtype", None) in integers}
    configs = list(tuner.configs)
    if not candidates or len(configs) > _MOST_TRACES:
        return
    options = {n: v for n, v in kwargs.items() if n not in ("grid", "warmup")}
    texts = trace_many(tuner.fn, args, options, [config.all_kwargs() for config in configs])
    try:
        for _, text in texts:
            for name in tensor_flows(str(text), arguments).steering:
                candidates.pop(name, None)
    except FeatureError:  # unknown, or no config compiles: an index may be among them
        return
    for value in candidates.values():
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

    grids: Grids

    def __call__(self, meta: Mapping[str, object]) -> tuple[int, ...]:
        """The grid under these meta-parameters. Raises `RebuildError` where none was recorded."""
        values = {name: getattr(value, "value", value) for name, value in meta.items()}
        for parameters, extent in self.grids:
            if all(values.get(name, value) == value for name, value in parameters.items()):
                return extent
        raise RebuildError("no launch grid was recorded for this config")


def call_again(miss: Miss, elements: Mapping[str, int] | None = None) -> None:
    """Call a recorded kernel once more, which tunes it under the modes and settings in force.

    `elements` as in `rebuilt_arguments`. Raises `RebuildError` where that cannot be done, and whatever the kernel's
    tuner raises.
    """
    tuner: Any = find_tuner(miss.problem.kernel)
    args, kwargs = rebuilt_arguments(miss.problem, list(tuner.arg_names), elements)
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


MAX_SLACK_BYTES = 1 << 31
"""The most storage for a tensor whose growth with the size is unknown."""


def resize_arguments(
    arguments: Sequence[Argument], name: str, value: int
) -> tuple[tuple[Argument, ...], dict[str, int]]:
    """The arguments of a call whose argument `name` is `value`, in its order, and the storage of tensors by name.

    The storage, in elements, is of those that changed, or may have to hold more than their shape says. Raises
    `RebuildError` where the arguments cannot be told.
    """
    old = _size(arguments, name)
    other_values = {
        a.name: a.value
        for a in arguments
        if a.name != name
        and a.kind in ("scalar", "constexpr")
        and type(a.value) is int
        and not is_stride(a.name)
    }
    tensors = [a for a in arguments if a.kind == "tensor"]
    same = sorted(n for n, v in other_values.items() if v == old)
    if value != old and same and any(old in t.shape for t in tensors):
        raise RebuildError(
            f"{name} and {', '.join(same)} are {old} in this call: which dimensions follow {name} cannot be told"
        )
    ambiguous = [t.name for t in tensors if t.shape.count(old) > 1]
    if value != old and ambiguous:
        raise RebuildError(
            f"{ambiguous[0]} has several dimensions of {old} in this call: which of them follow {name} cannot be told"
        )
    resized: dict[str, Argument] = {}
    elements: dict[str, int] = {}
    for tensor in tensors:
        new_tensor = _resized_tensor(tensor, old, value)
        resized[tensor.name] = new_tensor
        extent, extent_after = (span_of(t.shape, t.stride) for t in (tensor, new_tensor))
        storage = max(extent, extent_after)
        if new_tensor.shape == tensor.shape and not set(tensor.shape) <= {1, *other_values.values()}:
            storage = math.ceil(storage * max(1.0, value / old))
            if storage > extent and 8 * storage > MAX_SLACK_BYTES:
                raise RebuildError(
                    f"how the shape {tensor.shape} of {tensor.name} follows from {name} cannot be told, as no "
                    f"dimension is {old}"
                )
        if storage > extent_after:
            elements[tensor.name] = storage
    products = _changed_products(tensors, resized, old)
    scalars = {
        a.name: replace(a, value=_resized_scalar(a, name, value, tensors, resized, products))
        for a in arguments
        if a.kind in ("scalar", "constexpr") and type(a.value) is int
    }
    new = {**resized, **scalars}
    return tuple(new.get(a.name, a) for a in arguments), elements


def _size(arguments: Sequence[Argument], name: str) -> int:
    for argument in arguments:
        if argument.name == name and type(argument.value) is int and argument.value > 0:
            return argument.value
    raise RebuildError(f"{name} is no positive integer argument of this call")


def is_stride(name: str) -> bool:
    """Whether a scalar is a stride of a tensor, by its name."""
    return "stride" in name.lower()


def _resized_tensor(tensor: Argument, old: int, value: int) -> Argument:
    """Dimensions of the old size become `value`; a stride grows with what lies within it."""
    if tensor.extra.get(DESCRIPTOR):
        raise RebuildError(
            f"argument {tensor.name} is a TMA descriptor, whose own shape would have to follow"
        )
    lengths, strides = _checked_layout(tensor)
    shape = tuple(value if n == old else n for n in lengths)
    stride = list(strides)
    # From the innermost: of equal strides, the later dimension lies within the earlier one.
    order = sorted((d for d in range(len(shape)) if stride[d] > 0), key=lambda d: (stride[d], -d))
    for inner, outer in itertools.pairwise(order):
        before = tensor.stride[inner] * tensor.shape[inner]
        after = stride[inner] * shape[inner]
        if before == after:
            continue
        # Dense, or padded by as much as before.
        stride[outer] = (
            after if tensor.stride[outer] == before else math.ceil(tensor.stride[outer] * after / before)
        )
    return replace(tensor, shape=shape, stride=tuple(stride))


def _changed_products(
    tensors: Sequence[Argument], resized: Mapping[str, Argument], old: int
) -> dict[int, int]:
    """Return new numbers of elements by old ones, of resized tensors: a kernel may take one of them."""
    products: dict[int, int | None] = {}
    for tensor in tensors:
        before, after = math.prod(tensor.shape), math.prod(resized[tensor.name].shape)
        if before != after and before != old:
            products[before] = after if products.get(before, after) == after else None
    sizes = {n for t in tensors for n in t.shape}
    return {b: a for b, a in products.items() if a is not None and b not in sizes}


def _resized_scalar(
    argument: Argument,
    name: str,
    value: int,
    tensors: Sequence[Argument],
    resized: Mapping[str, Argument],
    products: Mapping[int, int],
) -> int:
    number = argument.value
    assert isinstance(number, int)
    if argument.name == name:
        return value
    if not is_stride(argument.name):
        return products.get(number, number)
    places = [
        (t.name, resized[t.name].stride[d]) for t in tensors for d, s in enumerate(t.stride) if s == number
    ]
    own_strides = [new for tensor, new in places if _belongs(argument.name, tensor)]
    strides = set(own_strides or [new for _, new in places]) or {number}
    if len(strides) > 1:
        raise RebuildError(
            f"which stride {argument.name} is cannot be told: at {name} = {value} it may be "
            f"{' or '.join(map(str, sorted(strides)))}"
        )
    return strides.pop()


def _belongs(stride: str, tensor: str) -> bool:
    """Whether a stride's name begins or ends with a tensor's: `stride_am` and `a_ptr`, `x_row_stride` and `x`."""
    bare = tensor.lower().removesuffix("_ptr").removesuffix("ptr")
    rest = stride.lower().replace("strides", "").replace("stride", "").strip("_")
    return bool(bare) and (rest.startswith(bare) or rest.endswith("_" + bare))


MAX_FACTORS = 3


@dataclass(frozen=True)
class _Factor:
    """A size of the call or, with a meta-parameter, the number of blocks of it."""

    name: str
    before: int
    after: int
    parameter: str = ""

    def at(self, size: int, parameters: Mapping[str, Any]) -> int:
        return -(-size // parameters[self.parameter]) if self.parameter else size

    @property
    def is_named_alike(self) -> bool:
        """`M` and `BLOCK_SIZE_M`: then they belong together."""
        return self.name.lower() in self.parameter.lower().split("_")


@dataclass(frozen=True)
class _GridColumn:
    """One dimension of the grids at the other size, per recorded grid."""

    extents: tuple[int, ...]
    follows: bool
    """Whether the dimension's formula has a size that changes."""


def infer_grids(grids: Grids, before: Sequence[Argument], after: Sequence[Argument]) -> Grids:
    """The grids by meta-parameters at another size; `before` and `after` are the arguments at both.

    Raises `RebuildError` where that cannot be told.
    """
    dimensions = {len(grid) for _, grid in grids}
    if len(dimensions) != 1:
        raise RebuildError("no launch grids are recorded, or of several ranks")
    parameters = [meta for meta, _ in grids]
    columns = [
        _column(parameters, [grid[d] for _, grid in grids], before, after) for d in range(dimensions.pop())
    ]
    sizes, later = dict(_named_sizes(before)), dict(_named_sizes(after))
    if not any(column.follows for column in columns) and any(later[n] > sizes[n] for n in sizes):
        # A smaller call is served by the grid of a larger one: programs beyond its end find nothing to do.
        raise RebuildError("the recorded launch grids do not follow the size, as far as can be seen")
    return tuple((meta, tuple(c.extents[i] for c in columns)) for i, meta in enumerate(parameters))


def _column(
    parameters: Sequence[Mapping[str, Any]],
    extents: Sequence[int],
    before: Sequence[Argument],
    after: Sequence[Argument],
) -> _GridColumn:
    if set(extents) == {1}:
        return _GridColumn(tuple(extents), False)
    formulas: dict[tuple[int, int], set[_GridColumn]] = {}
    for factors in _products(_factors(parameters, before, after), parameters[0], extents[0]):
        extents_before = [math.prod(f.at(f.before, p) for f in factors) for p in parameters]
        if extents_before == list(extents):
            rank = len(factors), -sum(f.is_named_alike for f in factors)
            extents_after = tuple(math.prod(f.at(f.after, p) for f in factors) for p in parameters)
            formulas.setdefault(rank, set()).add(
                _GridColumn(extents_after, any(f.before != f.after for f in factors))
            )
    if not formulas:
        raise RebuildError(
            f"no formula of the call's sizes gives its launch grids {sorted(set(extents))[:4]}"
        )
    best = formulas[min(formulas)]
    if len({column.extents for column in best}) > 1:
        raise RebuildError(
            f"{len(best)} formulas of the call's sizes give its launch grids, and differ at the other size"
        )
    return max(best, key=lambda column: column.follows)


def _factors(
    parameters: Sequence[Mapping[str, Any]], before: Sequence[Argument], after: Sequence[Argument]
) -> list[_Factor]:
    sizes: dict[tuple[int, int], str] = {}
    later = dict(_named_sizes(after))
    for name, size in _named_sizes(before):
        if size > 1 or later[name] > 1:
            sizes.setdefault((size, later[name]), name)
    names = [
        name for name in parameters[0] if all(type(p.get(name)) is int and p[name] > 0 for p in parameters)
    ]
    return [_Factor(name, *pair, parameter) for pair, name in sizes.items() for parameter in ("", *names)]


def _named_sizes(arguments: Sequence[Argument]) -> Iterator[tuple[str, int]]:
    """Integer arguments, then numbers of elements and dimensions of tensors, by name."""
    for a in arguments:
        if a.kind in ("scalar", "constexpr") and type(a.value) is int and a.value > 0:
            yield a.name, a.value
    for a in arguments:
        if a.kind == "tensor":
            yield f"numel({a.name})", math.prod(a.shape)
            yield from ((f"{a.name}.{d}", n) for d, n in enumerate(a.shape))


def _products(
    factors: Sequence[_Factor], parameters: Mapping[str, Any], extent: int
) -> Iterator[tuple[_Factor, ...]]:
    """Products of few factors that give this extent under these parameters."""
    fit = [f for f in factors if extent % f.at(f.before, parameters) == 0]
    for count in range(1, MAX_FACTORS + 1):
        for combination in itertools.combinations(fit, count):
            if math.prod(f.at(f.before, parameters) for f in combination) == extent:
                yield combination


def rebound_function(function: FunctionType, convert: Callable[[object, str], object]) -> FunctionType:
    """Return a copy of a function with `convert(value, name)` in place of every value that it reads from its closure,
    its defaults and its module; the function itself does not change."""
    code = function.__code__
    cells = tuple(
        CellType(convert(_content(cell), name))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True)
    )
    parameters = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    new_defaults = tuple(
        convert(value, name)
        for name, value in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)
    )
    scope = function.__globals__
    changes = {n: new for n in code.co_names if n in scope and (new := convert(scope[n], n)) is not scope[n]}
    scope = {**scope, **changes} if changes else scope
    rebound = FunctionType(code, scope, function.__name__, new_defaults or None, cells or None)
    rebound.__kwdefaults__ = {n: convert(v, n) for n, v in (function.__kwdefaults__ or {}).items()} or None
    return rebound


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
