"""A live kernel call -> the text of its TTIR, for one config, without compiling or launching.

Triton's own binder decides how the arguments specialise (values equal to 1, divisibility by 16), so
the text is what a real launch with these arguments would compile. Triton is imported on first use.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.features.ttir.extraction import assignment_key
from forecast_autotune.features.ttir.parser import FeatureError, strip_locations
from forecast_autotune.records import to_scalar

_CACHED_ATTRIBUTES = ("hash", "used_global_vals")
"""Attributes that Triton sets on a function once something asks for its cache key."""


def trace(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    constexprs: Mapping[str, Any],
    *,
    target: Any = None,
) -> str:
    """The TTIR of one config, without source locations.

    `fn` is a `JITFunction`, or `triton.heuristics` over one; `args` and `kwargs` are the call's live
    arguments (tensors, numbers, None, descriptors) and `constexprs` the config's meta-parameters,
    which win over `kwargs`. Launch options such as `num_warps` may be among either: heuristics see
    them, TTIR does not depend on them. `target` (a `GPUTarget`) defaults to the active driver's, or
    without one to an sm_90.

    Nothing is launched and no cache of `fn` changes. Raises `FeatureError` when the kernel does not
    get as far as TTIR: a config that breaks a `static_assert`, an interpreted or Gluon kernel, a
    Triton whose internals this function does not know.
    """
    return KernelTracer.of(fn, target).text(args, {**kwargs, **constexprs})


def trace_many(
    fn: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    assignments: Iterable[Mapping[str, Any]],
    *,
    target: Any = None,
) -> Iterator[tuple[str, str | FeatureError]]:
    """Trace one config's constexprs after another: (`assignment_key`, text or why there is none).

    Lazy and in order, also in drawing `assignments`: a caller with a deadline may stop at any time. Raises
    nothing: an error of the kernel itself is yielded for every assignment.
    """
    tracer: KernelTracer | FeatureError
    try:
        tracer = KernelTracer.of(fn, target)
    except FeatureError as error:
        tracer = error
    for assignment in assignments:
        key = assignment_key({name: to_scalar(value) for name, value in assignment.items()})
        if isinstance(tracer, FeatureError):
            yield key, tracer
            continue
        try:
            yield key, tracer.text(args, {**kwargs, **assignment})
        except FeatureError as error:
            yield key, error


def load_front_end() -> None:
    """Import Triton's front end ahead of a first trace (30 ms), if there is a Triton."""
    with contextlib.suppress(ImportError):
        importlib.import_module("triton.compiler.code_generator")


