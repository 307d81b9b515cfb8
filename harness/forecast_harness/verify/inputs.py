"""Input values: regimes that catch what standard normal numbers let through."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forecast_autotune.errors import RecordError
from forecast_autotune.variants.constants import decode_constant

_SPECIAL_VALUES = 3
"""The number of elements that become NaN or infinite."""
DERIVED_REGIMES = ("triple", "hundredth", "negative", "tied", "spiked")
"""Regimes that are tried, too, wherever `normal` is one: they show faults that N(0, 1) hides."""
_SPIKE, _SPIKED_SHARE = 32.0, 64


def draw(
    shape: Sequence[int],
    dtype: torch.dtype,
    regime: str,
    generator: torch.Generator,
    device: str = "cpu",
) -> torch.Tensor:
    """A contiguous CPU tensor of this shape whose numbers follow `regime`; drawn on `device`, if told so.

    normal: N(0, 1); uniform: [0, 1); offset: N(5, 1), where an operation that is nearly the identity or
    nearly zero on N(0, 1) shows; large and tiny: N(0, 1) scaled so that squares still fit the dtype;
    denormal: half of the elements below the smallest normal number; cauchy: heavy tails; nan, inf: a few
    among normal ones. triple, hundredth: N(0, 1) times 3, and 0.01; negative: none above zero; tied: multiples of
    a half, many equal; spiked: one in 64 elements, at least one, 32 times as large. Integers are uniform in [0, 128),
    booleans fair.
    """
    size = tuple(shape)
    if device != "cpu":
        seed = int(torch.randint(0, 2**63 - 1, (), generator=generator, device="cpu"))
        generator = torch.Generator(device).manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, size, generator=generator, device=device).bool().cpu()
    if not dtype.is_floating_point:
        return torch.randint(0, 128, size, generator=generator, device=device).to(dtype).cpu()
    info = torch.finfo(dtype)
    # Single precision is drawn four times as fast, and no narrower dtype shows the difference.
    wide = torch.float64 if info.bits > 32 else torch.float32
    if regime == "zeros":
        return torch.zeros(size, dtype=dtype)
    if regime == "uniform":
        return torch.rand(size, generator=generator, dtype=wide, device=device).to(dtype).cpu()
    normal = torch.randn(size, generator=generator, dtype=wide, device=device)
    if regime == "offset":
        normal += 5
    elif regime == "large":
        normal *= min(1e3, math.sqrt(info.max) / 16)
    elif regime == "tiny":
        normal *= max(1e-3, math.sqrt(info.smallest_normal))
    elif regime == "denormal":
        small = torch.rand(size, generator=generator, device=device) < 0.5
        normal = torch.where(small, normal * info.smallest_normal * 0.25, normal)
    elif regime == "cauchy":
        normal /= torch.randn(size, generator=generator, dtype=wide, device=device)
        normal = normal.clamp(-1e3, 1e3)
    elif regime in ("triple", "hundredth"):
        normal *= 3.0 if regime == "triple" else 0.01
    elif regime == "negative":
        normal = -normal.abs()
    elif regime == "tied":
        normal = (2 * normal).round() / 2
    elif regime == "spiked" and normal.numel():
        count = -(-normal.numel() // _SPIKED_SHARE)
        where = torch.randint(0, normal.numel(), (count,), generator=generator, device=device)
        normal.reshape(-1)[where] *= _SPIKE
    elif regime in ("nan", "inf") and normal.numel():
        flat = normal.reshape(-1)
        where = torch.randint(0, flat.numel(), (_SPECIAL_VALUES,), generator=generator, device=device)
        bad = [math.nan] * 3 if regime == "nan" else [math.inf, -math.inf, math.inf]
        flat[where] = torch.tensor(bad, dtype=wide, device=device)
    if info.bits == 8:
        normal = normal.clamp(info.min, info.max)
    return normal.to(dtype).cpu()


def perturb_values(value: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A copy in which one element in sixteen, at random places, has its neighbour's value.

    A cache that recognises inputs by a sample of their elements takes the two for equal.
    """
    if value.numel() < 2:
        return value.clone()
    mask = torch.rand(value.shape, generator=generator) < 1 / 16
    mask.reshape(-1)[torch.randint(0, value.numel(), (1,), generator=generator)] = True
    return torch.where(mask, value.reshape(-1).roll(1).reshape(value.shape), value)


_SCATTERED, _RUNS, _RUN = 2048, 8, 512
"""Elements of a tensor that get their neighbour's value: single ones, runs of them, and the length of a run."""
_REMEMBERED_STEPS = 64
"""Steps that are remembered, for a block that is behind."""

INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class ElementChange:
    """Elements of one contiguous tensor that were changed: their numbers (int64, [k]) and new bits [k]."""

    name: str
    where: torch.Tensor
    values: torch.Tensor


class InputMutator:
    """The tensors of one large case, changed in place by `step`.

    `drawn`: the tensors to change, but for those whose names are `fixed`; `make` computes the arguments from them
    (by default these are the drawn ones). Both sides of a comparison follow the same drift, each at its own pace.
    """

    def __init__(
        self,
        drawn: Tensors,
        tensors: Tensors,
        fixed: Collection[str] = (),
        make: Callable[[Tensors], Tensors] | None = None,
    ) -> None:
        self.tensors = tensors
        self.version = 0
        """Steps so far."""
        self._draws, self._make = drawn, make
        self._moving = [
            n for n, t in drawn.items() if n not in fixed and t.is_floating_point() and t.numel() >= 2
        ]
        self._log: list[tuple[ElementChange, ...]] = []

    def step(self, generator: torch.Generator) -> None:
        """Change a few values of every floating tensor that may change."""
        changes = []
        for name in self._moving:
            tensor = self._draws[name]
            change = _copy_neighbours(name, tensor, generator)
            integer_view(tensor)[change.where] = change.values
            if self.tensors.get(name) is tensor:
                changes.append(change)
        if self._make is not None:
            fresh = self._make(self._draws)
            for name, tensor in self.tensors.items():
                if tensor is not self._draws.get(name):
                    changes.append(_overwrite(name, tensor, fresh[name]))
        self._log = [*self._log, tuple(changes)][-_REMEMBERED_STEPS:]
        self.version += 1

    def since(self, version: int) -> list[ElementChange] | None:
        """The changes after that version, in order; None if they are forgotten."""
        behind = self.version - version
        if behind > len(self._log):
            return None
        return [c for step in self._log[len(self._log) - behind :] for c in step if c.where.numel()]


def _copy_neighbours(name: str, tensor: torch.Tensor, generator: torch.Generator) -> ElementChange:
    """Each element at random places takes the value of the one before it."""
    count = tensor.numel()
    singles = torch.randint(0, count, (min(_SCATTERED, -(-count // 16)),), generator=generator)
    starts = torch.randint(0, count, (_RUNS,), generator=generator)
    runs = (starts[:, None] + torch.arange(min(_RUN, -(-count // 64)))).reshape(-1) % count
    where = torch.cat([singles, runs]).unique()
    return ElementChange(name, where, integer_view(tensor)[(where - 1) % count])


def _overwrite(name: str, tensor: torch.Tensor, fresh: torch.Tensor) -> ElementChange:
    """Write `fresh` over `tensor`."""
    old, new = integer_view(tensor), integer_view(fresh.contiguous())
    where = (old != new).nonzero()[:, 0]
    old[where] = new[where]
    return ElementChange(name, where, new[where])


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as integers of their size, [n], in the same memory."""
    return tensor.view(-1).view(INTEGER_DTYPES[tensor.element_size()])


def can_mutate(drawn: Tensors, tensors: Tensors) -> bool:
    """Whether both can be changed in place: contiguous, and none lies in another's memory."""
    different = {id(t): t for t in (*drawn.values(), *tensors.values()) if t.numel()}
    places = {t.untyped_storage().data_ptr() for t in different.values()}
    sizes = [t.element_size() in INTEGER_DTYPES and t.is_contiguous() for t in different.values()]
    return all(sizes) and len(places) == len(different)


def encode_arguments(value: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A nest of tuples, lists, dicts and scalars as JSON; its tensors go into `tensors` by number.

    Raises `RecordError` for anything else, because a candidate must get it through JSON and bytes.
    """
    if isinstance(value, torch.Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().cpu()
        return {"t": name}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode_arguments(v, tensors) for v in value]}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: encode_arguments(v, tensors) for k, v in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"v": value}
    raise RecordError(f"an argument of type {type(value).__name__} cannot be handed to another process")


def decode_arguments(shape: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value that a skeleton stands for; the inverse of `encode_arguments`, and of `encode_constant` under `c`."""
    ((kind, inner),) = shape.items()
    if kind == "t":
        return tensors[inner]
    if kind == "v":
        return inner
    if kind == "c":
        return decode_constant(inner, functions=True)
    if kind == "dict":
        return {k: decode_arguments(v, tensors) for k, v in inner.items()}
    items = [decode_arguments(v, tensors) for v in inner]
    return tuple(items) if kind == "tuple" else items
