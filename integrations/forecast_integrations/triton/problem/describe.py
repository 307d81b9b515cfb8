"""A live kernel call -> `Problem`, candidates and launch grids."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forecast_autotune.errors import SettingsError
from forecast_autotune.records import (
    HOOK_VARIANT_PREFIX,
    LAUNCH_OPTIONS,
    OVERRIDE_DIGEST,
    Argument,
    Candidate,
    Config,
    Kernel,
    Problem,
    Scalar,
    digest,
    to_scalar,
)
from forecast_autotune.records.problem import ADDRESS, OPTIONS
from forecast_autotune.variants.constants import exact_constant
from forecast_autotune.variants.entry import CallGrid, flat_arguments, heuristic_layers, signature
from forecast_integrations.device import current_device, device_index, toolchain
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.source import (
    KernelText,
    function_name,
    innermost,
    is_jit,
    source_of,
)
from forecast_integrations.triton.protocols import (
    KernelFunction,
    LaunchConfig,
    NamedArguments,
    TensorDescriptor,
    Tuner,
    is_descriptor,
    is_tensor,
)

Options = Mapping[str, object]
"""Plain values by name, in order of their names; any other value is a pair of its type and text."""
OWN_BENCHMARK = "do_bench"
"""Option of a call that a user's benchmark function times: such times are not comparable to ours."""
L2 = "l2"
"""Option of a call that is timed with its data in the L2: `warm`."""
HEURISTICS = "heuristics"
"""Option of a call with heuristics: a digest of their values."""
_MOST_CONFIGS = 64
"""Configs whose heuristic values are part of a problem's identity."""


def call_options(parameters: Sequence[str], named: NamedArguments) -> dict[str, object]:
    """Return the options of a call: its keywords that are none of the kernel's `parameters`.

    Tensors are left out: they are for a wrapper of the user's.
    """
    own_names = {*parameters, "grid", "warmup"}
    return {
        name: _option_value(value)
        for name, value in sorted(named.items())
        if name not in own_names and not is_tensor(value) and not is_descriptor(value)
    }


def _option_value(value: object) -> Scalar | tuple[str, str]:
    plain = value is None or isinstance(value, bool | int | float | str)
    return to_scalar(value) if plain else (type(value).__name__, value_text(value))


def value_text(value: object) -> str:
    """The text of a value in records: without the contents of tensors and arrays, without addresses.

    Tensors are described by type, shape and strides, containers by their members, and anything whose text is an
    address, another one in every process, by its type.
    """
    value = getattr(value, "value", None) if type(value).__name__ == "constexpr" else value
    if is_jit(value):
        return function_name(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        strides = is_tensor(value) and tuple(value.stride())
        return f"{type(value).__name__}[{value.dtype}, {tuple(value.shape)}, {strides}]"
    if is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}{[value_text(getattr(value, f.name, None)) for f in fields(value)]}"
    if isinstance(value, Mapping):
        return str({value_text(key): value_text(member) for key, member in value.items()})
    if isinstance(value, set | frozenset):
        return str(sorted(map(value_text, value)))  # which is in another order in every process
    if isinstance(value, tuple | list):
        plain = all(member is None or isinstance(member, bool | int | float | str) for member in value)
        return str(value) if plain else str(tuple(map(value_text, value)))
    return type(value).__qualname__ if " at 0x" in (text := str(value)) else text


def key_texts(key: Sequence[object]) -> list[str]:
    """A key as records hold it."""
    return [part if isinstance(part, str) else value_text(part) for part in key]


def options_of(problem: Problem) -> Options:
    """Return the options of a recorded call."""
    options = problem.extra.get(OPTIONS)
    return options if isinstance(options, Mapping) else {}


def options_identity(options: Options) -> list[object]:
    """Return the options' part in a problem's identity: nothing for a call without any."""
    return [[OPTIONS, sorted(options.items())]] if options else []


DESCRIPTOR = "descriptor"
"""Key of `Argument.extra` for a host-side TMA descriptor of the tensor: its `block`, `shape` and `strides`."""

FUNCTION = "function"
"""`Argument.dtype` of a JIT function, which is a constant to the compiler wherever it is passed."""

_LAUNCH_OPTIONS = frozenset((*LAUNCH_OPTIONS, "ir_override"))


def to_config(config: LaunchConfig) -> Config:
    """Our twin of a `triton.Config`."""
    return _to_config_shared(config, {})


