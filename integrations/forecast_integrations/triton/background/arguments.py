"""A call's arguments in three other forms: copies to time on, weak references, and stand-ins without memory.

Candidates are timed on copies: a program's tensors hold the results of its own launches alone. A copy
is of a tensor's whole storage, as kernels may read beside a view, and at an address that Triton specialises alike.
"""

from __future__ import annotations

import copy
import numbers
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from forecast_autotune.errors import ForecastAutotuneError
from forecast_autotune.records import Candidate, Scalar
from forecast_integrations.device import has_accelerator
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.describe import candidate_grids, heuristic_layers, heuristic_values
from forecast_integrations.triton.problem.rebuilt_call import RecordedGrids
from forecast_integrations.triton.protocols import LaunchConfig, is_descriptor

if TYPE_CHECKING:
    import torch

MAX_COPIED_BYTES = 8 << 30
"""The most bytes of one call's tensors. Copies of so much take about 5 ms of a fast device."""
_ALIGNMENT = 256


class UncopyableArgumentsError(ForecastAutotuneError):
    """Arguments that cannot be timed on: nobody knows how to copy them, or there is no memory for it."""


class StandInTensor:
    """Has the attributes of another tensor and no memory: code that depends on values raises."""

    def __init__(self, like: torch.Tensor) -> None:
        import torch

        self._bare = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        self._address = _ALIGNMENT + like.data_ptr() % _ALIGNMENT
        self.device = like.device

    def data_ptr(self) -> int:
        """An address that divides as the other tensor's does, with nothing at it."""
        return self._address

    def __len__(self) -> int:
        return len(self._bare)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._bare, name)


@dataclass(frozen=True)
class WeakArguments:
    """A call's arguments, which keep none of its tensors alive."""

    _args: tuple[Callable[[], object], ...]
    _kwargs: Mapping[str, Callable[[], object]]

    @classmethod
    def of(cls, args: tuple[object, ...], kwargs: Mapping[str, object]) -> WeakArguments:
        """Those of a call; `grid` is left out, as its function may hold tensors."""
        given = {name: value for name, value in kwargs.items() if name != "grid"}
        return cls(tuple(map(_reference, args)), {name: _reference(value) for name, value in given.items()})

    def alive(self) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Positional and keyword arguments while all of them exist, else None."""
        args = tuple(reference() for reference in self._args)
        kwargs = {name: reference() for name, reference in self._kwargs.items()}
        return None if _GONE in (*map(id, args), *map(id, kwargs.values())) else (args, kwargs)


class _Gone:
    """Stands for what does not exist any more."""


_THE_GONE = _Gone()
_GONE = id(_THE_GONE)


def _reference(value: object) -> Callable[[], object]:
    if isinstance(value, _plain_types()):
        return lambda: value
    try:
        reference = weakref.ref(value)
    except TypeError:  # a tuple of tensors, for one: nothing says when its like is gone
        return lambda: _THE_GONE
    return lambda: _THE_GONE if (held := reference()) is None else held


def copied_arguments(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments with copies of their tensors, made on the current stream; tensors that overlap still do.

    Raises `UncopyableArgumentsError`, also for want of memory.
    """
    import torch

    copies = _StorageCopies()
    try:
        return (
            tuple(_converted(value, copies.tensor) for value in args),
            {name: _other(name, value, copies.tensor) for name, value in kwargs.items()},
        )
    except torch.cuda.OutOfMemoryError as error:
        raise UncopyableArgumentsError(f"no memory for copies of its arguments ({error})"[:200]) from None


def stand_in_call(call: KernelCall, config: LaunchConfig) -> KernelCall:
    """The call with stand-ins for its tensors and for its launch grid; compiles to what the call does.

    Heuristics are asked under `config`: they must say the same of both. Raises `UncopyableArgumentsError`.
    """
    args = tuple(_converted(value, _stand_in) for value in call.args)
    kwargs = {name: _other(name, value, _stand_in) for name, value in call.kwargs.items()}
    if callable(call.grid):
        kwargs["grid"] = _recorded_grids(call, candidate_grids(call, call.grid, call.arguments()))
    bare = KernelCall(call.tuner, args, kwargs, call.configs, call.functions)
    heuristics = heuristic_values(call.tuner.fn)
    names = [name for layer in heuristic_layers(call.tuner.fn) for name in layer]
    given, alone = (heuristics({**one.arguments(), **config.all_kwargs()}) for one in (call, bare))
    if any(name not in alone or alone[name] != given.get(name) for name in names):
        raise UncopyableArgumentsError("its heuristics read more of tensors than their shapes")
    vars(bare)["computed"] = call.computed  # which only the thread of the call can compute
    return bare


