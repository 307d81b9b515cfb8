"""Launcher stubs, built while candidates compile.

Triton up to 3.6 launches through a C extension module generated from a kernel's signature. It runs a C
compiler for it at the first launch of each signature, in the process that launches (about 0.3 s). The source
of that module is known before anything is compiled, and Triton keeps the result in its cache by the source's
hash: the compiler runs on it meanwhile, before any child is forked, as a fork of a process with CUDA takes 20 ms.
Later releases generate nothing, and neither do other backends' here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forecast_autotune.records import Candidate
from forecast_integrations.triton.compile.child_process import kill_group
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.describe import heuristic_values
from forecast_integrations.triton.problem.source import innermost
from forecast_integrations.triton.protocols import KernelFunction, NamedArguments

_MODULE = "__triton_launcher"
"""What Triton calls the generated module."""
_FLAGS = ("-O1", "-shared", "-fPIC", "-w")
"""Triton's, but for its -O3, which takes a fifth longer: a stub calls functions one after the other."""
_LAST_S = 0.5
"""Between the end of its output and its own."""
_FILE = f"{_MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"


class LauncherStubs:
    """The stubs that one call's candidates will be launched through; its owner must `close` it.

    Whatever goes wrong here is left to the launch, which builds the stub itself as ever.
    """

    def __init__(self, call: KernelCall, timeout_s: float) -> None:
        """`timeout_s` is the most that all builds may take."""
        self._call, self._timeout_s = call, timeout_s
        self._seen: set[object] = set()
        self._builds: list[_StubBuild] = []

    def start(self, candidates: Sequence[Candidate]) -> None:
        """Start building what these candidates need and Triton's cache lacks, a process per stub."""
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
                    self._builds.append(_StubBuild(source))

    def wait(self) -> None:
        """Wait for the builds, and put them into Triton's cache: one that has begun ends sooner than another."""
        limit = time.perf_counter() + self._timeout_s
        while self._builds:
            with contextlib.suppress(Exception):  # the launch says what is wrong
                self._builds.pop(0).finish(limit - time.perf_counter())

    def close(self) -> None:
        """Stop what is still being built."""
        while self._builds:
            self._builds.pop().close()

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
    tiles = _descriptor_metadata(signature)
    source: str = module.make_launcher({}, signature, tiles)
    return source if _stub_cache(source).get_file(_FILE) is None else None


class _StubBuild:
    """A C compiler at work on one stub."""

    def __init__(self, source: str) -> None:
        """Raises `OSError`, and `RuntimeError` where the user builds with something else."""
        from triton import knobs

        if knobs.build.impl is not None:
            raise RuntimeError("only Triton's own way of building is known here")
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise RuntimeError("there is no C compiler")
        scheme = sysconfig.get_default_scheme()
        paths = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)
        module, self._source = _launcher_module(), source
        self._scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._folder = Path(self._scratch.name)
        (self._folder / "stub.c").write_text(source)
        includes = [*module.include_dirs, str(self._folder), paths["include"], *knobs.build.backend_dirs]
        self._process = subprocess.Popen(
            [
                *(compiler, "stub.c", *_FLAGS, "-o", _FILE),
                *(f"-l:{name}" if ".so" in name else f"-l{name}" for name in module.libraries),
                *(f"-L{folder}" for folder in module.library_dirs()),
                *(f"-I{folder}" for folder in includes if folder is not None),
            ],
            cwd=self._folder,
            stdout=subprocess.PIPE,  # which ends when it does, and can be waited for
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout

    def finish(self, timeout_s: float) -> None:
        """Wait for it, and put it into Triton's cache."""
        try:
            with selectors.DefaultSelector() as selector:
                # `wait` with a limit looks every 50 ms.
                selector.register(self._output, selectors.EVENT_READ)
                selector.select(max(0.0, timeout_s))
            if self._process.wait(_LAST_S) == 0:
                _stub_cache(self._source).put((self._folder / _FILE).read_bytes(), _FILE, binary=True)
        finally:
            self.close()

    def close(self) -> None:
        """End it."""
        if self._process.poll() is None:
            kill_group(self._process.pid)
            self._process.wait()
        self._output.close()
        self._scratch.cleanup()


def _stub_cache(source: str) -> Any:
    """Where Triton keeps what is built from this source."""
    from triton.runtime.build import platform_key
    from triton.runtime.cache import get_cache_manager

    return get_cache_manager(hashlib.sha256((source + platform_key()).encode("utf-8")).hexdigest())


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
