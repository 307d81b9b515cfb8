"""Forms of calls, by which answers are remembered, and the calls that a verified source may serve.

Both are computed at every launch of a variant, so they have to be cheap. A key hit may come with other strides, other
sizes that are not in the key, or overlapping tensors. The scope of a check depends on dtypes, shapes, strides,
alignment and scalars: the answer is remembered by these. Overlaps of written tensors are checked in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, TypeAlias, cast

from forecast_autotune.records import Kernel
from forecast_autotune.variants import Check, Variant, admission
from forecast_autotune.variants.signature import free_scalars, integer_class, written
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
"""Layouts of a call (types of its arguments, names of its keywords) that are remembered."""
_ALIGNMENT = 15
_PLAIN = (int, float, bool, str)

ArgumentPicker = Callable[[Sequence[Any]], tuple[Any, ...]]
CallForm: TypeAlias = (
    "tuple[_CallLayout, tuple[object, ...], Sequence[Tensor], Sequence[int], Sequence[object]]"
)
"""A call's layout, its description, its tensors, their addresses, and all of its values."""
OverlapPairs = tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
"""The place and bytes of each tensor that may be written, and the same of those it must not overlap."""


class CallForms:
    """Describes calls of a kernel by all of their arguments: values, and dtypes, shapes, strides and alignment."""

    def __init__(self, names: Sequence[str], checks: Iterable[Check]) -> None:
        """A float that no check mentions, such as a rate that each step changes, is left out.

        An integer that no check mentions, such as a count of steps, counts by its class once it has changed.
        """
        self._names = tuple(names)
        self._free, self._fixed_values = free_scalars(c.signature for c in checks)
        self._layouts: dict[tuple[object, ...], _CallLayout] = {}

    def __call__(self, args: Arguments, kwargs: NamedArguments) -> CallForm:
        """`kwargs` may hold more than arguments: launch options matter as these do, `grid` and `warmup` do not."""
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
        if layout.has_descriptors:
            tensors = (*tensors, *[v.base for v in layout.descriptors(values)])
        begins, low = [], 0
        scalars, changing = layout.picks
        parts: list[object] = [scalars(values)]
        for tensor in tensors:
            at = tensor.data_ptr()
            low |= at
            begins.append(at)
            parts += tensor.dtype, tensor.shape, tensor.stride()
        if low & _ALIGNMENT:
            parts += [at & _ALIGNMENT for at in begins]
        if changing is not None:
            sizes = self._fixed_values.union(*[(*t.shape, *t.stride(), math.prod(t.shape)) for t in tensors])
            parts.append(tuple([v if v in sizes else integer_class(v) for v in changing(values)]))
        return layout, tuple(parts), tensors, begins, values

    def _layout(self, kinds: tuple[object, ...], args: Arguments, kwargs: NamedArguments) -> _CallLayout:
        if len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        places = {name: i for i, name in enumerate(self._names[: len(args)])}
        places |= {name: i for i, name in enumerate(kwargs, len(args)) if name not in ("grid", "warmup")}
        values = (*args, *kwargs.values())
        layout = self._layouts[kinds] = _CallLayout(
            (*self._names[: len(args)], *map(str, kinds[len(values) :])),
            {name: (i, values[i]) for name, i in places.items()},
            self._free,
        )
        return layout


class CallGuard:
    """Decides whether a variant was verified for a call."""

    def __init__(self, variant: Variant, kernel: Kernel, fn: KernelFunction) -> None:
        """`fn` is the tuner's function: its arguments are those of the calls."""
        self._variant, self._kernel, self._fn = variant, kernel, fn
        self.forms = CallForms(fn.arg_names, variant.checks)

    def __call__(self, args: Arguments, kwargs: NamedArguments, form: CallForm | None = None) -> bool:
        """`form` spares its computation."""
        form = form or self.forms(args, kwargs)
        rivals = self.rivals(args, kwargs, form)
        return rivals is not None and are_disjoint(form[3], rivals)

    def rivals(self, args: Arguments, kwargs: NamedArguments, form: CallForm) -> OverlapPairs | None:
        """The tensors that must not overlap; None for a call that no check covers."""
        layout, key, tensors, *_ = form
        # Several guards may know one layout.
        return cast(
            "OverlapPairs | None",
            layout.answer(key, lambda: self._rivals_of(args, kwargs, layout.names, tensors), id(self)),
        )

    def _rivals_of(
        self, args: Arguments, kwargs: NamedArguments, names: Sequence[str], tensors: Sequence[Tensor]
    ) -> OverlapPairs | None:
        arguments = {**dict(zip(self._fn.arg_names, args, strict=False)), **kwargs}
        problem = describe.describe(self._fn, self._kernel, arguments, (), None)
        check = admission(self._variant, problem)
        return None if check is None else overlap_pairs(names, tensors, written(check.signature))


