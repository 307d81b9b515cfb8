"""Kernels without a tuner, served by their verified variants where FORECAST_AUTOTUNE_VARIANTS=store asks for that.

A launch is seen where Triton's own launch path begins, `JITFunction.run`. A kernel that its own module reaches under
its name, through wrappers that are no tuners, gets a tuner, whose only config is the call's own launch options, once
the store holds a variant of its source. All other launches go on as before.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import triton

from forecast_autotune.records import LAUNCH_OPTIONS
from forecast_autotune.store import Store
from forecast_autotune.variants import Variant
from forecast_autotune.variants.signature import written
from forecast_integrations.triton.decorator import ForecastAutotuner
from forecast_integrations.triton.engine import launch
from forecast_integrations.triton.problem.describe import kernel_record
from forecast_integrations.triton.problem.source import innermost
from forecast_integrations.triton.protocols import Key, is_tensor
from forecast_integrations.triton.variants.calls import CallForms

_LEAST_SIZE = 16
"""Smaller numbers are sizes by chance."""
ENTRY = "_forecast_served"
"""The attribute of a kernel that holds its `ServedKernel`, which so lives no longer than the kernel."""


class ServedKernel:
    """A kernel without a tuner, and the tuners made for it, by the launch options that it is called with."""

    def __init__(self, jit: Any, variants: list[Variant]) -> None:
        self.jit = jit
        outputs = [written(c.signature) for v in variants for c in v.checks if c.passed]
        self._constants = {p.name for p in jit.params if p.is_constexpr}
        # Timing launches a kernel many times: its sums must not pile up in the user's tensors.
        self._output_names = sorted({n for names in outputs for n in names or jit.arg_names})
        self._tuners: dict[tuple[Any, ...], ForecastAutotuner] = {}
        self._forms = CallForms(jit.arg_names, [c for v in variants for c in v.checks])

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Launch it as a tuner would."""
        form = layout, arguments, *_ = self._forms(args, kwargs)
        options = tuple([(n, kwargs.pop(n)) for n in LAUNCH_OPTIONS if kwargs.get(n) is not None])
        tuner, key = layout.answer(arguments, lambda: self._tuner(options, args, kwargs))
        engine, make_key = tuner.parts()
        return launch(tuner, engine, make_key, args, kwargs, key, form)

    def _tuner(
        self, options: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ForecastAutotuner, Key | None]:
        """The tuner of a call, and its key there if the call's form tells it."""
        names = self.jit.arg_names
        values = {**dict(zip(names, args, strict=False)), **kwargs}
        sizes = _sizes(v for v in values.values() if is_tensor(v))
        key_names = tuple(n for n in names if n in values and _counts(values[n], sizes, n in self._constants))
        if (tuner := self._tuners.get((options, key_names))) is None:
            outputs = [n for n in self._output_names if is_tensor(values.get(n))]
            config = triton.Config({}, **dict(options))
            tuner = ForecastAutotuner(self.jit, names, [config], list(key_names), None, outputs or None)
            self._tuners[options, key_names] = tuner
        engine, make_key = tuner.parts()
        make_key.learn_addresses(engine.text, self.jit, args, kwargs)
        key = make_key(tuner.keys, args, kwargs)
        return tuner, key if make_key.goes_by_form else None


def _sizes(tensors: Iterable[Any]) -> set[int]:
    return {n for t in tensors for n in (*t.shape, *t.stride(), math.prod(t.shape)) if n >= _LEAST_SIZE}


def _counts(value: Any, sizes: set[int], constant: bool) -> bool:
    """Whether a decision depends on an argument: a constant, a flag or a size, unlike a seed or a count of steps."""
    return constant or value is None or isinstance(value, bool) or (isinstance(value, int) and value in sizes)


def _served_kernel(jit: Any) -> ServedKernel | None:
    fn = getattr(jit, "fn", None)
    outer = None if fn is None else fn.__globals__.get(fn.__name__)
    if outer is None or innermost(outer) is not jit or _has_tuner(outer):
        return None
    variants = Store.default().variants(kernel_record(jit).source_sha256)
    usable = [v for v in variants if any(c.passed for c in v.checks)]
    return ServedKernel(jit, usable) if usable else None


def _has_tuner(outer: Any) -> bool:
    while outer is not None and not hasattr(outer, "configs"):
        outer = getattr(outer, "fn", None)
    return outer is not None


def serving(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper of `JITFunction.run`, or of its replacement, that serves kernels without a tuner."""
    busy = threading.local()

    def run_served(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        entry = vars(self).get(ENTRY)
        if entry is None and not warmup and not getattr(busy, "on", False):
            busy.on = True
            try:
                entry = vars(self)[ENTRY] = (_served_kernel(self),)
            finally:
                busy.on = False
        kernel = None if entry is None else entry[0]
        if kernel is None or kernel.jit is not self or warmup or getattr(busy, "on", False):
            # A copy of a kernel has its entry, too; and a tuner launches what it serves.
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        busy.on = True
        try:
            kwargs["grid"], kwargs["warmup"] = grid, warmup
            return kernel.run(args, kwargs)
        finally:
            busy.on = False

    vars(run_served)["behind"] = run
    return run_served


@cache
def serve_untuned() -> None:
    """Serve kernels without a tuner from now on."""
    triton.JITFunction.run = serving(triton.JITFunction.run)
