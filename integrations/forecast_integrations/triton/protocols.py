"""Protocols of Triton's objects: tuners, kernels and configs, whichever release or library they are of.

Values of a kernel's arguments are whatever its caller passes: `object` where they are handed on, and one of the
protocols below where something is read of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard

from forecast_autotune.variants.entry import CallGrid, Grid

Arguments: TypeAlias = Sequence[object]
"""Positional arguments of a kernel call."""
NamedArguments: TypeAlias = Mapping[str, object]
"""Arguments of a kernel call by name."""
Key: TypeAlias = tuple[Any, ...]
"""The part of a call that a tuner's decision depends on, as `triton.autotune` has it."""
Times: TypeAlias = Any
"""The result of a benchmark function: milliseconds, or their quantiles (median, 20 %, 80 %)."""
Hook: TypeAlias = Callable[..., object]
"""A `pre_hook` or `post_hook` of a user's."""


class LaunchConfig(Protocol):
    """A `triton.Config`: hashable, and equal to another one of the same values."""

    kwargs: dict[str, Any]
    """Meta-parameters by name."""
    num_warps: int
    num_stages: int
    num_ctas: int
    maxnreg: int | None
    ir_override: str | None
    pre_hook: Hook | None

    def all_kwargs(self) -> dict[str, Any]:
        """Meta-parameters and launch options, as a launch takes them."""
        ...


class ConfigLauncher(Protocol):
    """A compiled config, as Inductor times it; `n_regs`, `n_spills` and `shared` where they are known."""

    config: LaunchConfig


class KernelFunction(Protocol):
    """A `JITFunction`, the interpreter's twin of one, or `Heuristics` over either."""

    arg_names: Sequence[str]

    def run(self, *args: object, **kwargs: object) -> object:
        """Launch, after a compilation if it is needed; `grid` and `warmup` are among the keywords."""
        ...

    def warmup(self, *args: object, **kwargs: object) -> object:
        """Compile without a launch; returns Triton's compiled kernel."""
        ...


class JitFunction(KernelFunction, Protocol):
    """The result of `triton.jit`, compiled or interpreted: the innermost of a tuner's functions."""

    fn: Callable[..., object]
    """The Python function."""


TraceInputs: TypeAlias = tuple[KernelFunction, Arguments, NamedArguments, dict[str, Any]]
"""All that determines a kernel's IR: the kernel, arguments by position and by name, meta-parameters."""


class VariantKernel(Protocol):
    """Another kernel that may serve a call, as whoever compiles, traces and launches it takes it."""

    depends_on_call: bool
    """Whether what it compiles to depends on more of the call than the kind of its arguments."""

    @property
    def source(self) -> str:
        """Its source text; empty where it cannot be found."""
        ...

    @property
    def run(self) -> Callable[..., object]:
        """As `KernelFunction.run`, for arguments of the base kernel."""
        ...

    @property
    def warmup(self) -> Callable[..., object]:
        """As `KernelFunction.warmup`, for arguments of the base kernel."""
        ...

    def grid(self, grid: CallGrid, named: NamedArguments, config: LaunchConfig) -> Grid | None:
        """Its launch grid; None where it cannot be told."""
        ...

    def trace_inputs(self, args: Arguments, kwargs: NamedArguments, config: LaunchConfig) -> TraceInputs:
        """Return the inputs of a trace for its IR under a config."""
        ...


class Tuner(Protocol):
    """A `triton.runtime.autotuner.Autotuner`, ours and those of libraries included."""

    fn: KernelFunction
    base_fn: Callable[..., object]
    """The user's Python function, under all decorators."""
    arg_names: Sequence[str]
    keys: Sequence[str]
    configs: Sequence[LaunchConfig]
    configs_top_k: object
    """Number of configs that `perf_model` leaves, or their fraction."""
    cache: MutableMapping[Key, LaunchConfig]
    """Decisions by key."""
    best_config: LaunchConfig
    configs_timings: dict[LaunchConfig, Times]
    bench_time: float
    nargs: dict[str, object] | None
    """The positional arguments by name, while a decision runs."""
    reset_to_zero: Sequence[str]
    restore_value: Sequence[str]
    pre_hook: Hook
    post_hook: Hook
    user_defined_pre_hook: bool
    user_defined_post_hook: bool
    do_bench: Callable[..., Times]

    def prune_configs(self, kwargs: dict[str, object]) -> Sequence[LaunchConfig]:
        """The configs that the user's own `prune_configs_by` leaves for a call; it reads `nargs`."""
        ...

    def _bench(self, *args: object, config: LaunchConfig, **meta: object) -> Times:
        """Time one config as this tuner does it: milliseconds, or their quantiles."""
        ...


class Tensor(Protocol):
    """As much of `torch.Tensor` as problems and checks read."""

    dtype: object
    shape: Sequence[int]

    def stride(self) -> Sequence[int]:
        """Elements between neighbours, per dimension."""
        ...

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def element_size(self) -> int:
        """Bytes of one element."""
        ...


class TensorDescriptor(Protocol):
    """A host-side TMA descriptor: a tensor, and the block that one access moves."""

    base: Tensor
    block_shape: Sequence[int]


def is_tensor(value: object) -> TypeGuard[Tensor]:
    """Whether a kernel's argument is a tensor."""
    return hasattr(value, "data_ptr") and hasattr(value, "stride") and hasattr(value, "shape")


def is_descriptor(value: object) -> TypeGuard[TensorDescriptor]:
    """Whether a kernel's argument is a host-side TMA descriptor."""
    return hasattr(value, "block_shape") and is_tensor(getattr(value, "base", None))
