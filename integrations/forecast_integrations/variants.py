"""Other sources of a kernel in a user's process: loading, launching, and staying within what was verified.

A record (`forecast_autotune.variants.Variant`) is imported only after a check has admitted it for the call at
hand, and launched only for calls that a check covers: a key hit may come with other strides, other sizes that
are not in the key, or overlapping tensors. Kernels that users hand over themselves are theirs to vouch for.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from triton.runtime.autotuner import Config

from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Candidate
from forecast_autotune.records import Config as Record
from forecast_autotune.store.files import write_whole
from forecast_autotune.variants import Variant
from forecast_autotune.variants.contract import contract
from forecast_autotune.variants.entry import Entry, Grid, known
from forecast_autotune.variants.entry import signature as parameters_of
from forecast_integrations.call import outcome_of
from forecast_integrations.describe import layers_of, to_config
from forecast_integrations.source import innermost, source_of

_NUMBER = itertools.count()
Covers = Callable[[Mapping[str, Any]], bool]
"""Call arguments by name -> whether a variant was verified for them."""


class VariantConfig(Config):
    """A config of another source; never equal to one of the base kernel."""

    function: Function
    fallback: Any = None
    """The base's config for calls that the variant was not verified for; None: the first."""

    @classmethod
    def of(cls, config: Any, function: Function) -> VariantConfig:
        """A config with these values for this function."""
        made = cls.__new__(cls)
        made.__dict__.update(vars(config))
        made.function = function
        return made

    def __hash__(self) -> int:
        return hash((self.function.name, super().__hash__()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, VariantConfig)
            and self.function.name == other.function.name
            and bool(super().__eq__(other))
        )


