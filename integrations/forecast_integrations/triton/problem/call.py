"""One call of a tuned kernel, frozen: what to compile, launch, and surround with hooks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

from forecast_autotune.errors import code_of, codes_in_traceback, function_of_caller
from forecast_autotune.records import Candidate, Outcome
from forecast_autotune.variants.entry import CallGrid
from forecast_integrations.device import current_device
from forecast_integrations.triton.problem.compilations import trial
from forecast_integrations.triton.protocols import (
    KernelFunction,
    LaunchConfig,
    NamedArguments,
    Tuner,
    VariantKernel,
    is_descriptor,
)

_DESCRIPTORS = threading.Lock()
"""Descriptors are shared by all candidates of a call: threads compile those one at a time."""


@dataclass(frozen=True)
class KernelCall:
    """The arguments of one call, and the tuner, whose hooks surround every launch."""

    tuner: Tuner
    args: tuple[object, ...]
    kwargs: dict[str, object]
    """As Triton passes them: `grid` and `warmup` among them."""
    configs: Mapping[Candidate, LaunchConfig] = field(default_factory=dict)
    functions: Mapping[str, VariantKernel] = field(default_factory=dict)
    """By variant name, for variants other than the user's own source."""

    @property
    def grid(self) -> CallGrid:
        """The launch grid as it was given: numbers, or a function of the parameters by name."""
        return cast("CallGrid", self.kwargs.get("grid"))

    def function(self, candidate: Candidate) -> KernelFunction | VariantKernel:
        """The kernel that runs a candidate."""
        return self.functions.get(candidate.variant, self.tuner.fn)

    @cached_property
    def computed(self) -> Mapping[Candidate, Mapping[str, object]]:
        """The values of the tuner's `@heuristics` by candidate; absent where they fail, or are not Triton's own.

        The first access computes all, and has to be in the process and thread of the call: a heuristic may need the
        device, its thread's state or an open file, which no child and no other thread has.
        """
        layers, _ = own_heuristics(self.tuner.fn)
        values: dict[Candidate, Mapping[str, object]] = {}
        for candidate in self.configs if layers else ():
            if candidate.variant in self.functions or self.has_set_descriptors(candidate):
                continue
            keywords, results = self.launch_keywords(candidate), dict[str, object]()
            with contextlib.suppress(Exception):  # it fails again where the candidate is launched
                for layer in layers:
                    for name, rule in layer.values.items():
                        arguments = {**dict(zip(layer.arg_names, self.args, strict=False)), **keywords}
                        results[name] = keywords[name] = rule(arguments)
                values[candidate] = results
        return values

    def under_heuristics(self, candidate: Candidate) -> tuple[KernelFunction | VariantKernel, NamedArguments]:
        """The kernel that runs a candidate, without heuristics whose values are `computed`, and these values."""
        if (values := self.computed.get(candidate)) is None:
            return self.function(candidate), {}
        return own_heuristics(self.tuner.fn)[1], values

    def named_arguments(self) -> dict[str, object]:
        """Every argument of the call by name, `grid` and `warmup` included."""
        return {**dict(zip(self.tuner.arg_names, self.args, strict=False)), **self.kwargs}

    def arguments(self) -> dict[str, object]:
        """The kernel's arguments by name."""
        arguments = self.named_arguments()
        arguments.pop("grid", None)
        arguments.pop("warmup", None)
        return arguments

    def fits_l2(self) -> bool:
        """Whether the L2 of this device holds all tensors of the call."""
        tensors: list[Any] = [v.base if is_descriptor(v) else v for v in self.arguments().values()]
        total = sum(v.numel() * v.element_size() for v in tensors if hasattr(v, "element_size"))
        return bool(total <= current_device().l2_bytes)

    def depends_on_call(self, candidate: Candidate) -> bool:
        """Whether a candidate's binary depends on more of this call than the kind of its arguments."""
        return candidate.variant in self.functions and bool(self.functions[candidate.variant].depends_on_call)

    def launch_keywords(self, candidate: Candidate) -> dict[str, object]:
        """Keyword arguments of a launch of this candidate."""
        return {**self.kwargs, **self.configs[candidate].all_kwargs()}

    def compile(self, candidate: Candidate) -> object:
        """Compile without launching; returns Triton's CompiledKernel."""
        function, computed = self.under_heuristics(candidate)
        keywords = {**self.launch_keywords(candidate), **computed}
        keywords.pop("warmup", None)
        compiler = warmup_of(function)
        with trial(), _DESCRIPTORS if self.has_set_descriptors(candidate) else contextlib.nullcontext():
            self.set_descriptors(candidate)
            return compiler(*self.args, **keywords)

    def compiles_alone(self, candidate: Candidate) -> bool:
        """Whether Triton's own code alone compiles a candidate: a user's `run` may launch where it is to compile."""
        from triton.runtime.jit import JITFunction

        kernel = own_heuristics(self.tuner.fn)[1]
        is_triton_run = getattr(type(kernel), "run", None) is JITFunction.run and "run" not in vars(kernel)
        is_triton_run = is_triton_run and not getattr(kernel, "pre_run_hooks", ())
        return is_triton_run or candidate.variant in self.functions

    def has_set_descriptors(self, candidate: Candidate) -> bool:
        """Whether host-side descriptors may have other blocks under this candidate than the caller gave them."""
        has_hook = self.configs[candidate].pre_hook is not None
        return has_hook and any(map(is_descriptor, self.arguments().values()))

    def set_descriptors(self, candidate: Candidate) -> None:
        """Let a config's `pre_hook` set the blocks of host-side descriptors, as it does before a launch.

        The kernel's binary and IR are for these blocks alone. Without a descriptor no hook runs: it may touch the
        device, which a compiling process or thread must not. Never raises: a hook that fails here fails again before
        the launch.
        """
        hook = self.configs[candidate].pre_hook
        if hook is not None and self.has_set_descriptors(candidate):
            with contextlib.suppress(Exception):
                hook({**self.named_arguments(), **self.launch_keywords(candidate)})

    def has_hooks(self, candidate: Candidate) -> bool:
        """Whether anything has to run before or after a timed launch of this candidate."""
        tuner = self.tuner
        return bool(
            self.configs[candidate].pre_hook is not None
            or tuner.user_defined_pre_hook
            or tuner.user_defined_post_hook
            or tuner.reset_to_zero
            or tuner.restore_value
        )

    def hooks(self, candidate: Candidate) -> list[Callable[..., object]]:
        """Hooks of the user's around a launch of this candidate."""
        tuner, own = self.tuner, self.configs[candidate].pre_hook
        hooks: list[Callable[..., object]] = [own] if own is not None else []
        hooks += [tuner.pre_hook] if tuner.user_defined_pre_hook else []
        return hooks + ([tuner.post_hook] if tuner.user_defined_post_hook else [])

    def hears_failures(self) -> bool:
        """Whether hooks of the user's surround every try of a config, failures included."""
        return bool(self.tuner.user_defined_pre_hook or self.tuner.user_defined_post_hook)

    def is_of_heuristic(self, error: BaseException) -> bool:
        """Whether a user's heuristic has raised an error: that ends a call, unless Triton would forgive the error."""
        layers, _ = own_heuristics(self.tuner.fn)
        rules = {code_of(rule) for layer in layers for rule in layer.values.values()} - {None}
        return not isinstance(error, forgiven_errors()) and not rules.isdisjoint(codes_in_traceback(error))

    def run_before_hooks(self, candidate: Candidate) -> dict[str, object]:
        """Run the hooks that precede a launch; returns the arguments for the hooks after it."""
        config = self.configs[candidate]
        full = {**self.named_arguments(), **self.launch_keywords(candidate)}
        if config.pre_hook is not None:
            with function_of_caller():
                config.pre_hook(full)
        if self.tuner.user_defined_pre_hook:
            with function_of_caller():
                self.tuner.pre_hook(full)
        else:
            self.tuner.pre_hook(_data_of(full))
        return full

    def launcher(self, candidate: Candidate) -> Callable[[], object]:
        """A function that launches once, without hooks, and with as little work on the host as possible."""
        return partial(self.function(candidate).run, *self.args, **self.launch_keywords(candidate))

    def launch_once(self, candidate: Candidate) -> None:
        """Launch once, with the hooks around it."""
        full = self.run_before_hooks(candidate)
        try:
            self.launcher(candidate)()
        except Exception as error:
            self.run_after_hook(full, error)
            raise
        self.run_after_hook(full)

    def run_after_hook(self, full: dict[str, object], exception: BaseException | None = None) -> None:
        """Run the hook that follows a launch."""
        if self.tuner.user_defined_post_hook:
            with function_of_caller():
                self.tuner.post_hook(full, exception=exception)
        else:  # Triton's own restores tensors, and fails where a launch broke the device
            self.tuner.post_hook(_data_of(full), exception=exception)


