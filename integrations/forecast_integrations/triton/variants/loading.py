"""Other sources of a kernel in a user's process: loading, and launches of verified calls alone.

A record (`forecast_autotune.variants.Variant`) is imported only after a check has admitted it for the call at hand, and
launched only for calls that a check covers: a key hit may come with other strides, other sizes that are not in the key,
or overlapping tensors. Kernels that users hand over themselves are theirs to vouch for.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Self

from triton import knobs
from triton.runtime import driver
from triton.runtime.autotuner import Config
from triton.runtime.jit import JITFunction

from forecast_autotune.errors import RecordError, VariantError
from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.records import Config as Record
from forecast_autotune.store.files import write_atomically
from forecast_autotune.variants import Variant
from forecast_autotune.variants.contract import read_contract
from forecast_autotune.variants.entry import CallGrid, Grid, KernelEntry, heuristic_layers, known
from forecast_autotune.variants.entry import signature as parameters_of
from forecast_integrations.triton.problem.call import KernelCall, outcome_of, warmup_of
from forecast_integrations.triton.problem.describe import to_config
from forecast_integrations.triton.problem.source import innermost, source_of
from forecast_integrations.triton.protocols import (
    Arguments,
    KernelFunction,
    LaunchConfig,
    NamedArguments,
    TraceInputs,
    Tuner,
)
from forecast_integrations.triton.upstream import is_of_triton
from forecast_integrations.triton.variants.calls import (
    ArgumentPicker,
    CallForm,
    CallGuard,
    OverlapPairs,
    are_disjoint,
    picker,
)

_MOST_LAUNCHES = 4096
"""Forms of calls whose launches are remembered, a config."""
_NUMBER = itertools.count()


class VariantConfig(Config):
    """A config of another source; never equal to one of the base kernel."""

    function: AlternativeKernel
    fallback: LaunchConfig | None = None
    """The base's config for calls that the variant was not verified for; None: the first."""

    launches: dict[tuple[object, ...], _DirectLaunch]
    """Launches by the form of their calls, from the second call of a form on."""
    _all_kwargs: dict[str, Any] | None = None
    _complete: VariantConfig | None = None

    @classmethod
    def of(cls, config: LaunchConfig, function: AlternativeKernel) -> VariantConfig:
        """A config with these values for this function."""
        config_of_variant = cls.__new__(cls)
        config_of_variant.__dict__.update(vars(config))
        config_of_variant.function, config_of_variant._complete = function, None
        config_of_variant.launches = {}
        return config_of_variant

    def all_kwargs(self) -> dict[str, Any]:
        """Meta-parameters and launch options. Not to be changed: one dict serves every launch."""
        if self._all_kwargs is None:  # nobody else has this config to change it, unlike those of the base
            self._all_kwargs = super().all_kwargs()
        return self._all_kwargs

    def with_values_of(self, base: LaunchConfig) -> LaunchConfig:
        """Return the config with all the base's meta-parameters, for wrappers of tuners that evaluate the grid."""
        if self._complete is None:
            self._complete = self
            if not self.kwargs.keys() >= base.kwargs.keys():
                self._complete = VariantConfig.of(self, self.function)
                self._complete.kwargs = {**base.kwargs, **self.kwargs}
        return self._complete

    def __hash__(self) -> int:
        return hash((self.function.name, super().__hash__()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, VariantConfig)
            and self.function.name == other.function.name
            and bool(super().__eq__(other))
        )