class Function:
    """Another kernel for the same call, which its user vouches for: it takes the very same arguments."""

    def __init__(self, name: str, kernel: Any) -> None:
        self.name = name
        self.kernel = kernel
        self.run: Callable[..., Any] = kernel.run
        self.warmup: Callable[..., Any] = getattr(kernel, "warmup", kernel.run)

    per_call = False
    """Whether what it compiles to depends on more of the call than `describe.kind` tells."""

    @property
    def source(self) -> str:
        """Its source text, for whoever forecasts it; empty where it cannot be found."""
        return source_of(self.kernel)

    def configs(self, base: Sequence[Any]) -> list[VariantConfig]:
        """Its configs, given the base kernel's."""
        return list(dict.fromkeys(VariantConfig.of(config, self) for config in base))

    def covers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether it may be launched for this call."""
        return True

    def grid(self, grid: Any, named: Mapping[str, Any], config: Any) -> Grid | None:
        """Its launch grid for these arguments; None where it cannot be told."""
        return known(grid, named, config.all_kwargs())

    def traced(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], config: Any
    ) -> tuple[Any, Sequence[Any], dict[str, Any], dict[str, Any]]:
        """What has to be traced for its IR: kernel, arguments, keywords, meta-parameters."""
        given = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
        return self.kernel, args, given, dict(config.kwargs)


class Loaded(Function):
    """An imported variant, launched as it asks for, on calls that a check covers."""

    def __init__(self, variant: Variant, entry: Entry, base: Any, covers: Covers) -> None:
        """`base` is the tuner's function; its heuristics serve parameters that the variant has as well."""
        self.variant, self.entry = variant, entry
        self._names = tuple(base.arg_names)
        self._takes = frozenset((*entry.parameters, *entry.meta))
        self._layers = layers_of(base)
        self._covers = covers
        own = contract(variant.source, variant.kernel).configs
        self._configs = [_triton_config(c) for c in variant.configs or own]
        self.name, self.kernel = variant.name, entry.kernel
        self.per_call = bool(entry.base or layers_of(entry.kernel))
        self.run, self.warmup = self._run, self._warmup

    @property
    def source(self) -> str:
        """The record's text: the whole module, with the helpers it calls."""
        return self.variant.source

    def configs(self, base: Sequence[Any]) -> list[VariantConfig]:
        """Its own, or the base's without the meta-parameters that it has dropped."""
        hooks = {config.pre_hook for config in base}
        if not self._configs:
            return list(dict.fromkeys(VariantConfig.of(self._narrowed(config), self) for config in base))
        found = [VariantConfig.of(config, self) for config in self._configs]
        if len(hooks) == 1:
            # What every config of the base prepares (a descriptor's block, say), these need, too.
            for config in found:
                config.pre_hook = next(iter(hooks))
        return list(dict.fromkeys(found))

    def _narrowed(self, config: Any) -> Any:
        made = Config.__new__(Config)
        made.__dict__.update(vars(config))
        made.kwargs = {n: v for n, v in config.kwargs.items() if n in self._takes}
        return made

    def covers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a check covers this call."""
        return self._covers({**dict(zip(self._names, args, strict=False)), **kwargs})

    def grid(self, grid: Any, named: Mapping[str, Any], config: Any) -> Grid | None:
        """Its own launch grid, or the call's."""
        try:
            given = self._heuristic({**named, **config.all_kwargs()})
            return self.entry.place(grid, given, self._meta(given), self._options(given))
        except Exception:
            return None  # it will fail again where it is launched, and be a failed candidate

    def traced(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], config: Any
    ) -> tuple[Any, Sequence[Any], dict[str, Any], dict[str, Any]]:
        """Everything by name, as the positions are the base's. Raises what a launch would."""
        grid, given = self._given(args, {**kwargs, **config.all_kwargs()})
        found = self.entry.arguments(grid, given, self._meta(given), {})
        meta = {n: found.pop(n) for n in (*self.entry.meta, *self.entry.base) if n in found}
        return self.kernel, (), found, meta

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return self._guarded(self.entry.run, args, kwargs)

    def _warmup(self, *args: Any, **kwargs: Any) -> Any:
        return self._guarded(self.entry.warmup, args, kwargs)

    def _guarded(self, launch: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            grid, given = self._given(args, kwargs)
            return launch(grid, given, self._meta(given), self._options(given))
        except Exception as error:
            if outcome_of(error) is not None:
                raise
            # A wrong call, for the user's own kernel; for a variant one more way to be no good.
            raise VariantError(f"variant {self.name}: {type(error).__name__}: {error}") from error

    def _given(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        grid = given.pop("grid", None)
        given.pop("warmup", None)
        return grid, self._heuristic(given)

    def _heuristic(self, given: dict[str, Any]) -> dict[str, Any]:
        for layer in self._layers:
            for name, rule in layer.items():
                if name in self._takes:
                    given[name] = rule(given)
        return given

    def _options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is neither an argument of the call nor a parameter: `num_warps` and the like."""
        return {n: v for n, v in given.items() if n not in self._names and n not in self._takes}

    def _meta(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return {n: given[n] for n in self.entry.meta if n in given}


def load(variant: Variant, base: Any, covers: Covers, folder: Path | None = None) -> Loaded:
    """Import a variant that has been verified, and bind it to the tuner's function it may stand in for.

    Its source is written below `folder` (None: a temporary one), where tracebacks and `inspect` find it; what
    runs is the record's text. Raises `VariantError` for a source that breaks the contract, has other runtime
    parameters than the base, or cannot be imported.
    """
    try:
        promised = contract(variant.source, variant.kernel)
        promised.must_fit(parameters_of(innermost(base))[0])
        names = import_text(variant.source, folder)
        return Loaded(variant, Entry.of(names, variant.kernel), base, covers)
    except RecordError as error:
        raise VariantError(f"variant {variant.name} cannot be used: {error}") from error
    except Exception as error:
        raise VariantError(f"variant {variant.name} cannot be imported: {error!r}") from error


def import_text(source: str, folder: Path | None = None) -> dict[str, Any]:
    """Import a module's text under a name of its own; returns its names. Raises what its code raises."""
    digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    path = _written(folder, digest, source)
    name = f"forecast_autotune_variant_{digest[:16]}_{next(_NUMBER)}"
    spec = importlib.util.spec_from_loader(name, _Text(source, path), origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # `inspect` looks a function's module up there
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except BaseException:
        del sys.modules[name]
        raise
    return vars(module)


class _Text(importlib.abc.InspectLoader):
    """Runs a text as the file it was written to: what lies there may have been replaced since."""

    def __init__(self, text: str, path: Path) -> None:
        self._text, self._path = text, path

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self._text, str(self._path))


def _written(folder: Path | None, digest: str, source: str) -> Path:
    payload = source.encode("utf-8", "surrogatepass")
    for place in ([] if folder is None else [folder]) + [Path(_scratch().name)]:
        path = place / f"{digest}.py"
        try:
            if not path.is_file() or path.read_bytes() != payload:
                write_whole(path, payload)
            return path
        except OSError:
            continue  # a read-only store
    raise VariantError("a variant's source could not be written anywhere, not even to a temporary folder")


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="forecast-variants-")


def launch_varied(tuner: Any, config: VariantConfig, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Launch another source, or the base kernel where this call is none of those it was verified for."""
    function: Any = config.function
    if not function.covers(args, kwargs):
        config, function = config.fallback or tuner.configs[0], tuner.fn
    tuner.best_config = config
    given = {**kwargs, **config.all_kwargs()}
    if config.pre_hook is not None:
        config.pre_hook({**dict(zip(tuner.arg_names, args, strict=False)), **given})
    return function.run(*args, **given)


def widen(found: dict[Candidate, Any], functions: Mapping[str, Function]) -> dict[Candidate, Any]:
    """The base's candidates with those of the other functions after them, each with configs of its own."""
    base = [config for candidate, config in found.items() if candidate.variant == "base"]
    return found | {
        Candidate(to_config(config), name): config
        for name, function in functions.items()
        for config in function.configs(base)
    }


def _triton_config(record: Record) -> Any:
    options: dict[str, Any] = {"maxnreg": record.maxnreg} if record.maxnreg is not None else {}
    if record.ir_override is not None:
        options["ir_override"] = record.ir_override
    return Config(
        dict(record.kwargs),
        num_warps=record.num_warps,
        num_stages=record.num_stages,
        num_ctas=record.num_ctas,
        **options,
    )


def overlapping(named: Mapping[str, Any], written: frozenset[str] | None) -> bool:
    """Whether a tensor that is written overlaps another argument; None: any of them may be written."""
    spans = sorted(_spans(named))
    if all(a[1] <= b[0] for a, b in itertools.pairwise(spans)):
        return False
    touching = [(a[2], b[2]) for a, b in itertools.combinations(spans, 2) if b[0] < a[1]]
    return written is None or any(a in written or b in written for a, b in touching)


def _spans(named: Mapping[str, Any]) -> Iterator[tuple[int, int, str]]:
    for name, value in named.items():
        if not hasattr(value, "data_ptr") or not hasattr(value, "stride"):
            continue
        size, stride = value.shape, value.stride()
        if 0 in size:
            continue
        count = 1 + sum((n - 1) * abs(s) for n, s in zip(size, stride, strict=True))
        begin = value.data_ptr()
        yield begin, begin + count * value.element_size(), name
