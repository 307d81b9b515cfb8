"""Service of tuners inside Triton's own `Autotuner.run`, under all wrappers of it.

Frameworks put functions of their own in place of `Autotuner.run`: they pin `configs` around the call, take locks, or
record launches. Each calls the function that it replaced, and the innermost is Triton's. We replace the code of that
function, so that wrappers made before and after us stay and are called.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

from triton.runtime import autotuner

_SERVE = "forecast_autotune_serve"
"""The name of the serving function in the globals of Triton's module."""


def is_of_triton(function: Any) -> bool:
    """Whether a member of a Triton class is Triton's: a wrapper by `functools.wraps` has other globals."""
    if isinstance(function, cached_property | property):
        function = function.func if isinstance(function, cached_property) else function.fget
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0] == "triton"


@cache
def triton_run() -> Any:
    """Return Triton's own `Autotuner.run`, also where it is replaced; None where nothing refers to it any more."""
    queue: list[Any] = [autotuner.Autotuner.run]
    visited: set[int] = set()
    while queue:  # from wrapper to wrapper, by what each refers to
        function = queue.pop()
        if isinstance(function, types.FunctionType) and id(function) not in visited:
            if _is_run(function):
                return function
            visited.add(id(function))
            globals_ = map(function.__globals__.get, function.__code__.co_names)
            cells = gc.get_referents(*(function.__closure__ or ()))
            queue += [*globals_, *cells, *vars(function).values(), *(function.__defaults__ or ())]
    return next(filter(_is_run, gc.get_objects()), None)


def _is_run(obj: object) -> bool:
    return isinstance(obj, types.FunctionType) and obj.__qualname__ == "Autotuner.run" and is_of_triton(obj)


_served: dict[type, Callable[..., object]] = {}
"""Functions that serve the tuners of a type and of its subtypes."""


def serve(kind: type, function: Callable[..., object] | None) -> None:
    """Call `function(tuner, *args, **kwargs)` for tuners of this type in place of Triton's `run`; None ends that."""
    _served.pop(kind, None)
    if function is not None:
        _served[kind] = function
    if (run := triton_run()) is not None:
        run.forecast_autotune = is_served(autotuner.Autotuner)  # for whoever has no more than `run`


def is_served(kind: type) -> bool:
    """Whether a function of ours serves tuners of this type."""
    return kind in _served


@cache
def install() -> None:
    """Begin to serve, once and for good; do nothing where Triton's own `run` cannot be called any more."""
    run = triton_run()
    if run is None:
        return
    original = types.FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__)
    original.__qualname__ = "original_run"  # it is not to be taken for Triton's own, see above

    def call(tuner: Any, *args: Any, **kwargs: Any) -> object:
        for kind in type(tuner).__mro__:
            if kind in _served:
                return _served[kind](tuner, *args, **kwargs)
        return original(tuner, *args, **kwargs)

    run.__globals__[_SERVE] = call
    run.__code__ = _run.__code__


def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
    return forecast_autotune_serve(self, *args, **kwargs)  # type: ignore[name-defined]  # noqa: F821
