"""A call's arguments in three other forms: copies to time on, weak references, and stand-ins without memory.

Candidates are timed on copies: a program's tensors hold the results of its own launches alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forecast_autotune.records import Candidate, Scalar
from forecast_autotune.variants.entry import heuristic_layers
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.copied_tensors import (
    ALIGNMENT,
    StorageCopies,
    UncopyableArgumentsError,
    converted,
    plain_types,
    require_copyable,
)
from forecast_integrations.triton.problem.describe import candidate_grids, heuristic_values
from forecast_integrations.triton.problem.rebuilt_call import RecordedGrids
from forecast_integrations.triton.protocols import LaunchConfig

if TYPE_CHECKING:
    import torch


class StandInTensor:
    """Has the attributes of another tensor and no memory: code that depends on values raises."""

    def __init__(self, like: torch.Tensor) -> None:
        import torch

        self._bare = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        self._address = ALIGNMENT + like.data_ptr() % ALIGNMENT
        self.device = like.device

    def data_ptr(self) -> int:
        """Return an address with the other tensor's alignment, and no memory behind it."""
        return self._address

    def __len__(self) -> int:
        return len(self._bare)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._bare, name)


@dataclass(frozen=True)
class WeakArguments:
    """Weak references to a call's arguments, which keep none of its tensors alive."""

    _args: tuple[Callable[[], object], ...]
    _kwargs: Mapping[str, Callable[[], object]]

    @classmethod
    def of(cls, args: tuple[object, ...], kwargs: Mapping[str, object]) -> WeakArguments:
        """Return references to the arguments of a call, without `grid`, whose function may hold tensors."""
        values = {name: value for name, value in kwargs.items() if name != "grid"}
        return cls(tuple(map(_reference, args)), {name: _reference(value) for name, value in values.items()})

    def alive(self) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Positional and keyword arguments while all of them exist, else None."""
        args = tuple(reference() for reference in self._args)
        kwargs = {name: reference() for name, reference in self._kwargs.items()}
        return None if any(v is _GONE for v in (*args, *kwargs.values())) else (args, kwargs)


_GONE = object()
"""The value of a reference whose object does not exist any more."""


def _reference(value: object) -> Callable[[], object]:
    if isinstance(value, plain_types()):
        return lambda: value
    try:
        reference = weakref.ref(value)
    except TypeError:  # a tuple of tensors, for one: nothing says when its like is gone
        return lambda: _GONE
    return lambda: _GONE if (target := reference()) is None else target


def copied_arguments(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments with copies of their tensors, made on the current stream; tensors that overlap still do.

    Raises `UncopyableArgumentsError`, also for want of memory.
    """
    import torch

    copies = StorageCopies()
    try:
        return (
            tuple(converted(value, copies.tensor) for value in args),
            {name: _convert(name, value, copies.tensor) for name, value in kwargs.items()},
        )
    except torch.cuda.OutOfMemoryError as error:
        raise UncopyableArgumentsError(f"no memory for copies of its arguments ({error})"[:200]) from None


def stand_in_call(call: KernelCall, config: LaunchConfig) -> KernelCall:
    """The call with stand-ins for its tensors and for its launch grid; compiles to what the call does.

    Heuristics under `config` must have equal values for both. Raises `UncopyableArgumentsError`.
    """
    args = tuple(converted(value, _stand_in) for value in call.args)
    kwargs = {name: _convert(name, value, _stand_in) for name, value in call.kwargs.items()}
    if callable(call.grid):
        kwargs["grid"] = _recorded_grids(call, candidate_grids(call, call.grid, call.arguments()))
    stand_in = KernelCall(call.tuner, args, kwargs, call.configs, call.functions)
    heuristics = heuristic_values(call.tuner.fn)
    names = [name for layer in heuristic_layers(call.tuner.fn) for name in layer]
    originals, copies = (heuristics({**c.arguments(), **config.all_kwargs()}) for c in (call, stand_in))
    if any(name not in copies or copies[name] != originals.get(name) for name in names):
        raise UncopyableArgumentsError("its heuristics read more of tensors than their shapes")
    vars(stand_in)["computed"] = call.computed  # which only the thread of the call can compute
    return stand_in


def _recorded_grids(call: KernelCall, grids: Mapping[Candidate, tuple[int, ...]]) -> RecordedGrids:
    """Return the grids of a call's grid function, which is not kept alive. Raises `UncopyableArgumentsError`."""
    answers: dict[tuple[tuple[str, Scalar], ...], tuple[int, ...]] = {}
    for candidate, grid in grids.items():
        if candidate.variant in call.functions:
            continue
        if answers.setdefault(candidate.config.kwargs, grid) != grid:
            raise UncopyableArgumentsError("its launch grid depends on more than its meta-parameters")
    return RecordedGrids(tuple((dict(pairs), grid) for pairs, grid in answers.items()))


def _convert(name: str, value: object, convert: Callable[[torch.Tensor], object]) -> object:
    return value if name in ("grid", "warmup") else converted(value, convert)


def _stand_in(tensor: torch.Tensor) -> object:
    require_copyable(tensor)
    return StandInTensor(tensor)