def _recorded_grids(call: KernelCall, grids: Mapping[Candidate, tuple[int, ...]]) -> RecordedGrids:
    """The answers of a call's grid function, without it and what it holds. Raises `UncopyableArgumentsError`."""
    answers: dict[tuple[tuple[str, Scalar], ...], tuple[int, ...]] = {}
    for candidate, grid in grids.items():
        if candidate.variant in call.functions:
            continue
        if answers.setdefault(candidate.config.kwargs, grid) != grid:
            raise UncopyableArgumentsError("its launch grid depends on more than its meta-parameters")
    return RecordedGrids(tuple((dict(pairs), grid) for pairs, grid in answers.items()))


def _other(name: str, value: object, convert: Callable[[torch.Tensor], object]) -> object:
    return value if name in ("grid", "warmup") else _converted(value, convert)


def _converted(value: Any, convert: Callable[[torch.Tensor], object]) -> Any:
    """An argument with its tensors converted. Raises `UncopyableArgumentsError` for what may hold others."""
    if isinstance(value, _plain_types()) or (
        type(value).__module__.partition(".")[0] == "triton" and not hasattr(value, "base")
    ):
        return value
    if _is_plain_tensor(value):
        return convert(value)
    if isinstance(value, tuple):
        members = [_converted(item, convert) for item in value]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    if is_descriptor(value) and _is_plain_tensor(value.base):
        copied: Any = copy.copy(value)
        object.__setattr__(copied, "base", convert(value.base))
        object.__setattr__(copied, "block_shape", list(value.block_shape))
        return copied
    raise UncopyableArgumentsError(f"nobody knows how to copy an argument of type {type(value).__name__}")


@cache
def _plain_types() -> tuple[type, ...]:
    """Types of values that are no tensors and hold none."""
    import torch

    return (numbers.Number, str, bytes, type(None), torch.dtype, torch.device)


def _is_plain_tensor(value: object) -> bool:
    import torch

    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _stand_in(tensor: torch.Tensor) -> object:
    _require_copyable(tensor)
    return StandInTensor(tensor)


def _require_copyable(tensor: torch.Tensor) -> None:
    import torch

    if tensor.layout is not torch.strided:
        raise UncopyableArgumentsError(f"nobody knows how to copy a tensor of layout {tensor.layout}")
    if tensor.device.type == "cpu" and has_accelerator():
        raise UncopyableArgumentsError(
            "a copy of a tensor in the host's memory need not be seen by the device"
        )
    if tensor.untyped_storage().nbytes() > MAX_COPIED_BYTES:
        raise UncopyableArgumentsError(
            f"a tensor's storage takes {tensor.untyped_storage().nbytes()} bytes, more than the {MAX_COPIED_BYTES} "
            "that are copied"
        )


class _StorageCopies:
    """Copies of tensors; those of one storage share one copy of it."""

    def __init__(self) -> None:
        self._storages: dict[int, torch.Tensor] = {}
        self._bytes = 0

    def tensor(self, original: torch.Tensor) -> torch.Tensor:
        """The copy of a tensor."""
        import torch

        _require_copyable(original)
        original = original.detach()
        storage = original.untyped_storage()
        base = storage.data_ptr()
        raw = self._storages.get(base)
        if raw is None:
            self._bytes += storage.nbytes()
            if self._bytes > MAX_COPIED_BYTES:
                raise UncopyableArgumentsError(
                    f"its tensors take more than the {MAX_COPIED_BYTES} bytes that are copied"
                )
            raw = self._storages[base] = _copied_bytes(storage, original.device)
        shift = raw.storage_offset()
        size = original.element_size()
        if shift % size:
            raise UncopyableArgumentsError("a tensor lies at an address that its elements do not divide")
        bare = torch.empty(0, dtype=original.dtype, device=original.device)
        return bare.set_(
            raw.untyped_storage(),
            shift // size + original.storage_offset(),
            original.shape,
            original.stride(),
        )


def _copied_bytes(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """A storage's bytes at an address that divides as the storage's own."""
    import torch

    count = storage.nbytes()
    flat = torch.empty(count + 2 * _ALIGNMENT, dtype=torch.uint8, device=device)
    shift = (storage.data_ptr() - flat.data_ptr()) % _ALIGNMENT
    copied = flat[shift : shift + count]
    copied.copy_(torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (count,), (1,)))
    return copied