def _data_of(arguments: dict[str, Any]) -> dict[str, object]:
    """Return tensors without autograd, which must not see the resets around a timed launch."""
    return {n: v.data if hasattr(v, "requires_grad") else v for n, v in arguments.items()}


def check_conflicts(configs: Sequence[LaunchConfig], kwargs: NamedArguments) -> None:
    """Raise `ValueError`, as Triton does, where a call sets a parameter that the configs set."""
    for config in configs:
        conflicts = kwargs.keys() & config.kwargs.keys()
        if conflicts:
            with function_of_caller():
                raise ValueError(
                    f"Conflicting meta-parameters: {', '.join(sorted(conflicts))}."
                    " Make sure that you don't re-define auto-tuned symbols."
                )


def own_heuristics(fn: Any) -> tuple[list[Any], KernelFunction]:
    """The layers of `@heuristics` under a tuner that run as Triton's do, outermost first, and what is below them."""
    from triton.runtime.autotuner import Heuristics

    layers = []
    while getattr(type(fn), "run", None) is Heuristics.run and "run" not in vars(fn):
        layers.append(fn)
        fn = fn.fn
    return layers, fn


def warmup_of(function: KernelFunction | VariantKernel) -> Callable[..., object]:
    """Return the function that compiles a kernel without a launch. Heuristics have none before Triton 3.6."""
    return getattr(function, "warmup", None) or partial(function.run, warmup=True)