class AlternativeKernel:
    """Another kernel for the same call, which its user vouches for: it takes the very same arguments."""

    def __init__(self, name: str, kernel: KernelFunction) -> None:
        self.name = name
        self._configs: list[LaunchConfig] = list(getattr(kernel, "configs", ()))
        """Those of a tuner; none: the base's."""
        self.kernel: KernelFunction = getattr(kernel, "fn", kernel) if self._configs else kernel

    def run(self, *args: object, **kwargs: object) -> object:
        """Launch it. Raises `VariantError` for a call that it does not take."""
        try:
            return self.kernel.run(*args, **kwargs)
        except Exception as error:
            self.blame(error)
            raise

    def warmup(self, *args: object, **kwargs: object) -> object:
        """Compile it. Raises `VariantError` for a call that it does not take."""
        try:
            return warmup_of(self.kernel)(*args, **kwargs)
        except Exception as error:
            self.blame(error)
            raise

    def blame(self, error: Exception) -> None:
        """Raise for a call that is wrong: the caller's fault with a kernel of theirs, the variant's here."""
        if outcome_of(error) is None:
            raise VariantError(f"variant {self.name}: {type(error).__name__}: {error}") from error

    def covers(self, args: Arguments, kwargs: NamedArguments, form: CallForm | None = None) -> bool:
        """Whether the kernel may be launched for a call; `form` spares its computation."""
        return self.guard is None or self.guard(args, kwargs, form)

    constants: Collection[str] = ()
    """The base's constexpr parameters."""
    guard: CallGuard | None = None
    """The guard of the calls that the kernel is launched for; None: all calls."""
    depends_on_call = False
    """Whether its binary depends on more of the call than `call_kind`."""

    @property
    def source(self) -> str:
        """Its source text, for forecasts; empty where it cannot be found."""
        return source_of(self.kernel)

    def configs(self, base: Sequence[LaunchConfig]) -> list[VariantConfig]:
        """Its configs, given the base kernel's."""
        return list(dict.fromkeys(VariantConfig.of(config, self) for config in self._configs or base))

    def grid(self, grid: CallGrid, named: NamedArguments, config: LaunchConfig) -> Grid | None:
        """Return the launch grid for these arguments; None where it is unknown."""
        return known(grid, named, config.all_kwargs())

    def trace_inputs(self, args: Arguments, kwargs: NamedArguments, config: LaunchConfig) -> TraceInputs:
        """Return the inputs of a trace for its IR: kernel, arguments, keywords, meta-parameters."""
        keywords = {k: v for k, v in kwargs.items() if k not in ("grid", "warmup")}
        return self.kernel, args, keywords, dict(config.kwargs)


