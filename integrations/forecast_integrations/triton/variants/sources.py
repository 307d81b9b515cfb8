"""The sources that `variants=` names, and the candidates among them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, cast

from forecast_autotune.errors import SettingsError, VariantError
from forecast_autotune.records import HOOK_VARIANT_PREFIX, Problem
from forecast_autotune.store import Store
from forecast_autotune.store.files import VARIANTS
from forecast_autotune.variants import Variant
from forecast_integrations.triton.protocols import KernelFunction, NamedArguments, Tuner
from forecast_integrations.triton.variants.calls import CallGuard
from forecast_integrations.triton.variants.loading import AlternativeKernel, LoadedVariant, load_variant

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
"""Folder of written sources, below a store's root."""


@dataclass
class VariantSources:
    """The other sources of one tuner, resolved anew for every problem."""

    kernels: dict[str, AlternativeKernel] = field(default_factory=dict)
    """Kernels that their user vouches for."""
    records: tuple[Variant, ...] = ()
    store: Store | None = None
    own_store: bool = False
    """Whether the tuner's own store is searched."""
    generator: Generator | None = None
    _variants: dict[tuple[object, ...], LoadedVariant | None] = field(default_factory=dict)
    _warnings: set[str] = field(default_factory=set)

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
            if given in ("store", "off"):  # as the variable has it
                return cls(own_store=True) if given == "store" else None
            if str(given).isidentifier() and not Path(given).is_dir():
                raise SettingsError(
                    f"variants={given!r} is no folder of a store: give 'store', 'off' or a path"
                )
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
            guard = CallGuard(variant, problem.kernel, tuner.fn)
            function = self._load(variant, guard, tuner, own) if guard((), named) else None
            if function is not None:
                functions.setdefault(variant.name, function)
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
        self, variant: Variant, guard: CallGuard, tuner: Tuner, own: Store | None
    ) -> LoadedVariant | None:
        # By source and checks: another process may have added checks, or replaced the source.
        key = variant.name, variant.source, variant.configs, variant.checks
        if key not in self._variants:
            folder = None if own is None or own.root is None else own.root / MODULES
            try:
                self._variants[key] = load_variant(variant, tuner.fn, guard, folder)
            except VariantError as error:
                self._warn_once(str(error))
                self._variants[key] = None
        return self._variants[key]

    def _warn_once(self, text: str) -> None:
        if text not in self._warnings:
            self._warnings.add(text)
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
    by_name: dict[str, KernelFunction] = {}
    for kernel in kernels:
        title = str(
            getattr(kernel, "__name__", None) or getattr(kernel, "base_fn", kernel.__class__).__name__
        )
        name, number = title, 1
        while name in by_name or name == "base":
            number += 1
            name = f"{title} {number}"
        by_name[name] = kernel
    return by_name
