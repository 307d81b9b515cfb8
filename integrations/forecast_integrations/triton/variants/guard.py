"""Which calls a verified variant may serve, asked at every launch of it: so it has to be cheap.

A key hit may come with other strides, other sizes that are not in the key, or overlapping tensors. What a
check holds for depends on dtypes, shapes, strides, alignment and scalars: the answer is remembered by these.
Whether a tensor that is written overlaps another one is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from forecast_autotune.records import Kernel
from forecast_autotune.variants import Variant, admission
from forecast_autotune.variants.signature import written
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.protocols import (
    Arguments,
    KernelFunction,
    NamedArguments,
    Tensor,
    is_descriptor,
    is_tensor,
)

_MAX_CACHED_CALLS = 4096
"""Calls remembered per layout."""
_MAX_LAYOUTS = 256
"""Ways of writing a call (types of its arguments, names of those by keyword) that are remembered."""
_ALIGNMENT = 15

ArgumentPicker = Callable[[Sequence[Any]], tuple[Any, ...]]
OverlapPairs = tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
"""The place and bytes of each tensor that may be written, and the same of those it must not overlap."""


class CallGuard:
    """Whether a call is one that a variant was verified for."""

    def __init__(self, variant: Variant, kernel: Kernel, fn: KernelFunction) -> None:
        """`fn` is the tuner's function: its arguments are those of the calls."""
        self._variant, self._kernel, self._fn = variant, kernel, fn
        self._names = tuple(fn.arg_names)
        self._layouts: dict[tuple[object, ...], _CallLayout] = {}

    def __call__(self, args: Arguments, kwargs: NamedArguments) -> bool:
        """`kwargs` may hold more than arguments: `grid`, `warmup` and launch options do not matter."""
        values = args
        if len(kwargs) == 2 and "grid" in kwargs and "warmup" in kwargs:
            kinds: tuple[object, ...] = tuple(map(type, args))
        else:
            values = (*args, *kwargs.values())
            kinds = (*map(type, values), *kwargs)
        layout = self._layouts.get(kinds)
        if layout is None:
            layout = self._layout(kinds, args, kwargs)
        tensors = layout.tensors(values)
        if layout.described:
            tensors = (*tensors, *[v.base for v in layout.descriptors(values)])
        begins, low = [], 0
        shown: list[object] = [layout.scalars(values)]
        for tensor in tensors:
            at = tensor.data_ptr()
            low |= at
            begins.append(at)
            shown += tensor.dtype, tensor.shape, tensor.stride()
        if low & _ALIGNMENT:
            shown += [at & _ALIGNMENT for at in begins]
        known = tuple(shown)
        try:
            rivals = layout.known[known]
        except KeyError:
            if len(layout.known) >= _MAX_CACHED_CALLS:
                layout.known.clear()
            rivals = layout.known[known] = self._rivals_of(args, kwargs, layout.names, tensors)
        except TypeError:  # a value that cannot be hashed
            rivals = self._rivals_of(args, kwargs, layout.names, tensors)
        return rivals is not None and _are_disjoint(begins, rivals)

    def _layout(self, kinds: tuple[object, ...], args: Arguments, kwargs: NamedArguments) -> _CallLayout:
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        # What is no argument of the kernel cannot matter to a check.
        arguments = {*self._names} - {"grid", "warmup"}
        places = {name: i for i, name in enumerate(self._names[: len(args)])}
        places |= {name: i for i, name in enumerate(kwargs, len(args)) if name in arguments}
        values = (*args, *kwargs.values())
        layout = self._layouts[kinds] = _CallLayout({name: (i, values[i]) for name, i in places.items()})
        return layout

    def _rivals_of(
        self, args: Arguments, kwargs: NamedArguments, names: Sequence[str], tensors: Sequence[Tensor]
    ) -> OverlapPairs | None:
        """What must not overlap; None for a call that no check covers."""
        named = {**dict(zip(self._names, args, strict=False)), **kwargs}
        problem = describe.describe(self._fn, self._kernel, named, (), None)
        check = admission(self._variant, problem)
        return None if check is None else _overlap_pairs(names, tensors, written(check.signature))


class _CallLayout:
    """Where tensors and other values stand in calls that are written alike."""

    def __init__(self, arguments: Mapping[str, tuple[int, object]]) -> None:
        """`arguments`: name -> place among the values of a call, and a value such as stands there."""
        plain = {n: i for n, (i, value) in arguments.items() if is_tensor(value)}
        described = {n: i for n, (i, value) in arguments.items() if n not in plain and is_descriptor(value)}
        tensors_by_name = {*plain, *described}
        self.names = (*plain, *described)
        """Names of the tensors: those that are arguments, then those in descriptors."""
        self.described = bool(described)
        self.tensors, self.descriptors = _picker([*plain.values()]), _picker([*described.values()])
        self.scalars = _picker([i for n, (i, _) in arguments.items() if n not in tensors_by_name])
        self.known: dict[tuple[object, ...], OverlapPairs | None] = {}


def _picker(places: list[int]) -> ArgumentPicker:
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda values: ()
    (place,) = places
    return lambda values: (values[place],)


def may_overlap(named: NamedArguments, written: frozenset[str] | None) -> bool:
    """Whether a tensor that is written overlaps another argument; None: any of them may be written."""
    tensors_by_name: dict[str, Tensor] = {}
    for name, value in named.items():
        if is_tensor(value):
            tensors_by_name[name] = value
        elif is_descriptor(value):
            tensors_by_name[name] = value.base
    tensors = list(tensors_by_name.values())
    return not _are_disjoint(
        [t.data_ptr() for t in tensors], _overlap_pairs(list(tensors_by_name), tensors, written)
    )


def _overlap_pairs(
    names: Sequence[str], tensors: Sequence[Tensor], written: frozenset[str] | None
) -> OverlapPairs:
    sizes = {i: size for i, tensor in enumerate(tensors) if (size := _extent(tensor))}
    first = {i for i in sizes if written is None or names[i] in written}
    # A pair of which both are written is looked at once.
    return tuple(
        (i, sizes[i], tuple((j, size) for j, size in sizes.items() if j not in first or j > i))
        for i in sorted(first)
    )


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    size = tensor.shape
    if 0 in size:
        return 0
    count = 1 + sum((n - 1) * abs(s) for n, s in zip(size, tensor.stride(), strict=True))
    return int(count * tensor.element_size())


def _are_disjoint(begins: Sequence[int], rivals: OverlapPairs) -> bool:
    for i, size, others in rivals:
        begin = begins[i]
        end = begin + size
        for j, width in others:
            at = begins[j]
            if at < end and begin < at + width:
                return False
    return True