class LoadedVariant(AlternativeKernel):
    """An imported variant, launched as it asks for, on calls that a check covers."""

    def __init__(
        self, variant: Variant, entry: KernelEntry, base: KernelFunction, guard: CallGuard | None
    ) -> None:
        """`base` is the tuner's function; its heuristics serve parameters that the variant has as well."""
        self.variant, self.entry = variant, entry
        self._names = tuple(base.arg_names)
        self.constants = {*self._names}.difference(parameters_of(innermost(base))[0])
        self._takes = frozenset((*entry.parameters, *entry.meta))
        self._arguments = self._takes.union(self._names)
        layers = [
            {n: rule for n, rule in layer.items() if n in self._takes} for layer in heuristic_layers(base)
        ]
        self._layers = [layer for layer in layers if layer]
        self.guard = guard
        own = read_contract(variant.source, variant.kernel).configs
        self._configs = [_triton_config(c) for c in variant.configs or own]
        self.name, self.kernel = variant.name, entry.kernel
        self.depends_on_call = bool(entry.base or heuristic_layers(entry.kernel))
        self._needs_scratch = "make_tensor_descriptor" in variant.source

    @property
    def source(self) -> str:
        """The record's text: the whole module, with the helpers it calls."""
        return self.variant.source

    def configs(self, base: Sequence[LaunchConfig]) -> list[VariantConfig]:
        """Its own, or the base's without the meta-parameters that it has dropped."""
        hooks = {config.pre_hook for config in base}
        if not self._configs:
            return list(dict.fromkeys(VariantConfig.of(self._reduced(config), self) for config in base))
        own = [VariantConfig.of(config, self) for config in self._configs]
        if len(hooks) == 1:
            # The hook of the base's configs (which sets a descriptor's block, say) is needed here, too.
            for config in own:
                config.pre_hook = next(iter(hooks))
        return list(dict.fromkeys(own))

    def _reduced(self, config: LaunchConfig) -> LaunchConfig:
        result = Config.__new__(Config)
        result.__dict__.update(vars(config))
        result.kwargs = {n: v for n, v in config.kwargs.items() if n in self._takes}
        return result

    def grid(self, grid: CallGrid, named: NamedArguments, config: LaunchConfig) -> Grid | None:
        """Its own launch grid, or the call's."""
        try:
            values = self._with_heuristics({**named, **config.all_kwargs()})
            return self.entry.launch_grid(grid, values, self._meta(values), self._options(values))
        except Exception:
            return None  # it will fail again where it is launched, and be a failed candidate

    def trace_inputs(self, args: Arguments, kwargs: NamedArguments, config: LaunchConfig) -> TraceInputs:
        """Everything by name, as the positions are the base's. Raises what a launch would."""
        grid, bound = self._call_values(args, {**kwargs, **config.all_kwargs()})
        values = self.entry.arguments(grid, bound, self._meta(bound), {})
        meta = {n: values.pop(n) for n in (*self.entry.meta, *self.entry.base) if n in values}
        return self.kernel, (), values, meta

    def run(self, *args: object, **kwargs: object) -> object:
        """Launch as the variant's contract says. Raises `VariantError` for a call that it refuses."""
        if self._needs_scratch:
            _allow_scratch()
        try:
            grid, values = self._call_values(args, kwargs)
            return self.entry.run(grid, values, self._meta(values), self._options(values))
        except Exception as error:
            self.blame(error)
            raise

    @property
    def is_direct(self) -> bool:
        """Whether a launch of the compiled kernel needs nothing before it but its grid and its memory."""
        own = self.entry.is_direct and isinstance(self.kernel, JITFunction)
        return own and not self._layers and not self._needs_scratch

    def place(self, grid: CallGrid, values: dict[str, object]) -> tuple[Grid, dict[str, Any]]:
        """Its own launch grid and memory for all the values of a call."""
        values = {n: v for n, v in values.items() if n not in ("grid", "warmup")}
        return self.entry.place(grid, values, self._meta(values), self._options(values))

    def warmup(self, *args: object, **kwargs: object) -> object:
        """Compile as the variant asks for. Raises `VariantError` for what it refuses."""
        try:
            grid, values = self._call_values(args, kwargs)
            return self.entry.warmup(grid, values, self._meta(values), self._options(values))
        except Exception as error:
            self.blame(error)
            raise

    def _call_values(self, args: Arguments, kwargs: NamedArguments) -> tuple[Any, dict[str, object]]:
        values = {**dict(zip(self._names, args, strict=False)), **kwargs}
        grid = values.pop("grid", None)
        values.pop("warmup", None)
        return grid, self._with_heuristics(values)

    def _with_heuristics(self, values: dict[str, object]) -> dict[str, object]:
        for layer in self._layers:
            for name, rule in layer.items():
                values[name] = rule(values)
        return values

    def _options(self, values: NamedArguments) -> dict[str, object]:
        """Return the values that are neither arguments of the call nor parameters: `num_warps` and the like."""
        return {n: v for n, v in values.items() if n not in self._arguments}

    def _meta(self, values: NamedArguments) -> dict[str, object]:
        return {n: values[n] for n in self.entry.meta if n in values}


def _allow_scratch() -> None:
    """Let torch allocate scratch memory in this context, where the program has set no allocator of its own.

    The program's own kernels need none: their launches would fail without an allocator.
    """
    allocator = getattr(sys.modules.get("triton.runtime._allocation"), "_allocator", None)
    if type(getattr(allocator, "get", lambda: allocator)()).__name__ == "NullAllocator":
        empty = partial(sys.modules["torch"].empty, dtype=sys.modules["torch"].int8, device="cuda")
        sys.modules["triton"].set_allocator(lambda size, alignment, stream: empty(size))


