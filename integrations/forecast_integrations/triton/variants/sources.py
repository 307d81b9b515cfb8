"""The sources that `variants=` names, the candidates among them, and the calls that a verified one may serve.

The last is asked at every launch of a variant, so it has to be cheap. A key hit may come with other strides, other
sizes that are not in the key, or overlapping tensors. The scope of a check depends on dtypes, shapes, strides,
alignment and scalars: the answer is remembered by these. Whether a tensor that is written overlaps another one is
looked at in every call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias, cast

from forecast_autotune.errors import SettingsError, VariantError
from forecast_autotune.records import HOOK_VARIANT_PREFIX, Kernel, Problem
from forecast_autotune.store import Store
from forecast_autotune.store.files import VARIANTS
from forecast_autotune.variants import Variant, admission
from forecast_autotune.variants.signature import written
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.protocols import (
    Arguments,
    KernelFunction,
    NamedArguments,
    Tensor,
    Tuner,
    is_descriptor,
    is_tensor,
)
from forecast_integrations.triton.variants.loading import AlternativeKernel, LoadedVariant, load_variant

_MAX_CACHED_CALLS = 4096
"""Calls remembered per layout."""
_MAX_LAYOUTS = 256
"""Ways of writing a call (types of its arguments, names of those by keyword) that are remembered."""
_ALIGNMENT = 15

ArgumentPicker = Callable[[Sequence[Any]], tuple[Any, ...]]
CallForm: TypeAlias = "tuple[_CallLayout, tuple[object, ...], Sequence[Tensor], Sequence[int]]"
"""How a call is written, its description, its tensors and the addresses that these begin at."""
OverlapPairs = tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]
"""The place and bytes of each tensor that may be written, and the same of those it must not overlap."""


class CallForms:
    """Describes calls of a kernel by all of their arguments: values, and dtypes, shapes, strides and alignment."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._layouts: dict[tuple[object, ...], _CallLayout] = {}

    def __call__(self, args: Arguments, kwargs: NamedArguments) -> CallForm:
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
        return layout, tuple(shown), tensors, begins

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


class CallGuard:
    """Whether a call is one that a variant was verified for."""

    def __init__(self, variant: Variant, kernel: Kernel, fn: KernelFunction) -> None:
        """`fn` is the tuner's function: its arguments are those of the calls."""
        self._variant, self._kernel, self._fn = variant, kernel, fn
        self._forms = CallForms(fn.arg_names)

    def __call__(self, args: Arguments, kwargs: NamedArguments, form: CallForm | None = None) -> bool:
        """`kwargs` may hold more than arguments, as those of `CallForms` may; `form` is for whoever knows it."""
        layout, shown, tensors, begins = form or self._forms(args, kwargs)
        key = id(self), shown  # several guards may know one layout
        rivals = layout.remembered(key, lambda: self._rivals_of(args, kwargs, layout.names, tensors))
        return rivals is not None and _are_disjoint(begins, rivals)

    def _rivals_of(
        self, args: Arguments, kwargs: NamedArguments, names: Sequence[str], tensors: Sequence[Tensor]
    ) -> OverlapPairs | None:
        """Return the tensors that must not overlap; None for a call that no check covers."""
        named = {**dict(zip(self._fn.arg_names, args, strict=False)), **kwargs}
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
        self._known: dict[tuple[object, ...], Any] = {}

    def remembered(self, form: tuple[object, ...], answer: Callable[[], Any]) -> Any:
        """The answer for a form of calls, from the second one on as it was."""
        try:
            return self._known[form]
        except KeyError:
            if len(self._known) >= _MAX_CACHED_CALLS:
                self._known.clear()
            result = self._known[form] = answer()
            return result
        except TypeError:  # a value that cannot be hashed
            return answer()


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


Generator: TypeAlias = Callable[[Problem], Iterable[Variant]]
VariantsArgument: TypeAlias = (
    Mapping[str, KernelFunction]
    | Sequence[KernelFunction | Variant]
    | KernelFunction
    | Variant
    | Store
    | Path
    | str
    | Generator
    | None
)
"""Kernels by name, kernels and records, one of them, a store or where it lies, or what makes records for a
problem."""

MODULES = f"{VARIANTS}/modules"
"""Where sources are written, below a store's root."""