class _CallLayout:
    """The places of tensors and other values in calls with the same types and keywords."""

    def __init__(
        self, written: tuple[str, ...], arguments: Mapping[str, tuple[int, object]], free: Collection[str]
    ) -> None:
        """`arguments`: name -> place among the values of a call, and an example value."""
        self.written = written
        """Names of the values of a call, `grid` and `warmup` among them where there are others by keyword."""
        tensors = {n: i for n, (i, value) in arguments.items() if is_tensor(value)}
        indirect = {n: i for n, (i, value) in arguments.items() if n not in tensors and is_descriptor(value)}
        tensors_by_name = {*tensors, *indirect}
        self.names = (*tensors, *indirect)
        """Names of the tensors: those that are arguments, then those in descriptors."""
        self.has_descriptors = bool(indirect)
        self.tensors, self.descriptors = picker([*tensors.values()]), picker([*indirect.values()])
        left_out = tensors_by_name | {n for n in free if n in arguments and type(arguments[n][1]) is float}
        self._places = [i for n, (i, _) in arguments.items() if n not in left_out]
        self._free = {i for n, (i, value) in arguments.items() if n in free and type(value) is int}
        """Places of integers that no check mentions."""
        self.picks: tuple[ArgumentPicker, ArgumentPicker | None] = picker(self._places), None
        """Pick from all values those that count by value, and the integers that count by class."""
        self.is_plain = not indirect and all(
            value is None or type(value) in _PLAIN for n, (_, value) in arguments.items() if n not in tensors
        )
        """Whether arguments of equal forms are the same to the compiler."""
        self._answers: dict[tuple[object, ...], Any] = {}
        self._last_scalars: dict[tuple[object, ...], Any] = {}
        self._changing: set[int] = set()

    def answer(self, form: tuple[object, ...], compute: Callable[[], Any], owner: int = 0) -> Any:
        """Return the owner's answer for a form of calls, which is computed once."""
        key = owner, form
        try:
            return self._answers[key]
        except KeyError:
            if len(self._answers) >= _MAX_CACHED_CALLS:
                self._answers.clear()
                self._last_scalars.clear()
            result = self._answers[key] = compute()
            self._notice_changes(*form)
            return result
        except TypeError:  # a value that cannot be hashed
            return compute()

    def _notice_changes(self, scalars: Any, *rest: object) -> None:
        """Let free integers in which a new form differs from the last similar one count by class from now on."""
        places, before = self._places, self._last_scalars.get(rest, scalars)
        self._last_scalars[rest] = scalars
        if not len(places) == len(before) == len(scalars):
            return
        changes = {p for p, old, new in zip(places, before, scalars, strict=True) if old != new} & self._free
        if changes:
            self._changing |= changes
            self._places = [p for p in places if p not in changes]
            self.picks = picker(self._places), picker(sorted(self._changing))


def picker(places: list[int]) -> ArgumentPicker:
    """A function that takes the values at these places out of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda values: ()
    (place,) = places
    return lambda values: (values[place],)


def overlap_pairs(
    names: Sequence[str], tensors: Sequence[Tensor], written: frozenset[str] | None
) -> OverlapPairs:
    """The tensors that must not overlap where those named are written; None: any of them may be."""
    sizes = {i: size for i, tensor in enumerate(tensors) if (size := _extent(tensor))}
    first = {i for i in sizes if written is None or names[i] in written}
    # A pair of two written tensors is checked once.
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


def are_disjoint(begins: Sequence[int], rivals: OverlapPairs) -> bool:
    """Whether tensors at these addresses overlap none of their rivals."""
    for i, size, partners in rivals:
        begin = begins[i]
        end = begin + size
        for j, width in partners:
            at = begins[j]
            if at < end and begin < at + width:
                return False
    return True