def load_variant(
    variant: Variant, base: KernelFunction, guard: CallGuard | None, folder: Path | None = None
) -> LoadedVariant:
    """Import a variant that has been verified, and bind it to the tuner's function it may stand in for, in these calls.

    Its source is written below `folder` (None: a temporary one), where tracebacks and `inspect` find it; the record's
    text runs. Raises `VariantError` for a source that breaks the contract, has other runtime
    parameters than the base, or cannot be imported.
    """
    try:
        contract = read_contract(variant.source, variant.kernel)
        contract.require_same_parameters(parameters_of(innermost(base))[0])
        names = import_text(variant.source, folder)
        return LoadedVariant(variant, KernelEntry.of(names, variant.kernel), base, guard)
    except RecordError as error:
        raise VariantError(f"variant {variant.name} cannot be used: {error}") from error
    except Exception as error:
        raise VariantError(f"variant {variant.name} cannot be imported: {error!r}") from error


def import_text(source: str, folder: Path | None = None) -> dict[str, Any]:
    """Import a module's text under a name of its own; returns its names. Raises what its code raises."""
    digest = hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    path = _write_source(folder, digest, source)
    name = f"forecast_autotune_variant_{digest[:16]}_{next(_NUMBER)}"
    spec = importlib.util.spec_from_loader(name, _TextLoader(source, path), origin=str(path))
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


class _TextLoader(importlib.abc.InspectLoader):
    """Runs a text under the path of its file, which may have been replaced since."""

    def __init__(self, text: str, path: Path) -> None:
        self._text, self._path = text, path

    def get_source(self, fullname: str) -> str:
        return self._text

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self._text, str(self._path))


def _write_source(folder: Path | None, digest: str, source: str) -> Path:
    payload = source.encode("utf-8", "surrogatepass")
    for place in ([] if folder is None else [folder]) + [Path(_temporary_folder().name)]:
        path = place / f"{digest}.py"
        try:
            if not path.is_file() or path.read_bytes() != payload:
                write_atomically(path, payload)
            return path
        except OSError:
            continue  # a read-only store
    raise VariantError("a variant's source could not be written anywhere, not even to a temporary folder")


@cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="forecast-variants-")


class CompiledVariant:
    """The result of a variant's launch: its compiled kernel, which can be launched again by the base's arguments.

    Wrappers of tuners keep the result of a launch, and launch it from then on by the base's arguments and grid.
    """

    __slots__ = ("_config", "_constants", "_relaunch_config", "compiled", "tuner")
    _relaunch_config: VariantConfig | None
    compiled: Any

    def __init__(
        self, kernel: object, tuner: Tuner, config: VariantConfig, args: Arguments, kwargs: NamedArguments
    ) -> None:
        self.compiled, self.tuner, self._config, self._relaunch_config = kernel, tuner, config, None
        constants = config.function.constants
        self._constants = {n: kwargs[n] for n in constants if n in kwargs}
        if args:
            pairs = zip(tuner.arg_names, args, strict=False)
            self._constants |= {n: v for n, v in pairs if n in constants}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def __getitem__(self, grid: CallGrid) -> Callable[..., object]:
        return partial(self._launch, grid)

    def _launch(self, grid: CallGrid, *args: object) -> object:
        config, kwargs = self.call(grid, args)
        return launch_variant(self.tuner, config, (), kwargs)

    def call(self, grid: CallGrid, args: Arguments) -> tuple[VariantConfig, dict[str, object]]:
        """The config and the named arguments of a launch by the base's arguments and grid."""
        tuner, constants = self.tuner, self._config.function.constants
        # Triton 3.7 and later leave out constants.
        names = [n for n in tuner.arg_names if len(args) == len(tuner.arg_names) or n not in constants]
        config_names = {n for c in tuner.configs for n in c.kwargs}
        config_names |= {n for layer in heuristic_layers(tuner.fn) for n in layer}
        arguments = {**self._constants, **dict(zip(names, args, strict=True))}
        free = {n: v for n, v in arguments.items() if n not in config_names}
        if self._relaunch_config is None:
            # The grid follows from the variant's values: a base with the same parameters needs them, too.
            self._relaunch_config = VariantConfig.of(self._config, self._config.function)
            base = self._relaunch_config.fallback = copy(self._config.fallback or tuner.configs[0])
            base.kwargs = {n: self._config.kwargs.get(n, v) for n, v in base.kwargs.items()}
        return self._relaunch_config, {**free, "grid": grid, "warmup": False}