def forgiven_errors() -> tuple[type[Exception], ...]:
    """The errors of a config after which Triton goes on with the next one."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime.errors import OutOfResources, PTXASError

    return OutOfResources, CompileTimeAssertionFailure, PTXASError


def outcome_of(error: BaseException) -> Outcome | None:
    """Return the outcome of an exception; None for an error of the caller's, not the config's.

    Triton itself forgives three types, and any other error aborts the sweep. We forgive every failure of compiling
    or launching, but not a wrong call (TypeError, KeyError, ...): it would fail for every config, and is raised.
    """
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    if isinstance(error, OutOfResources):
        return Outcome.OUT_OF_RESOURCES
    if isinstance(error, (*forgiven_errors(), CompilationError)):
        return Outcome.COMPILE_ERROR
    if isinstance(error, ValueError) and str(error).startswith("num_ctas > 1"):  # no clusters on this device
        return Outcome.COMPILE_ERROR
    if type(error).__name__ == "OutOfMemoryError":
        return Outcome.INFRASTRUCTURE
    if isinstance(error, RuntimeError | AssertionError | NotImplementedError):
        return Outcome.RUNTIME_ERROR
    return None


def is_of_compiler(error: BaseException) -> bool:
    """Whether Triton itself has raised an error, and not a user's or a library's code that it called.

    The compiler's verdict on a config holds in every process. Any other error may be due to a process or thread that
    lacks something: the device in a forked child, say.
    """
    while error.__cause__ is not None:  # a CompilationError wraps any error that a kernel's code has raised
        error = error.__cause__
    traceback, raiser = error.__traceback__, "triton"
    while traceback is not None:
        raiser = str(traceback.tb_frame.f_globals.get("__name__"))
        traceback = traceback.tb_next
    return isinstance(error, forgiven_errors()) or raiser.partition(".")[0] == "triton"
