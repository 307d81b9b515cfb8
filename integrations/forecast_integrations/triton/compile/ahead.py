"""Repetition of recorded compilations, before a program needs the binaries: in children, into Triton's cache."""

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
    plan: Sequence[PlannedCompilation],
    workers: int,
    note: Callable[[int, PlannedCompilation], object] = lambda count, planned: None,
    timeout_s: float | None = None,
) -> None:
    """Compile into Triton's cache, in the given order, each in a child of its own, on no device; `note` each result.

    Raises `OSError` where no child can be had. A child that dies, or takes longer than `timeout_s`, costs its binary;
    None stands for the settings' time.
    """
    limit_s = Settings.from_environment().timeout_s if timeout_s is None else timeout_s
    queue, count = list(plan)[::-1], itertools.count(1)
    unimportable: dict[str, str] = {}
    COMPILER_HASH.start_early()
    children, environment = ForkedChildren(), _RecordedEnvironment()
    libraries = {planned.compilation.module.partition(".")[0] for planned in plan}
    try:
        while queue or len(children):
            while queue and len(children) < workers:
                planned = queue.pop()
                planned.trouble, planned.outdated = _trouble(planned.compilation, unimportable, libraries)
                planned.trouble = planned.trouble or environment.adopt(planned.compilation)
                if planned.trouble:
                    note(next(count), planned)
                else:
                    with contextlib.suppress(Exception):  # it fails again in each child
                        COMPILER_HASH.settle()  # known to all forks then
                    children.start(planned, partial(_compile, planned.compilation))
            results, _ = children.finished(0.25)
            for child, status in results:
                planned = child.tag
                try:
                    planned.seconds, planned.cached, planned.trouble = child.answer()
                except ValueError:
                    planned.trouble = f"the compiler ended with status {status}"
                note(next(count), planned)
            for child in children.overdue(limit_s):
                children.kill(child)
                child.tag.trouble = f"not compiled after {limit_s:g} s"
                note(next(count), child.tag)
    finally:
        children.close()
        environment.restore()


class _RecordedEnvironment:
    """The variables of this process that Triton's keys depend on; children inherit them."""

    def __init__(self) -> None:
        self._own = dict(os.environ)
        self._current: Mapping[str, str] = {}
        self._trouble = ""

    def adopt(self, compilation: Compilation) -> str:
        """Let Triton name binaries as in the recorded process; returns the reason where that is impossible."""
        if compilation.environment != self._current:
            self.restore()
            self._current = compilation.environment
            try:
                self._trouble = self._change(compilation) if compilation.environment else ""
            except Exception as error:
                self._trouble = f"{type(error).__name__}: {error}"[:300]
        return self._trouble

    def _change(self, compilation: Compilation) -> str:
        from triton.backends.compiler import GPUTarget

        goal, target = compilation.environment, GPUTarget(**compilation.target)
        present = compilation_environment(target)
        for name in present.keys() - goal.keys():
            del os.environ[name]
        for name, value in goal.items():
            if name != BACKEND and present.get(name) != value:
                # A record may come from anywhere, and a path may lead to code: only switches are set.
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
            if (current := compilation_environment(target)) == goal:
                return ""
        if current.keys() != goal.keys():
            return f"this Triton knows nothing of {', '.join(sorted(goal.keys() - current.keys()))}"
        releases = [re.findall(r"V[\d.]+", text) for text in (goal[BACKEND], present[BACKEND])]
        needed_release, own_release = (matches[0] if matches else "another one" for matches in releases)
        text = f"the program's assembler ({needed_release}) is not here (Triton has {own_release}): set "
        return text + ASSEMBLER_VARIABLES[0]

    def restore(self) -> None:
        """Restore the process' own environment."""
        if self._current:
            for name in os.environ.keys() - self._own.keys():
                del os.environ[name]
            os.environ.update(self._own)
            self._current = {}
            forget_assembler()


def _trouble(record: Compilation, unimportable: dict[str, str], lazy: Collection[str]) -> tuple[str, bool]:
    """Import the kernel in this process, for its forks; returns the trouble, if any, and whether the record is old.

    `unimportable` holds the trouble of earlier kernels by name. Packages of `lazy` libraries run their own files only
    where the kernel differs without them.
    """
    import torch  # noqa: F401 - with all that it imports itself
    import triton

    if record.trouble:
        return record.trouble, False
    if record.triton != triton.__version__:
        return f"it is of Triton {record.triton}, and this is {triton.__version__}", True
    if record.name in unimportable:
        return unimportable[record.name], False
    with contextlib.redirect_stdout(sys.stderr):  # stdout is the command's
        try:
            with lazy_packages(lazy):
                kernel = kernel_of(record)
                same = kernel_hash(kernel) == record.source_sha256
                _ = kernel.cache_key  # known to all forks then
        except (Exception, SystemExit) as error:
            same = False
            unimportable[record.name] = f"cannot be imported ({type(error).__name__}: {error})"[:300]
        if not same and complete_packages(record.module):
            unimportable.pop(record.name, None)
            return _trouble(record, unimportable, ())
    reason = unimportable.get(record.name, "")
    return reason or ("" if same else "its source has changed"), not (same or reason)


def _compile(compilation: Compilation) -> tuple[float, bool, str]:
    """Return the seconds, whether the binary was in the cache, and the trouble, if any."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    hits: list[bool] = []
    knobs.compilation.listener = lambda **event: hits.append(event["cache_hit"])
    begin = time.perf_counter()
    data = compilation.specialization
    try:
        source = ASTSource(
            kernel_of(compilation),
            {n: decoded(t) for n, t in data["signature"].items()},
            {tuple(path): decoded(value) for path, value in data["constants"]},
            {tuple(path): [list(pair) for pair in pairs] for path, pairs in data["attributes"]},
        )
        options = {n: _as_tuples(v) for n, v in data["options"].items()}
        binary = triton.compile(source, target=GPUTarget(**compilation.target), options=options)
    except Exception as error:
        return 0.0, False, f"{type(error).__name__}: {error}"[:300]
    seconds = time.perf_counter() - begin
    with contextlib.suppress(Exception):  # the launch raises the error
        _build_launcher(binary)
    key, trouble = binary_key(binary.hash), ""
    if compilation.key not in ("", key) and compilation.key.partition(":")[0] == key.partition(":")[0]:
        trouble = "Triton names it otherwise than in the program, which will compile it"
    return seconds, bool(hits and hits[-1]), trouble


def _build_launcher(binary: Any) -> None:
    """Build the C modules that Triton's launches by CUDA go through: up to 3.6 it builds one a signature."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if binary.metadata.target.backend == "cuda" and hasattr(driver, "make_launcher"):
        driver.CudaUtils()
        driver.CudaLauncher(binary.src, binary.metadata)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
