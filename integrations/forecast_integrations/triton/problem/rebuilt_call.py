"""A kernel call made again from its record: the tuner by module and name, arguments by shape, dtype and stride.

Values of tensors are not recorded. Integers are made zeros, so that what is used as an index stays inside; other
numbers are small and random. A kernel whose running time follows from its data is tuned for such data.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records import Argument, Kernel, Problem
from forecast_autotune.store.misses import Grids, Miss
from forecast_integrations.device import has_accelerator
from forecast_integrations.triton.problem.describe import DESCRIPTOR, FUNCTION
from forecast_integrations.triton.problem.launch_options import OWN_BENCHMARK, Options, options_of
from forecast_integrations.triton.protocols import Tuner

MAX_TENSOR_BYTES = 1 << 36
_SEED = 0


class RebuildError(ForecastAutotuneError):
    """A recorded call that cannot be made again here."""


def find_tuner(kernel: Kernel) -> Tuner:
    """The tuner around a kernel, by the module and qualified name in its record; imports that module.

    Raises `RebuildError` where it is not there, or is no tuner.
    """
    from triton.runtime.autotuner import Autotuner

    module, name = str(kernel.extra.get("module", "")), str(kernel.extra.get("qualname", kernel.name))
    if module in ("", "__main__") or "<locals>" in name:
        raise RebuildError(
            f"{module or '?'}:{name} cannot be imported: define the kernel at the top of a module that can be"
        )
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise RebuildError(
            f"{module}:{name} cannot be imported ({type(error).__name__}: {error})"[:300]
        ) from error
    while found is not None and not isinstance(found, Autotuner):
        found = getattr(found, "fn", None)  # heuristics and others above the tuner
    if found is None:
        raise RebuildError(f"{module}:{name} is no tuned kernel")
    tuner: Tuner = found
    return tuner


def rebuilt_arguments(
    problem: Problem, names: Sequence[str], elements: Mapping[str, int] | None = None
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Positional and keyword arguments of a call; `names` are the kernel's parameters, in order.

    `elements` is storage that tensors get at least, by name. As many as possible go by position, as users' pruning
    functions see those alone. Raises `RebuildError`.
    """
    made = {a.name: rebuilt_value(a, (elements or {}).get(a.name, 0)) for a in problem.arguments}
    if strangers := made.keys() - set(names):
        raise RebuildError(f"the kernel has no parameter {', '.join(sorted(strangers))} any more")
    positional: list[object] = []
    for name in names:
        if name not in made:
            break
        positional.append(made.pop(name))
    return tuple(positional), made


def rebuilt_value(argument: Argument, elements: int = 0, device: object = None) -> object:
    """One argument made from its record; a tensor with storage for so many elements at least.

    `device` is torch's, by default the accelerator if there is one. Raises `RebuildError`.
    """
    if argument.extra.get(DESCRIPTOR):
        return _descriptor(argument, elements, device)
    if argument.kind == "tensor":
        return _tensor(argument, elements, device)
    if argument.kind == "none":
        return None
    if argument.dtype == FUNCTION:
        raise RebuildError(f"argument {argument.name} is a JIT function, of which the name alone is recorded")
    if argument.kind in ("scalar", "constexpr"):
        if argument.dtype == "fp32" and isinstance(argument.value, int | float):
            return float(argument.value)
        return argument.value
    raise RebuildError(f"argument {argument.name} is of the kind {argument.kind!r:.40}, which nobody knows")


def _descriptor(argument: Argument, least: int, device: object) -> object:
    """A TMA descriptor of a tensor; the hooks of configs set its block anew where they do so."""
    told = argument.extra[DESCRIPTOR]
    shown = (
        [told.get(name) for name in ("shape", "strides", "block")] if isinstance(told, Mapping) else [None]
    )
    if not all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in shown):
        raise RebuildError(f"argument {argument.name} is a TMA descriptor, whose block is not recorded")
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor(_tensor(argument, least, device), *shown)
    except (ImportError, AssertionError, TypeError, ValueError) as error:
        raise RebuildError(
            f"argument {argument.name} cannot be made a TMA descriptor ({error})"[:300]
        ) from error


def _tensor(argument: Argument, least: int, device: object) -> object:
    import torch

    dtype = getattr(torch, argument.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise RebuildError(f"argument {argument.name} has dtype {argument.dtype!r:.40}, which torch has not")
    shape, stride = argument.shape, argument.stride
    if len(stride) != len(shape) or any(s < 0 for s in stride):
        raise RebuildError(f"argument {argument.name} has shape {shape} and strides {stride}")
    elements = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    elements = max(elements, least)
    size = torch.empty((), dtype=dtype).element_size()
    offset = 0 if argument.aligned else 1
    if (elements + offset) * size > MAX_TENSOR_BYTES:
        raise RebuildError(f"argument {argument.name} takes {elements * size} bytes")
    where: Any = device or ("cuda" if has_accelerator() else "cpu")
    flat = torch.zeros(elements + offset, dtype=dtype, device=where)
    if dtype.is_floating_point and size >= 2:
        generator = torch.Generator(where).manual_seed(_SEED)
        flat.normal_(generator=generator)
    return torch.as_strided(flat, shape, stride, offset)


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
        for parameters, extent in self.known:
            if all(meta.get(name, value) == value for name, value in parameters.items()):
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
    tuner.run(*args, grid=recorded_grid(miss), warmup=False, **kwargs)


def _rebuilt_options(problem: Problem) -> Options:
    found = {name: value for name, value in options_of(problem).items() if name != OWN_BENCHMARK}
    if strange := [n for n, v in found.items() if not isinstance(v, bool | int | float | str | None)]:
        raise RebuildError(
            f"launch option {', '.join(strange)} is no number or text: its value is not recorded"
        )
    return found
