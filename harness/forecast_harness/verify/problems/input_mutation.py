"""Inputs too large to be made anew for every launch: a few values are changed in place instead.

What a case's twin is to a small case, the next step of a drift is to a large one: values that a sample of
elements would not tell from the ones before, at thousands of places, some scattered and some side by side.
The results of before are wrong for them, and only the changes have to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

_SCATTERED, _RUNS, _RUN = 2048, 8, 512
"""Elements of a tensor that get their neighbour's value: so many alone, and so many in runs of so many."""
_REMEMBERED_STEPS = 64
"""Steps that are remembered, for whoever is behind."""

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

    `drawn`: what to change, of which `fixed` names are left alone; `make` computes the arguments from it
    (by default they are the drawn ones). Both sides of a comparison follow the same drift, each as far as it
    was asked to.
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
        self._drawn, self._make = drawn, make
        self._moving = [
            n for n, t in drawn.items() if n not in fixed and t.is_floating_point() and t.numel() >= 2
        ]
        self._log: list[tuple[ElementChange, ...]] = []

    def step(self, generator: torch.Generator) -> None:
        """Change a few values of every floating tensor that may change."""
        changes = []
        for name in self._moving:
            tensor = self._drawn[name]
            change = _copy_neighbours(name, tensor, generator)
            integer_view(tensor)[change.where] = change.values
            if self.tensors.get(name) is tensor:
                changes.append(change)
        if self._make is not None:
            fresh = self._make(self._drawn)
            for name, tensor in self.tensors.items():
                if tensor is not self._drawn.get(name):
                    changes.append(_overwrite(name, tensor, fresh[name]))
        self._log = [*self._log, tuple(changes)][-_REMEMBERED_STEPS:]
        self.version += 1

    def since(self, version: int) -> list[ElementChange] | None:
        """What was changed after that version, in order; None if that is forgotten."""
        behind = self.version - version
        if behind > len(self._log):
            return None
        return [c for step in self._log[len(self._log) - behind :] for c in step if c.where.numel()]


def _copy_neighbours(name: str, tensor: torch.Tensor, generator: torch.Generator) -> ElementChange:
    """Each element at random places takes the value of the one before it."""
    count = tensor.numel()
    scattered = torch.randint(0, count, (min(_SCATTERED, -(-count // 16)),), generator=generator)
    starts = torch.randint(0, count, (_RUNS,), generator=generator)
    runs = (starts[:, None] + torch.arange(min(_RUN, -(-count // 64)))).reshape(-1) % count
    where = torch.cat([scattered, runs]).unique()
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
