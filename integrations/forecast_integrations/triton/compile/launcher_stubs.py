"""Launcher stubs, built in children while candidates compile.

Triton up to 3.6 launches through a C extension module generated from a kernel's signature. It runs a C
compiler for it at the first launch of each signature, in the process that launches (about 0.3 s). The source
of that module is known before anything is compiled, and Triton keeps the result in its cache by the source's
hash: a child builds it there meanwhile. Later releases generate nothing, and neither do other backends' here.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import sysconfig
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from forecast_autotune.records import Candidate
from forecast_integrations.triton.compile.dispatcher import Dispatcher
from forecast_integrations.triton.compile.forked_children import DispatchedTask, ForkedChildren
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.describe import heuristic_values
from forecast_integrations.triton.problem.source import innermost
from forecast_integrations.triton.protocols import KernelFunction, NamedArguments

_MODULE = "__triton_launcher"
"""What Triton calls the generated module."""


class LauncherStubs:
    """The stubs that one call's candidates will be launched through; its owner must `close` it.

    Whatever goes wrong here is left to the launch, which builds the stub itself as ever.
    """

    def __init__(self, call: KernelCall, timeout_s: float, dispatcher: Dispatcher | None = None) -> None:
        """`timeout_s` is the most that one build may take.

        A `dispatcher` must know `build_stub` as its task `stub`.
        """
        self._call, self._timeout_s, self._dispatcher = call, timeout_s, dispatcher
        self._seen: set[object] = set()
        self._children = ForkedChildren()

    def start(self, candidates: Sequence[Candidate]) -> None:
        """Start building what these candidates need and Triton's cache lacks, a child per stub."""
        for candidate in candidates if _launcher_module() is not None else ():
            # A heuristic of the user's may fail in any way, and Triton's internals may change.
            with contextlib.suppress(Exception):
                kernel, args, kwargs = self._bound(candidate)
                constexpr = {p.name for p in kernel.params if p.is_constexpr}
                mark = (candidate.variant, *(i for i in candidate.config.kwargs if i[0] not in constexpr))
                if mark in self._seen:
                    continue
                self._seen.add(mark)
                signature = launch_signature(kernel, args, kwargs)
                if (source := missing_stub(signature)) is not None:
                    self._children.start(mark, partial(build_stub, source), self._dispatched(source))

    def wait(self) -> None:
        """Wait for the builds: one that has begun ends sooner than one that begins now."""
        limit = time.perf_counter() + self._timeout_s
        while len(self._children) and (left := limit - time.perf_counter()) > 0:
            self._children.finished(left)

    def close(self) -> None:
        """Stop what is still being built."""
        self._children.close()

    def _dispatched(self, source: str) -> DispatchedTask | None:
        return None if self._dispatcher is None else DispatchedTask(self._dispatcher, "stub", source)

    def _bound(self, candidate: Candidate) -> tuple[Any, Sequence[object], NamedArguments]:
        call = self._call
        function: KernelFunction
        if candidate.variant in call.functions:
            found = call.functions[candidate.variant].trace_inputs(
                call.args, call.kwargs, call.configs[candidate]
            )
            function, args, kwargs = found[0], found[1], {**found[2], **found[3]}
        else:
            function, args, kwargs = call.tuner.fn, call.args, call.launch_keywords(candidate)
        given = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        positional = dict(zip(function.arg_names, args, strict=False))
        full = heuristic_values(function)({**positional, **given})
        kernel = innermost(function)
        return kernel, args, {name: value for name, value in full.items() if name not in positional}


def launch_signature(kernel: Any, args: Sequence[object], kwargs: NamedArguments) -> dict[str, Any]:
    """The types of a `JITFunction`'s parameters under these arguments, by name, as its launcher takes them.

    `kwargs` may hold launch options as well. Raises what Triton's binder does for arguments that do not fit.
    """
    from triton.runtime.driver import driver

    binder = kernel.device_caches[driver.active.get_current_device()][-1]
    _, specialization, _ = binder(*args, **kwargs)
    names = [parameter.name for parameter in kernel.params]
    return {name: entry[0] for name, entry in zip(names, specialization, strict=True)}


def missing_stub(signature: dict[str, Any]) -> str | None:
    """The source of a signature's stub; None where Triton's cache has its binary, or this Triton builds none."""
    module = _launcher_module()
    if module is None:
        return None
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    tiles = _descriptor_metadata(signature)
    source: str = module.make_launcher({}, signature, tiles)
    key = hashlib.sha256((source + platform_key()).encode("utf-8")).hexdigest()
    file = f"{_MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if get_cache_manager(key).get_file(file) is not None:
        return None
    return source


def build_stub(source: str) -> None:
    """Compile a stub into Triton's cache. Raises `RuntimeError` where this Triton builds none."""
    module = _launcher_module()
    if module is None:
        raise RuntimeError("the active driver has no launcher that is generated: nothing can be built for it")
    module.compile_module_from_src(
        src=source,
        name=_MODULE,
        library_dirs=module.library_dirs(),
        include_dirs=module.include_dirs,
        libraries=module.libraries,
    )


def _launcher_module() -> Any:
    """The module of the active driver's launcher, where it generates stubs as Triton's for CUDA does."""
    from triton.runtime.driver import driver

    for launcher in getattr(getattr(driver.active, "launcher_cls", None), "__mro__", ()):
        if launcher.__module__ == "triton.backends.nvidia.driver":
            module = sys.modules[launcher.__module__]
            return module if hasattr(module, "make_launcher") else None
    return None


def _descriptor_metadata(signature: dict[str, Any]) -> list[SimpleNamespace] | None:
    """As much of the compiled kernel's `tensordesc_meta` as the source depends on: its length, or None.

    Devices before sm_90 have no descriptors in hardware; there the compiler says nothing about them.
    """
    from triton.runtime.driver import driver

    count = sum(isinstance(kind, str) and kind.startswith("tensordesc") for kind in signature.values())
    target = driver.active.get_current_target()
    if count == 0 or target.backend != "cuda" or int(target.arch) < 90:
        return None
    return [SimpleNamespace()] * count
