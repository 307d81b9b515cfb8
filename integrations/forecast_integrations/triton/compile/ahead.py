"""Recorded compilations made again, before a program needs the binaries: in children, into Triton's cache."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from forecast_autotune.records.compilation import Compilation
from forecast_integrations.triton.compile.children import ForkedChildren
from forecast_integrations.triton.problem.compilations import decoded, kernel_of
from forecast_integrations.triton.problem.source import source_hash

_TIMEOUT_S = 300.0


@dataclasses.dataclass
class CompiledAhead:
    """What became of one record."""

    compilation: Compilation
    seconds: float = 0.0
    cached: bool = False
    trouble: str = ""


def compile_ahead(
    listed: Sequence[Compilation],
    workers: int,
    done: Callable[[int, CompiledAhead], object] = lambda count, one: None,
    timeout_s: float = _TIMEOUT_S,
) -> list[CompiledAhead]:
    """Compile into Triton's cache, each in a child of its own, on no device; in the order given.

    Raises `OSError` where no child can be had. A child that dies, or takes longer than `timeout_s`, costs its binary.
    """
    results, waiting = [], list(listed)[::-1]
    children = ForkedChildren()
    try:
        while waiting or len(children):
            while waiting and len(children) < workers:
                one = waiting.pop()
                if trouble := one.trouble or _import_trouble(one):
                    results.append(CompiledAhead(one, trouble=trouble))
                    done(len(results), results[-1])
                    continue
                children.start(one, partial(_compile, one))
            ended, _ = children.finished(0.25)
            for child, status in ended:
                answer = (
                    child.answer() if status == 0 else {"trouble": f"the compiler ended with status {status}"}
                )
                results.append(CompiledAhead(child.tag, **answer))
                done(len(results), results[-1])
            for child in children.overdue(timeout_s):
                children.kill(child)
                results.append(CompiledAhead(child.tag, trouble=f"not compiled after {timeout_s:g} s"))
                done(len(results), results[-1])
    finally:
        children.close()
    return results


def _import_trouble(one: Compilation) -> str:
    """Import the kernel in this process, whose forks have it then; why that cannot be, if so."""
    import triton

    if one.triton != triton.__version__:
        return f"it is of Triton {one.triton}, and this is {triton.__version__}"
    try:
        if source_hash(kernel_of(one)) != one.source_sha256:
            return "its source has changed"
    except Exception as error:
        return f"{one.name} cannot be imported ({type(error).__name__}: {error})"[:300]
    return ""


def _compile(one: Compilation) -> dict[str, Any]:
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
        triton.compile(source, target=GPUTarget(**one.target), options=options)
    except Exception as error:
        return {"trouble": f"{type(error).__name__}: {error}"[:300]}
    return {"seconds": time.perf_counter() - began, "cached": bool(hits and hits[-1])}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value
