"""Triton's own `Autotuner.run`, in which everybody else's wrapper of it ends.

Frameworks put functions of their own in place of `Autotuner.run`: they pin `configs` around the call, take locks, or
record launches. Each calls the function that it has found there, and the innermost is Triton's. Calls of that function
are served in its place, by its code: wrappers made before and after us stay, and all of them are called through.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

from triton.runtime import autotuner

_SERVE = "forecast_autotune_serve"
"""The name, among Triton's module's, of the function that serves calls."""


def is_of_triton(function: Any) -> bool:
    """Whether a member of a class of Triton's is its own: what `functools.wraps` makes has other globals."""
    if isinstance(function, cached_property | property):
        function = function.func if isinstance(function, cached_property) else function.fget
    function = getattr(function, "__func__", function)
    return str(getattr(function, "__globals__", {}).get("__name__")).partition(".")[0] == "triton"


@cache
def triton_run() -> Any:
    """Triton's own `Autotuner.run`, whatever stands in its place by now; None where nothing refers to it any more."""
    waiting: list[Any] = [autotuner.Autotuner.run]
    seen: set[int] = set()
    while waiting:  # from wrapper to wrapper, by what each refers to
        one = waiting.pop()
        if isinstance(one, types.FunctionType) and id(one) not in seen:
            if _is_run(one):
                return one
            seen.add(id(one))
            named = map(one.__globals__.get, one.__code__.co_names)
            held = gc.get_referents(*(one.__closure__ or ()))
            waiting += [*named, *held, *vars(one).values(), *(one.__defaults__ or ())]
    return next(filter(_is_run, gc.get_objects()), None)


def _is_run(one: object) -> bool:
    return isinstance(one, types.FunctionType) and one.__qualname__ == "Autotuner.run" and is_of_triton(one)


_served: dict[type, Callable[..., object]] = {}
"""What serves tuners of a type, and of its subtypes."""


def serve(kind: type, function: Callable[..., object] | None) -> None:
    """Have `function(tuner, *args, **kwargs)` called for tuners of this type in place of Triton's own `run`, or not."""
    _served.pop(kind, None)
    if function is not None:
        _served[kind] = function
    if (run := triton_run()) is not None:
        run.forecast_autotune = is_served(autotuner.Autotuner)  # for whoever has no more than `run`


def is_served(kind: type) -> bool:
    """Whether something of ours serves tuners of this type."""
    return kind in _served


@cache
def install() -> None:
    """Begin to serve, once and for good; nothing happens where nobody can call Triton's own `run` any more."""
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