@dataclass
class VariantSources:
    """The other sources of one tuner, resolved anew for every problem."""

    kernels: dict[str, AlternativeKernel] = field(default_factory=dict)
    """Kernels that their user vouches for."""
    records: tuple[Variant, ...] = ()
    store: Store | None = None
    own_store: bool = False
    """Whether the tuner's own store is looked into."""
    generator: Generator | None = None
    _loaded: dict[tuple[object, ...], LoadedVariant | None] = field(default_factory=dict)
    _warned: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, given: VariantsArgument, setting: str = "off") -> VariantSources | None:
        """Read `variants=`, or without it the setting; None where there can be none.

        Raises `SettingsError` for anything that is neither of the forms, and for a name that is taken.
        """
        if given is None:
            return cls(own_store=True) if setting == "store" else None
        if isinstance(given, Variant) or hasattr(given, "run"):
            given = cast("Sequence[KernelFunction | Variant]", [given])
        if isinstance(given, Mapping):
            return cls(kernels=_kernels_by_name(given)) if given else None
        if isinstance(given, Store):
            return cls(store=given)
        if isinstance(given, str | Path):
            if given == "store":
                return cls(own_store=True)
            return cls(store=Store.default(Path(given).expanduser()))
        if isinstance(given, Sequence):
            records = tuple(v for v in given if isinstance(v, Variant))
            live = [cast("KernelFunction", k) for k in given if not isinstance(k, Variant)]
            return (
                cls(kernels=_kernels_by_name(_kernels_by_own_name(live)), records=records) if given else None
            )
        if callable(given):
            return cls(generator=given)
        raise SettingsError(
            "variants= takes kernels by name, a list of kernels or Variants, 'store', a Store or its "
            f"directory, or a function of the problem, not {type(given).__name__}"
        )

    def functions(
        self, problem: Problem, tuner: Tuner, named: NamedArguments, own: Store | None
    ) -> dict[str, AlternativeKernel]:
        """The other kernels that may serve this call, by variant name.

        `named` are its arguments, `own` the tuner's store; None where no store may decide. Records count only
        as far as a check admits them for the problem, and none where a tensor that is written overlaps
        another one. Kernels that cannot be loaded are left out, with one warning.
        """
        functions = dict(self.kernels)
        for variant in self._records(problem, own):
            check = admission(variant, problem)
            if check is None or may_overlap(named, written(check.signature)):
                continue
            loaded = self._load(variant, problem.kernel, tuner, own)
            if loaded is not None:
                functions.setdefault(variant.name, loaded)
        return functions

    def _records(self, problem: Problem, own: Store | None) -> Iterator[Variant]:
        yield from self.records
        source = problem.kernel.source_sha256
        if own is not None and self.store is not None:
            yield from self.store.variants(source)
        if own is not None and self.own_store:
            yield from own.variants(source)
        if self.generator is not None:
            try:
                yield from list(self.generator(problem))
            except Exception as error:
                self._warn_once(
                    f"variants= failed for kernel {problem.kernel.name} ({error!r}): none are used"
                )

    def _load(
        self, variant: Variant, kernel: Kernel, tuner: Tuner, own: Store | None
    ) -> LoadedVariant | None:
        # By source and checks: another process may have added some, or put another source in its place.
        key = variant.name, variant.source, variant.configs, variant.checks
        if key not in self._loaded:
            folder = None if own is None or own.root is None else own.root / MODULES
            try:
                guard = CallGuard(variant, kernel, tuner.fn)
                self._loaded[key] = load_variant(variant, tuner.fn, guard, folder)
            except VariantError as error:
                self._warn_once(str(error))
                self._loaded[key] = None
        return self._loaded[key]

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=2)


def _kernels_by_name(kernels: Mapping[str, KernelFunction]) -> dict[str, AlternativeKernel]:
    for name, kernel in kernels.items():
        if (
            not isinstance(name, str)
            or not name
            or name == "base"
            or name.startswith(HOOK_VARIANT_PREFIX)
            or "|" in name
        ):
            raise SettingsError(
                f"a variant needs a name other than base, without |, got {name!r}: rename it in variants="
            )
        if not hasattr(kernel, "run"):
            raise SettingsError(
                f"variants= must hold kernels (or Variants in a list); {name} is a {type(kernel).__name__}"
            )
    return {name: AlternativeKernel(name, kernel) for name, kernel in kernels.items()}


def _kernels_by_own_name(kernels: Sequence[KernelFunction]) -> dict[str, KernelFunction]:
    """Kernels by their own names, numbered where two have one."""
    named: dict[str, KernelFunction] = {}
    for kernel in kernels:
        title = str(
            getattr(kernel, "__name__", None) or getattr(kernel, "base_fn", kernel.__class__).__name__
        )
        name, number = title, 1
        while name in named or name == "base":
            number += 1
            name = f"{title} {number}"
        named[name] = kernel
    return named