@dataclass(slots=True, eq=False)
class _DirectLaunch:
    """The launch of calls of one form: their compiled kernel is launched as Triton's own launch path would."""

    function: Any
    result: CompiledVariant
    rivals: OverlapPairs
    state: tuple[object, ...]
    names: Sequence[str]
    """Names of a call's values, and then of the config's."""
    more: Sequence[object]
    """The config's values, and then defaults: they follow those of a call."""
    pick: ArgumentPicker
    """Picks the kernel's arguments from all of these values, followed by the memory of a launch."""

    @classmethod
    def of(
        cls, result: CompiledVariant, config: VariantConfig, rivals: OverlapPairs, form: CallForm
    ) -> Self | None:
        """Return the launch of calls like one that returned `result`; None where it depends on more than the form.

        The interpreter compiles nothing, and AMD's compiler reads how much memory lies behind a tensor.
        """
        function: Any = config.function
        kernel, state, more = function.kernel, _launch_state(), [*config.all_kwargs().values()]
        if not function.is_direct or state is None or result.metadata.target.backend != "cuda":
            return None
        names = (*form[0].written, *config.all_kwargs())
        places = {name: i for i, name in enumerate(names)}  # a value of the config beats one of the call
        for parameter in kernel.params:
            if parameter.name not in places and parameter.name not in function.entry.memory:
                if not parameter.has_default:
                    return None
                places[parameter.name] = len(form[0].written) + len(more)
                more.append(parameter.default)
        places |= {name: len(form[0].written) + len(more) + i for i, name in enumerate(function.entry.memory)}
        pick = picker([places[p.name] for p in kernel.params])
        return cls(function, result, rivals, state, names, more, pick)

    def holds(self, config: VariantConfig, form: CallForm) -> bool:
        """Whether a call of the form would end in this launch: checks all that the form does not determine."""
        kernel = self.function.entry.kernel
        return (
            are_disjoint(form[3], self.rivals)
            and config.pre_hook is None
            and not kernel.pre_run_hooks
            and self.state == _launch_state()
            and all(names.get(n) is value for (n, _), (value, names) in kernel.used_global_vals.items())
        )

    def launch(self, grid: Any, values: Sequence[object]) -> object:
        """Launch with these values of a call."""
        values, function = (*values, *self.more), self.function
        entry = function.entry
        try:
            if entry.grid is not None or entry.memory:
                grid, memory = function.place(grid, dict(zip(self.names, values, strict=False)))
                values += tuple([memory[name] for name in entry.memory])
            arguments = self.pick(values)
            if callable(grid):
                grid = grid(dict(zip(function.kernel.arg_names, arguments, strict=True)))
            self.result.compiled[(*map(int, grid), 1, 1)[:3]](*arguments)
        except Exception as error:
            function.blame(error)
            raise
        return self.result


@cache
def _switches(run: Any) -> list[tuple[Any, str]] | None:
    """Return the settings that Triton's launch path reads at each launch; None where it is replaced by others."""
    run = getattr(run, "behind", run)
    if not is_of_triton(run):
        return None
    names = run.__code__.co_names
    groups = [g for n in names if isinstance(g := getattr(knobs, n, None), knobs.base_knobs)]
    return [(g, n) for g in groups for n in names if n in type(g).__annotations__]


def _launch_state() -> tuple[object, ...] | None:
    """Return all that the launch of a call depends on besides its form; None where that is unknown."""
    run, active = JITFunction.run, driver.active
    if (switches := _switches(run)) is None:
        return None
    return run, active, active.get_current_device(), *[getattr(group, name) for group, name in switches]