@dataclass(frozen=True)
class KernelTracer:
    """A kernel with its heuristics peeled off, and Triton's machinery for one target.

    Calls with the same specialisation are lowered once.
    """

    kernel: Any
    heuristics: tuple[Any, ...]
    """Outermost first, which is the order in which Triton applies them."""
    target: Any
    backend: Any
    binder: Callable[..., tuple[dict[str, Any], list[Any], dict[str, Any]]]
    texts: dict[str, str] = field(default_factory=dict)
    """By signature, constants and attributes."""

    @classmethod
    def of(cls, fn: Any, target: Any) -> KernelTracer:
        """Unwrap `fn` and make its binder. Raises `FeatureError` when it cannot be traced."""
        try:
            from triton.compiler.compiler import make_backend
            from triton.runtime.autotuner import Heuristics
            from triton.runtime.jit import JITFunction, create_function_from_signature
        except ImportError as error:
            raise FeatureError(f"cannot trace without a Triton of version 3.4 or later: {error}") from error
        heuristics = []
        while isinstance(fn, Heuristics):
            heuristics.append(fn)
            fn = fn.fn
        if not isinstance(fn, JITFunction):
            raise FeatureError(
                f"cannot trace a {type(fn).__name__}: it must be a triton.jit function, possibly under "
                "triton.heuristics (with TRITON_INTERPRET=1 there is no TTIR; unset it)"
            )
        if getattr(fn, "is_gluon", lambda: False)():
            raise FeatureError(f"{fn.__name__} is a Gluon kernel, which has no TTIR stage")
        try:
            target = target or _current_target()
            backend = make_backend(target)
            binder = create_function_from_signature(fn.signature, fn.params, backend)
        except Exception as error:
            raise FeatureError(
                f"this Triton offers no binder for {target}: {_error_summary(error)}"
            ) from error
        return cls(fn, tuple(heuristics), target, backend, binder)

    def text(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Bind, specialise and lower to TTIR. Raises `FeatureError` with Triton's own words."""
        arguments = dict(kwargs)
        kernel = self.kernel
        functions = [kernel, *(value for value in arguments.values() if hasattr(value, "used_global_vals"))]
        cache_keys = [
            (f, name, getattr(f, name)) for f in functions for name in _CACHED_ATTRIBUTES if hasattr(f, name)
        ]
        try:
            for layer in self.heuristics:
                for name, rule in layer.values.items():
                    arguments[name] = rule({**dict(zip(layer.arg_names, args, strict=False)), **arguments})
            own = {name: value for name, value in arguments.items() if name in kernel.arg_names}
            bound, specialization, _ = self.binder(*args, **own)
            signature, constants, attributes = _pack(kernel, self.backend, bound, specialization)
            key = repr((signature, constants, attributes))
            if key not in self.texts:
                self.texts[key] = _lower(kernel, signature, constants, attributes, self.target, self.backend)
            return self.texts[key]
        except Exception as error:
            failure = _error_summary(error)
        finally:
            # A cache key taken now would pin today's global variables for the first real launch.
            for function, name, value in cache_keys:
                setattr(function, name, value)
        # Raised out here, without a cause: a traceback would keep the whole module in memory.
        raise FeatureError(f"no TTIR for {kernel.__name__}: {failure}")


def _current_target() -> Any:
    """The active driver's target; an sm_90 where there is no driver."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    try:
        return driver.active.get_current_target()
    except RuntimeError:  # "0 active drivers": a machine without a GPU
        return GPUTarget("cuda", 90, 32)


def _pack(
    kernel: Any, backend: Any, bound: Mapping[str, Any], specialization: Sequence[Any]
) -> tuple[dict[str, Any], dict[Any, Any], dict[Any, Any]]:
    """The steps of `JITFunction.run` between binder and compiler, in every Triton since 3.4.

    Returns the signature by name, and constants and attributes by path.
    """
    from triton._utils import find_paths_if, get_iterable_path

    types = [entry[0] for entry in specialization]
    signature = dict(zip(bound, types, strict=True))
    values = list(bound.values())
    paths = find_paths_if(types, lambda _, kind: kind == "constexpr")
    constants = {path: get_iterable_path(values, path) for path in paths}
    # A string constexpr sits where other arguments have their attributes; it is not one.
    notes = ["" if entry[0] == "constexpr" else entry[1] for entry in specialization]
    attributes = {
        path: backend.parse_attr(get_iterable_path(notes, path))
        for path in find_paths_if(notes, lambda _, note: isinstance(note, str))
    }
    return signature, constants, attributes


def _lower(kernel: Any, signature: Any, constants: Any, attributes: Any, target: Any, backend: Any) -> str:
    """Run Triton's front end and its first stage; the one place that knows how versions differ."""
    import inspect

    from triton import knobs
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature, constants, attributes)
    options = backend.parse_options({"debug": bool(kernel.debug or knobs.runtime.debug)})
    context = ir.context()
    if hasattr(context, "disable_multithreading"):  # 3.4: its thread pool would not survive a fork
        context.disable_multithreading()
    ir.load_dialects(context)
    backend.load_dialects(context)
    needs = [options, backend.get_codegen_implementation(options), backend.get_module_map(), context]
    if "target" in inspect.signature(source.make_ir).parameters:  # from 3.5 on
        needs.insert(0, target)
    module = source.make_ir(*needs)
    stages: dict[str, Callable[[Any, dict[str, Any]], Any]] = {}
    backend.add_stages(stages, options, source.language)
    module = stages["ttir"](module, {})
    return str(module.str_nodebug()) if hasattr(module, "str_nodebug") else strip_locations(str(module))


def _error_summary(error: BaseException) -> str:
    """The message of an error. Triton's wrap the cause several deep, and quote source with the fault last."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(getattr(error, "error_message", None) or error).split())
    return f"{type(error).__name__}: {text[-300:]}"
