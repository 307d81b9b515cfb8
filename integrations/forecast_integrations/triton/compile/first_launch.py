"""Preparation of the first launch of a call's candidates, besides their binaries, while these compile.

The hash of Triton's own files: every key of its cache begins with it, and the first compilation of a process reads the
whole compiler (400 to 500 MB) for it, 0.2 to 0.6 s. A thread computes it from the first decorated kernel on, and has
mostly done so when that is launched, and before children are forked that compile.

Launcher stubs: Triton up to 3.6 launches through a C extension module generated from a kernel's signature. It runs a C
compiler for it at the first launch of each signature, in the process that launches (about 0.3 s). The source of that
module is known before anything is compiled, and Triton keeps the result in its cache by the source's hash: the compiler
runs on it meanwhile, before any child is forked, as a fork of a process with CUDA takes 20 ms. Later releases generate
nothing, and neither do other backends' here.
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
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from forecast_autotune.records import Candidate
from forecast_integrations.triton.compile.children import kill_group
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.problem.compilations import key_module
from forecast_integrations.triton.problem.describe import heuristic_values
from forecast_integrations.triton.problem.source import innermost
from forecast_integrations.triton.protocols import KernelFunction, NamedArguments

_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Files of NVIDIA's driver, AMD's, and either under WSL: without any, nothing will be compiled."""


class CompilerHash:
    """The hash of this process' Triton."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start_early(self) -> None:
        """Begin to compute the hash, once per process; do nothing without a GPU's driver."""
        if self._thread is None and any(map(os.path.exists, _DEVICE_FILES)):
            # Reading and digesting hold no lock of the interpreter.
            thread = threading.Thread(target=self._compute, name="compiler-hash", daemon=True)
            with contextlib.suppress(RuntimeError):  # no room for another thread
                thread.start()
                self._thread = thread

    def _compute(self) -> None:
        with contextlib.suppress(Exception):  # it fails again where it is needed
            key_module().triton_key()

    def settle(self) -> None:
        """Wait until the hash is known, here and in later forks. Raises the errors of Triton's own function."""
        if self._thread is not None and self._thread.is_alive():  # a fork has none of its parent's threads
            self._thread.join()
        key_module().triton_key()


COMPILER_HASH = CompilerHash()
"""The hash of this process."""


_MODULE = "__triton_launcher"
"""Triton's name of the generated module."""
_FLAGS = ("-O1", "-shared", "-fPIC", "-w")
"""Triton's flags with -O1 for -O3, which takes a fifth longer: a stub calls functions one after the other."""
_LAST_S = 0.5
"""Seconds from the end of the compiler's output to its own."""
_FILE = f"{_MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"


class FirstLaunch:
    """The preparation of one call's launches, for the pool that compiles its candidates and must `close` it.

    Nothing here raises, and nothing depends on it: the launch does the rest itself.
    """

    def __init__(self, call: KernelCall, timeout_s: float) -> None:
        """`timeout_s` is the most that all builds of stubs may take."""
        self._call, self._timeout_s = call, timeout_s
        self._keys: set[object] = set()
        self._builds: list[_StubBuild] = []
        self._idle_time_used = False

    def begin(self) -> None:
        """Begin what every launch will need."""
        with contextlib.suppress(Exception):
            COMPILER_HASH.settle()

    def use_idle_time(self) -> None:
        """Compute Triton's cache keys while this process waits for binaries."""
        if self._idle_time_used:
            return
        self._idle_time_used = True
        with contextlib.suppress(Exception):
            from triton.compiler.compiler import make_backend
            from triton.runtime.driver import driver

            make_backend(driver.active.get_current_target()).hash()  # asks the assembler for its version
            _ = innermost(self._call.tuner.fn).cache_key  # reads the kernel and all that it calls

    def start(self, candidates: Sequence[Candidate]) -> None:
        """Start building the stubs that these candidates need and Triton's cache lacks, a process each."""
        for candidate in candidates:
            # A heuristic of the user's may fail in any way, and Triton's internals may change.
            with contextlib.suppress(Exception):
                if _launcher_module() is None:
                    return
                kernel, args, kwargs = self._binder_inputs(candidate)
                constexpr = {p.name for p in kernel.params if p.is_constexpr}
                key = (candidate.variant, *(i for i in candidate.config.kwargs if i[0] not in constexpr))
                if key in self._keys:
                    continue
                self._keys.add(key)
                signature = launch_signature(kernel, args, kwargs)
                if (source := missing_stub(signature)) is not None:
                    self._builds.append(_StubBuild(source))

    def wait(self) -> None:
        """Wait for the builds, and put them into Triton's cache: a new build would end later."""
        limit = time.perf_counter() + self._timeout_s
        while self._builds:
            with contextlib.suppress(Exception):  # the launch says what is wrong
                self._builds.pop(0).finish(limit - time.perf_counter())

    def close(self) -> None:
        """Stop running builds."""
        while self._builds:
            self._builds.pop().close()

    def _binder_inputs(self, candidate: Candidate) -> tuple[Any, Sequence[object], NamedArguments]:
        call = self._call
        function: KernelFunction
        if candidate.variant in call.functions:
            inputs = call.functions[candidate.variant].trace_inputs(
                call.args, call.kwargs, call.configs[candidate]
            )
            function, args, kwargs = inputs[0], inputs[1], {**inputs[2], **inputs[3]}
        else:
            kernel_function, values = call.under_heuristics(candidate)
            function = cast("KernelFunction", kernel_function)
            args, kwargs = call.args, {**call.launch_keywords(candidate), **values}
        arguments = {name: value for name, value in kwargs.items() if name not in ("grid", "warmup")}
        positional = dict(zip(function.arg_names, args, strict=False))
        full = heuristic_values(function)({**positional, **arguments})
        kernel = innermost(function)
        return kernel, args, {name: value for name, value in full.items() if name not in positional}


def launch_signature(kernel: Any, args: Sequence[object], kwargs: NamedArguments) -> dict[str, Any]:
    """Return the types of a `JITFunction`'s parameters under these arguments, by name, as its launcher takes them.

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
        """Wait for the build, and put its result into Triton's cache."""
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
        """End the build."""
        if self._process.poll() is None:
            kill_group(self._process.pid)
            self._process.wait()
        self._output.close()
        self._scratch.cleanup()


def _stub_cache(source: str) -> Any:
    """Return Triton's cache for builds of this source."""
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