def _to_config_shared(config: LaunchConfig, shared: dict[Hashable, Config]) -> Config:
    """Return the twin of a config; twins of one assignment share their pairs, by `shared`.

    Thousands of new containers at a time set off full garbage collections, which take a third of a
    second in a process that has loaded torch.
    """
    meta, keywords = config.kwargs, config.all_kwargs()
    options = {name: getattr(config, name, None) for name in _LAUNCH_OPTIONS}
    explicit = {name: value for name, value in options.items() if value is not None}
    # An option that a config leaves open has Triton's default, or what the call gives.
    if keywords != {**meta, **explicit} or None in (config.num_warps, config.num_stages, config.num_ctas):
        return _to_own_config(keywords)
    key = (*meta.items(), *map(type, meta.values()))  # 1 and True are equal, and different assignments
    try:
        twin = shared.get(key)
    except TypeError:  # a value that cannot be hashed: it becomes a text
        twin, key = None, ()
    if twin is None:
        twin = Config.of({name: _constant(value) for name, value in meta.items()})
        if key:
            shared[key] = twin
    return Config(
        twin.kwargs,
        config.num_warps,
        config.num_stages,
        config.num_ctas,
        getattr(config, "maxnreg", None),
        _override(getattr(config, "ir_override", None)),
    )


def _to_own_config(keywords: NamedArguments) -> Config:
    """Return the twin of a config of a user's class, which launches with `keywords` in place of its attributes."""
    options: dict[str, Any] = {name: keywords[name] for name in _LAUNCH_OPTIONS & keywords.keys()}
    options["ir_override"] = _override(options.get("ir_override"))
    meta = {name: _constant(value) for name, value in keywords.items() if name not in _LAUNCH_OPTIONS}
    return Config.of(meta, **options)


def _override(path: str | None) -> str | None:
    """Return a file of IR by its path and a digest of its text; by its path where it cannot be read."""
    if path is None:
        return None
    try:
        return f"{path}{OVERRIDE_DIGEST}{hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]}"
    except OSError:
        return path


def _constant(value: object) -> Scalar:
    """A compile-time constant as a record holds it; JIT functions by name and source."""
    inner = getattr(value, "value", value)
    plain = inner is None or isinstance(inner, bool | int | float | str)
    return to_scalar(inner) if plain else value_text(inner)


def pruned_configs(tuner: Tuner, kwargs: dict[str, object]) -> Sequence[LaunchConfig]:
    """Return the configs that the user's own pruning leaves. Raises `SettingsError` where there are none."""
    configs = list(tuner.prune_configs(kwargs))
    if not configs:
        raise SettingsError(
            f"prune_configs_by has to leave a config, and left none of {len(tuner.configs)} with "
            f"top_k={tuner.configs_top_k!r}: let top_k be 1 at least, and early_config_prune keep one"
        )
    return configs


def configs_by_candidate(configs: Sequence[LaunchConfig]) -> dict[Candidate, LaunchConfig]:
    """Candidate -> `triton.Config`, without duplicates, in order.

    Configs that differ only in their `pre_hook` are different to Triton; they get variants of their own.
    """
    by_candidate: dict[Candidate, LaunchConfig] = {}
    shared: dict[Hashable, Config] = {}
    for config in configs:
        twin = _to_config_shared(config, shared)
        candidate, number = Candidate(twin), 1
        while candidate in by_candidate and by_candidate[candidate].pre_hook is not config.pre_hook:
            number += 1
            candidate = Candidate(twin, f"{HOOK_VARIANT_PREFIX}{number}")
        by_candidate.setdefault(candidate, config)
    return by_candidate


def call_arguments(fn: KernelFunction, named: NamedArguments) -> list[Argument]:
    """The call's arguments in the kernel's order; those that the config supplies are left out."""
    constexprs = signature(innermost(fn))[1]
    values = {name: named[name] for name in fn.arg_names if name in named}
    return [describe_argument(n, value, n in constexprs) for n, value in flat_arguments(values, constexprs)]