def launch_variant(
    tuner: Tuner,
    config: VariantConfig,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    form: CallForm | None = None,
) -> object:
    """Launch another source, or the base kernel for a call that it was not verified for.

    `form` spares its computation. From the second call of a form on, its compiled kernel is launched directly.
    """
    function, base = config.function, config.fallback or tuner.configs[0]
    if (guard := function.guard) is not None:
        form = form or guard.forms(args, kwargs)
        direct = config.launches.get(form[:2]) if form[0].is_plain else None
        if direct is not None and not kwargs.get("warmup") and direct.holds(config, form):
            tuner.best_config = config.with_values_of(base)
            return direct.launch(kwargs.get("grid"), form[4])
    if not function.covers(args, kwargs, form):
        tuner.best_config = base
        return launch_base(tuner, config, args, kwargs)
    tuner.best_config = config.with_values_of(base)
    kernel = function.run(*args, **_launch_arguments(tuner, config, args, kwargs))
    if not isinstance(function, LoadedVariant) or kernel is None:
        return kernel
    result = CompiledVariant(kernel, tuner, config, args, kwargs)
    if form is not None and guard is not None and form[0].is_plain:
        rivals = guard.rivals(args, kwargs, form)
        if rivals is not None and (direct := _DirectLaunch.of(result, config, rivals, form)) is not None:
            if len(config.launches) >= _MOST_LAUNCHES:
                config.launches.clear()
            config.launches[form[:2]] = direct
    return result


def launch_base(
    tuner: Tuner, config: VariantConfig, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Launch the base kernel where a variant was chosen."""
    return tuner.fn.run(*args, **_launch_arguments(tuner, config.fallback or tuner.configs[0], args, kwargs))


def _launch_arguments(
    tuner: Tuner, config: LaunchConfig, args: tuple[object, ...], kwargs: dict[str, object]
) -> dict[str, object]:
    """Run a config's hook; returns the named arguments of a launch under the config."""
    keywords = {**kwargs, **config.all_kwargs()}
    if config.pre_hook is not None:
        config.pre_hook({**dict(zip(tuner.arg_names, args, strict=False)), **keywords})
    return keywords


def add_variants(
    configs: dict[Candidate, LaunchConfig], functions: Mapping[str, AlternativeKernel]
) -> dict[Candidate, LaunchConfig]:
    """The base's candidates with those of the other functions after them, each with configs of its own."""
    base = [config for candidate, config in configs.items() if candidate.variant == "base"]
    return configs | {
        Candidate(to_config(config), name): config
        for name, function in functions.items()
        for config in function.configs(base)
    }


def _triton_config(record: Record) -> LaunchConfig:
    options: dict[str, Any] = {"maxnreg": record.maxnreg} if record.maxnreg is not None else {}
    if record.override_path is not None:
        options["ir_override"] = record.override_path
    return Config(
        dict(record.kwargs),
        num_warps=record.num_warps,
        num_stages=record.num_stages,
        num_ctas=record.num_ctas,
        **options,
    )


def launch_config(
    call: KernelCall, candidate: Candidate, rows: Callable[[], Sequence[Measurement]]
) -> LaunchConfig:
    """The candidate's config; a variant's comes with the base's fastest of `rows()`, for calls it does not cover."""
    config = call.configs[candidate]
    if isinstance(config, VariantConfig):
        config = VariantConfig.of(config, config.function)
        config.fallback = _fastest_of_base(call, rows())
    return config


def _fastest_of_base(call: KernelCall, rows: Sequence[Measurement]) -> LaunchConfig | None:
    """The base's fastest config as far as measured; None where none was."""
    base_rows = [m for m in rows if m.ok and m.candidate.is_base_variant and m.candidate in call.configs]
    return call.configs[min(base_rows, key=lambda m: m.ms).candidate] if base_rows else None
