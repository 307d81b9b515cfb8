"""Recorded compilations made again, before a program needs the binaries: in children, into Triton's cache."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from forecast_autotune.records.compilation import Compilation, PlannedCompilation
from forecast_autotune.settings import Settings
from forecast_integrations.triton.compile.children import ForkedChildren
from forecast_integrations.triton.compile.first_launch import COMPILER_HASH
from forecast_integrations.triton.problem.compilations import decoded, kernel_of
from forecast_integrations.triton.problem.source import source_hash


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
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    limit_s = Settings.from_environment().timeout_s if timeout_s is None else timeout_s
    waiting, count = list(listed)[::-1], itertools.count(1)
    unimportable: dict[str, str] = {}
    for target in {json.dumps(c.target): c.target for c in (one.compilation for one in listed)}.values():
        # Known to all forks then: the assembler's version, and the digest of Triton's own files.
        with contextlib.suppress(Exception):
            make_backend(GPUTarget(**target)).hash()
            COMPILER_HASH.settle()
    children = ForkedChildren()
    try:
        while waiting or len(children):
            while waiting and len(children) < workers:
                one = waiting.pop()
                known = one.compilation.trouble
                one.trouble, one.outdated = (
                    (known, False) if known else _trouble(one.compilation, unimportable)
                )
                if one.trouble:
                    done(next(count), one)
                else:
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


def _trouble(one: Compilation, unimportable: dict[str, str]) -> tuple[str, bool]:
    """Import the kernel in this process, whose forks have it then; why that cannot be, and whether it is outdated.

    `unimportable` says it of kernels that were tried, by name.
    """
    import triton

    if one.triton != triton.__version__:
        return f"it is of Triton {one.triton}, and this is {triton.__version__}", True
    if one.name not in unimportable:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is the command's
                kernel = kernel_of(one)
            if source_hash(kernel) != one.source_sha256:
                return "its source has changed", True
            _ = kernel.cache_key  # known to all forks then
            return "", False
        except (Exception, SystemExit) as error:
            unimportable[one.name] = f"cannot be imported ({type(error).__name__}: {error})"[:300]
    return unimportable[one.name], False


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
    return seconds, bool(hits and hits[-1]), ""


def _build_launcher(compiled: Any) -> None:
    """Build the C modules that Triton's launches by CUDA go through: up to 3.6 it builds one a signature."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if compiled.metadata.target.backend == "cuda" and hasattr(driver, "make_launcher"):
        driver.CudaUtils()
        driver.CudaLauncher(compiled.src, compiled.metadata)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