def describe_argument(name: str, value: object, constexpr: bool = False) -> Argument:
    """One argument, which is no tuple with members."""
    if constexpr or type(value).__name__ == "constexpr":
        constant = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
        plain = constant is None or isinstance(constant, bool | int | float | str)
        kind = FUNCTION if is_jit(constant) else "" if plain else type(constant).__name__
        return Argument(name, "constexpr", kind, value=_constant(constant), extra=exact_constant(constant))
    if value is None:
        return Argument(name, "none")
    if is_tensor(value):
        return Argument(
            name,
            "tensor",
            dtype=str(value.dtype).removeprefix("torch."),
            shape=tuple(int(n) for n in value.shape),
            stride=tuple(int(n) for n in value.stride()),
            aligned=value.data_ptr() % 16 == 0,
        )
    if is_descriptor(value):
        inner = describe_argument(name, value.base)
        return replace(inner, extra={DESCRIPTOR: _descriptor_record(value)})
    if isinstance(value, bool):
        return Argument(name, "scalar", dtype="i1", value=value)
    if isinstance(value, int):
        return Argument(name, "scalar", dtype="i32" if -(2**31) <= value < 2**31 else "i64", value=value)
    if isinstance(value, float):
        return Argument(name, "scalar", dtype="fp32", value=to_scalar(value))
    if is_jit(value):
        return Argument(name, "constexpr", FUNCTION, value=_constant(value))
    if isinstance(value, numbers.Number | str) or type(value).__name__ == "dtype":
        return Argument(name, "scalar", dtype=type(value).__name__, value=to_scalar(value))
    if isinstance(value, tuple | list):
        return Argument(name, "tuple")
    return Argument(
        name, "object", dtype=f"{type(value).__qualname__}:{getattr(value, 'dtype', '')}".strip(":")
    )


def with_address(argument: Argument, value: object) -> Argument:
    """Return the argument with its tensor's address within a line of the cache, if a multiple of 16 bytes."""
    at = value.data_ptr() % line_bytes(value) if is_tensor(value) else 0
    return replace(argument, extra={**argument.extra, ADDRESS: at & -at}) if at and at % 16 == 0 else argument


def line_bytes(tensor: object) -> int:
    """Bytes of a cache's line where a tensor lies."""
    return 64 if getattr(tensor, "is_cpu", False) else 128


def _descriptor_record(value: TensorDescriptor) -> dict[str, object] | bool:
    """Return a descriptor's block, shape and strides, as far as they are numbers."""
    description: dict[str, object] = {}
    for name, sizes in (
        ("block", value.block_shape),
        ("shape", getattr(value, "shape", None)),
        ("strides", getattr(value, "strides", None)),
    ):
        if isinstance(sizes, Sequence) and all(isinstance(n, int) for n in sizes):
            description[name] = [int(n) for n in sizes]
    return description or True


def problem_identity(
    arguments: Sequence[Argument], key: Sequence[object], options: Options = MappingProxyType({})
) -> list[object]:
    """Return a problem's identity: the key and launch options exactly, and of the rest what code and speed depend on.

    A scalar that is not in the key counts by its specialisation (1, multiple of 16, other): a seed
    must not make every process tune anew. A tensor's shape counts in powers of two, and so does the address of a dot's
    operand that begins within a line.
    """
    parts: list[object] = [digest(key_texts(key))]
    for a in arguments:
        if a.kind == "tensor":
            shape = [int(n - 1).bit_length() if n > 0 else -1 for n in a.shape]
            at = [a.extra[ADDRESS]] if ADDRESS in a.extra else []
            parts.append([a.name, a.dtype, shape, [s == 1 for s in a.stride], a.aligned, *at])
        elif a.kind == "constexpr":
            parts.append([a.name, a.value])
        elif isinstance(a.value, int) and not isinstance(a.value, bool):
            parts.append([a.name, a.dtype, _specialisation(a.value)])
        else:
            parts.append([a.name, a.kind, a.dtype])
    return parts + options_identity(options)


def _specialisation(value: int) -> str:
    """Return Triton's specialisation of an integer argument: 1, a multiple of 16, or any other."""
    return "1" if value == 1 else "16" if value % 16 == 0 else "n"


def call_kind(problem: Problem, fn: KernelFunction) -> str:
    """Digest of what the generated code depends on: calls of one kind share binaries and TTIR.

    Heuristics may turn any argument into a constexpr, so with them every value counts.
    """
    exact = heuristic_layers(fn) != []
    parts: list[object] = [problem.device.slug, device_index(), *options_identity(options_of(problem))]
    for a in problem.arguments:
        if exact:
            parts.append(replace(a, extra=_kind_of_extra(a)).to_json())
        elif a.kind == "tensor":
            parts.append([a.name, a.dtype, a.aligned, _kind_of_extra(a)])
        elif isinstance(a.value, int) and not isinstance(a.value, bool) and a.kind == "scalar":
            parts.append([a.name, a.dtype, _specialisation(a.value)])
        else:
            parts.append([a.name, a.kind, a.dtype, a.value if a.kind == "constexpr" else None])
    return digest(parts)


