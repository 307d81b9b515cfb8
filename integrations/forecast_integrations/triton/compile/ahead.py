"""Recorded compilations made again, before a program needs the binaries: in children, into Triton's cache."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from forecast_autotune.records.compilation import Compilation, PlannedCompilation
from forecast_autotune.settings import Settings
from forecast_integrations.triton.compile.children import ForkedChildren
from forecast_integrations.triton.compile.first_launch import COMPILER_HASH
from forecast_integrations.triton.compile.lazy_packages import complete_packages, lazy_packages
from forecast_integrations.triton.problem.compilations import (
    ASSEMBLER_VARIABLES,
    BACKEND,
    binary_key,
    compilation_environment,
    decoded,
    forget_assembler,
    kernel_hash,
    kernel_of,
    torch_assemblers,
)


def compile_ahead(
    listed: Sequence[PlannedCompilation],
    workers: int,
    done: Callable[[int, PlannedCompilation], object] = lambda count, one: None,
    timeout_s: float | None = None,
) -> None:
    """Compile into Triton's cache, each in a child of its own, on no device, and note what became of it.

    In the order given. Raises `OSError` where no child can be had. A child that dies, or takes longer than `timeout_s`,
    costs its binary; None stands for the settings' time.
    """
    limit_s = Settings.from_environment().timeout_s if timeout_s is None else timeout_s
    waiting, count = list(listed)[::-1], itertools.count(1)
    unimportable: dict[str, str] = {}
    COMPILER_HASH.start_early()
    children, environment = ForkedChildren(), _RecordedEnvironment()
    libraries = {one.compilation.module.partition(".")[0] for one in listed}
    try:
        while waiting or len(children):
            while waiting and len(children) < workers:
                one = waiting.pop()
                one.trouble, one.outdated = _trouble(one.compilation, unimportable, libraries)
                one.trouble = one.trouble or environment.adopt(one.compilation)
                if one.trouble:
                    done(next(count), one)
                else:
                    with contextlib.suppress(Exception):  # it fails again in each child
                        COMPILER_HASH.settle()  # known to all forks then
                    children.start(one, partial(_compile, one.compilation))
            ended, _ = children.finished(0.25)
            for child, status in ended:
                one = child.tag
                try:
                    one.seconds, one.cached, one.trouble = child.answer()
                except ValueError:
                    one.trouble = f"the compiler ended with status {status}"
                done(next(count), one)
            for child in children.overdue(limit_s):
                children.kill(child)
                child.tag.trouble = f"not compiled after {limit_s:g} s"
                done(next(count), child.tag)
    finally:
        children.close()
        environment.restore()


class _RecordedEnvironment:
    """This process' environment, which children inherit, as far as Triton's keys follow from it."""

    def __init__(self) -> None:
        self._own = dict(os.environ)
        self._current: Mapping[str, str] = {}
        self._trouble = ""

    def adopt(self, one: Compilation) -> str:
        """Have Triton name binaries as it did in the recorded process; why that cannot be, if so."""
        if one.environment != self._current:
            self.restore()
            self._current = one.environment
            try:
                self._trouble = self._change(one) if one.environment else ""
            except Exception as error:
                self._trouble = f"{type(error).__name__}: {error}"[:300]
        return self._trouble

    def _change(self, one: Compilation) -> str:
        from triton.backends.compiler import GPUTarget

        recorded, target = one.environment, GPUTarget(**one.target)
        here = compilation_environment(target)
        for name in here.keys() - recorded.keys():
            del os.environ[name]
        for name, value in recorded.items():
            if name != BACKEND and here.get(name) != value:
                # A record may come from anywhere, and a path may lead to code: only switches are believed.
                if value not in ("true", "false"):
                    return f"the program ran with {name}={value}: run `warm` with it, too"
                os.environ[name] = value
        for path in (None, "", *torch_assemblers()):
            if path is not None:
                for name in ASSEMBLER_VARIABLES:
                    os.environ.pop(name, None)
            if path:
                os.environ[ASSEMBLER_VARIABLES[0]] = path
            forget_assembler()
            if (now := compilation_environment(target)) == recorded:
                return ""
        if now.keys() != recorded.keys():
            return f"this Triton knows nothing of {', '.join(sorted(recorded.keys() - now.keys()))}"
        named = [re.findall(r"V[\d.]+", text) for text in (recorded[BACKEND], here[BACKEND])]
        wanted, ours = (found[0] if found else "another one" for found in named)
        return f"the program's assembler ({wanted}) is not here (Triton has {ours}): set {ASSEMBLER_VARIABLES[0]}"

    def restore(self) -> None:
        """Back to the process' own."""
        if self._current:
            for name in os.environ.keys() - self._own.keys():
                del os.environ[name]
            os.environ.update(self._own)
            self._current = {}
            forget_assembler()


def _trouble(one: Compilation, unimportable: dict[str, str], lazy: Collection[str]) -> tuple[str, bool]:
    """Import the kernel in this process, whose forks have it then; why that cannot be, and whether it is outdated.

    `unimportable` says it of kernels that were tried, by name. Packages of `lazy` libraries run their own files only if
    the kernel is another one without.
    """
    import torch  # noqa: F401 - with all that it imports itself
    import triton

    if one.trouble:
        return one.trouble, False
    if one.triton != triton.__version__:
        return f"it is of Triton {one.triton}, and this is {triton.__version__}", True
    if one.name in unimportable:
        return unimportable[one.name], False
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the command's
        try:
            with lazy_packages(lazy):
                kernel = kernel_of(one)
                same = kernel_hash(kernel) == one.source_sha256
                _ = kernel.cache_key  # known to all forks then
        except (Exception, SystemExit) as error:
            same = False
            unimportable[one.name] = f"cannot be imported ({type(error).__name__}: {error})"[:300]
        if not same and complete_packages(one.module):
            unimportable.pop(one.name, None)
            return _trouble(one, unimportable, ())
    known = unimportable.get(one.name, "")
    return known or ("" if same else "its source has changed"), not (same or known)


def _compile(one: Compilation) -> tuple[float, bool, str]:
    """Seconds, whether it was in the cache, and why it cannot be compiled, if so."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hits: list[bool] = []
    knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    began = time.perf_counter()
    data = one.specialization
    try:
        source = ASTSource(
            kernel_of(one),
            {n: decoded(t) for n, t in data["signature"].items()},
            {tuple(path): decoded(value) for path, value in data["constants"]},
            {tuple(path): [list(pair) for pair in pairs] for path, pairs in data["attributes"]},
        )
        options = {n: _as_tuples(v) for n, v in data["options"].items()}
        compiled = triton.compile(source, target=GPUTarget(**one.target), options=options)
    except Exception as error:
        return 0.0, False, f"{type(error).__name__}: {error}"[:300]
    seconds = time.perf_counter() - began
    with contextlib.suppress(Exception):  # the launch says what is wrong
        _build_launcher(compiled)
    key, trouble = binary_key(compiled.hash), ""
    if one.key not in ("", key) and one.key.partition(":")[0] == key.partition(":")[0]:
        trouble = "Triton names it otherwise than in the program, which will compile it"
    return seconds, bool(hits and hits[-1]), trouble


def _build_launcher(compiled: Any) -> None:
    """Build the C modules that Triton's launches by CUDA go through: up to 3.6 it builds one a signature."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if compiled.metadata.target.backend == "cuda" and hasattr(driver, "make_launcher"):
        driver.CudaUtils()
        driver.CudaLauncher(compiled.src, compiled.metadata)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