def _kind_of_extra(argument: Argument) -> dict[str, object]:
    """Return whether an argument is a descriptor; without its block, which is the last one that a hook has set."""
    return {DESCRIPTOR: True} if argument.extra.get(DESCRIPTOR) else {}


def call_form(fn: KernelFunction, args: Sequence[object], kwargs: NamedArguments) -> Hashable:
    """Return the part of a call that determines its code and its time, as far as arguments do.

    Sizes and strides count exactly, and so does what the compiler sees: with heuristics, every value. Calls of
    different forms are not to be compared by their times.
    """
    exact = heuristic_layers(fn) != []
    named = {**dict(zip(fn.arg_names, args, strict=False)), **kwargs}
    arguments = [
        (a.name, a.kind, a.dtype, _compiler_value(a, exact), a.shape, a.stride, a.aligned)
        for a in call_arguments(fn, named)
    ]
    return (*arguments, *call_options(fn.arg_names, named).items())


def _compiler_value(argument: Argument, exact: bool) -> Hashable:
    value = argument.value
    if exact or argument.kind == "constexpr":
        return value
    return _specialisation(value) if type(value) is int else None


def launch_grid(grid: CallGrid, named: NamedArguments, parameters: NamedArguments) -> tuple[int, ...] | None:
    """The launch grid under these parameters, 0 for what is below; None when the grid function cannot say."""
    if not callable(grid):
        return tuple(max(0, int(n)) for n in grid) if isinstance(grid, Sequence) else None
    try:
        return tuple(max(0, int(n)) for n in grid({**named, **parameters}))
    except Exception:
        # A user's grid function may need what only the launcher binds (heuristics, defaults); a
        # forecast without a grid is still a forecast.
        return None


def kernel_record(fn: KernelFunction, text: KernelText | None = None) -> Kernel:
    """Return the name, source and dependency-aware hash of a kernel; `text` spares a walk over its sources."""
    jit = innermost(fn)
    python = getattr(jit, "fn", jit)
    name = str(getattr(jit, "__name__", None) or getattr(python, "__name__", "kernel"))
    module = getattr(python, "__module__", "") or ""
    place = {"module": module, "qualname": str(getattr(python, "__qualname__", name))}
    return Kernel(name, "triton", source_of(fn), (text or KernelText(fn)).hash, place)


def describe(
    fn: KernelFunction,
    kernel: Kernel,
    named: NamedArguments,
    key: Sequence[object],
    grid: CallGrid,
    own_benchmark: bool = False,
    configs: Sequence[LaunchConfig] = (),
    dots: Callable[[Sequence[Argument]], Collection[str]] = lambda _: (),
    warm: bool = False,
) -> Problem:
    """The problem of one call. `named` holds positional and keyword arguments by name.

    `dots` names the arguments that feed a dot: the addresses of those alone count beyond 16 bytes.

    A call that a user's `own_benchmark` times is another problem, as it may invent its times; so is one that is timed
    in a `warm` L2, and one whose heuristics have other values under these `configs`.
    """
    arguments, options = call_arguments(fn, named), call_options(fn.arg_names, named)
    if own_benchmark:
        options[OWN_BENCHMARK] = True
    elif warm:
        options[L2] = "warm"
    if values := _heuristic_values_of(fn, named, configs):
        options[HEURISTICS] = digest(values)
    addressed = [with_address(a, named.get(a.name)) for a in arguments]
    if any(ADDRESS in a.extra for a in addressed):
        operands = dots(arguments)
        arguments = [at if a.name in operands else a for a, at in zip(arguments, addressed, strict=True)]
    key = key_texts(key)
    fixed_grid = None if callable(grid) else launch_grid(grid, named, {})
    return Problem.of(
        kernel,
        arguments,
        current_device(),
        key=key,
        grid=fixed_grid,
        toolchain=toolchain(),
        identity=problem_identity(arguments, key, options),
        extra={OPTIONS: dict(options)} if options else None,
    )


def resized_problem(
    problem: Problem, arguments: Sequence[Argument], key: Sequence[str], grid: Sequence[int] | None
) -> Problem:
    """The problem of the same call with other arguments, from its record."""
    options = options_of(problem)
    return Problem.of(
        problem.kernel,
        arguments,
        problem.device,
        key=key,
        grid=grid,
        toolchain=dict(problem.toolchain),
        identity=problem_identity(arguments, key, options),
        extra={OPTIONS: dict(options)} if options else None,
    )


def launch_grids(
    configs: Mapping[Candidate, LaunchConfig],
    grid: CallGrid,
    named: NamedArguments,
    fn: KernelFunction,
) -> dict[Candidate, tuple[int, ...]]:
    """Return the grid per candidate, where it is known; empty when it does not depend on the config.

    Triton passes a grid function the kernel's own parameters, so it is called once per assignment of the
    meta-parameters; per candidate where launch options are parameters, or heuristics read them.
    """
    if not callable(grid):
        return {}
    heuristics = heuristic_values(fn)
    alone = bool(heuristic_layers(fn)) or not _LAUNCH_OPTIONS.isdisjoint(getattr(fn, "arg_names", ()))
    extents: dict[Hashable, tuple[int, ...] | None] = {}
    grids: dict[Candidate, tuple[int, ...]] = {}
    for candidate, config in configs.items():
        key = candidate if alone else candidate.config.kwargs
        if key not in extents:
            extents[key] = launch_grid(grid, named, heuristics({**named, **config.all_kwargs()}))
        if (extent := extents[key]) is not None:
            grids[candidate] = extent
    return grids


def heuristic_values(fn: object) -> Callable[[dict[str, object]], dict[str, object]]:
    """Return a function that adds the values of the `@heuristics` under a tuner to a dict of arguments."""
    layers = heuristic_layers(fn)

    def compute_all(arguments: dict[str, object]) -> dict[str, object]:
        values = dict(arguments)
        try:
            for name, compute in (pair for layer in layers for pair in layer.items()):
                values[name] = compute(values)
        except Exception:
            # Heuristics are the user's code; what fails here fails again, visibly, at the launch.
            return arguments
        return values

    return compute_all if layers else lambda arguments: arguments


def _heuristic_values_of(
    fn: object, named: NamedArguments, configs: Sequence[LaunchConfig]
) -> list[tuple[str, list[str]]]:
    """The values that each heuristic has for a call, under any of the first configs; none for one that raises.

    The values count as a set, so that one more config in a list seldom makes another problem.
    """
    results: dict[str, set[str]] = {}
    layers = heuristic_layers(fn)
    for config in configs[:_MOST_CONFIGS] if layers else ():
        arguments = {**named, **config.all_kwargs()}
        for name, compute in (pair for layer in layers for pair in layer.items()):
            with suppress(Exception):  # the launch says why
                arguments[name] = compute(arguments)
                results.setdefault(name, set()).add(value_text(arguments[name]))
    return sorted((name, sorted(values)) for name, values in results.items())


class LazyGrids(Mapping[Candidate, tuple[int, ...]]):
    """Grids per candidate, computed when first asked for: a stored decision needs none."""

    def __init__(self, compute: Callable[[], dict[Candidate, tuple[int, ...]]]) -> None:
        self._compute = compute
        self._grids: dict[Candidate, tuple[int, ...]] | None = None

    def _all(self) -> dict[Candidate, tuple[int, ...]]:
        if self._grids is None:
            self._grids = self._compute()
            self.close()
        return self._grids

    def close(self) -> None:
        """Release the call: grids that were not read before stay unknown."""
        self._compute = dict

    def __getitem__(self, candidate: Candidate) -> tuple[int, ...]:
        return self._all()[candidate]

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def candidate_grids(
    call: KernelCall, grid: CallGrid, named: NamedArguments
) -> dict[Candidate, tuple[int, ...]]:
    """Launch grids of all candidates, as far as they depend on the config or are a variant's own."""
    own = {c: config for c, config in call.configs.items() if c.variant not in call.functions}
    grids = launch_grids(own, grid, named, call.tuner.fn)
    for candidate, config in call.configs.items():
        if candidate.variant in call.functions:
            extent = call.functions[candidate.variant].grid(grid, named, config)
            if extent is not None:
                grids[candidate] = extent
    return grids
