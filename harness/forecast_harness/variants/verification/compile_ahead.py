"""Compiles a variant for calls that are launched later, on all processors. Runs next to the variant, in its cell.

It saves time and decides nothing: a call that cannot be compiled here fails when it is launched, where the judge
sees why. Triton keeps what was compiled for the process's own launches.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes
from forecast_harness.variants.verification.base_binaries import write_cache
from forecast_harness.verify.launches.process_watch import note_answer, note_question
from forecast_harness.verify.problems.argument_codec import decode_arguments
from forecast_harness.verify.problems.problem import LaunchCase

CELL_ENTRY = f"{__name__}:compile_calls"
_MOST_THREADS = 16
"""Beside each of which an assembler runs; the cell's processes and threads are counted."""


def call_without_values(case: LaunchCase) -> dict[str, Any]:
    """What of a case decides how it is compiled: dtypes, alignment, sizes and scalars. Runs in the judge."""
    tensors = {
        name: [
            str(memory.dtype).removeprefix("torch."),
            memory.numel(),
            int(case.layouts.get(name) == "offset"),
        ]
        for name, memory in (*case.tensors.items(), *case.outputs.items())
    }
    return {"tensors": tensors, "call": case.call}


def compile_calls(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Compile what `calls` lists, each as `call_without_values` tells it; returns when all are done.

    The arrays are files for Triton's cache, see `write_cache`: what is among them is only read. What the process
    computes meanwhile was asked of it.
    """
    note_question(state)
    write_cache({}, arrays, state)
    compile_only = sys.modules[state["entry"].__module__].compile_only
    compile_side_by_side([partial(compile_one, compile_only, asked) for asked in payload["calls"]])
    note_answer(state)
    return CellAnswer({})


def compile_side_by_side(each: Iterable[Callable[[], Any]], *, own_threads: bool = False) -> None:
    """Call all of these, which make Triton compile and give what it compiled, and wait; what they raise is forgotten.

    Triton's own mode compiles each program once, whoever asks for it. Releases without it, and `own_threads`, have
    every call in a thread of its own. What a launch needs beside a binary is made, too, see `LauncherBuilder`.
    """
    threads = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "compile-ahead")
    with threads:
        pool = _BuildingPool(threads, LauncherBuilder())
        mode = None if own_threads else _triton_mode(pool)
        if mode is None:
            for future in [pool.submit(one) for one in each]:
                future.exception()
            return
        with contextlib.suppress(Exception), mode:
            for one in each:
                with contextlib.suppress(Exception):
                    one()


class LauncherBuilder:
    """Has the launcher of a compiled kernel made, once for each signature.

    Triton up to 3.6 runs a C compiler for it at the first launch of every signature, for a third of a second on an
    idle machine, and keeps the module on disk by its source. Later releases build nothing.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._lock = threading.Lock()

    def build(self, compiled: Any) -> None:
        """Make it, unless another thread does; a failure is left to the launch, which says what is wrong."""
        with contextlib.suppress(Exception):
            signature = tuple(compiled.src.signature.items())
            with self._lock:
                if signature in self._seen:
                    return
                self._seen.add(signature)
            from triton.runtime.driver import driver

            driver.active.launcher_cls(compiled.src, compiled.metadata)


class _BuildingPool:
    """Threads that compile, and make the launcher of what they compiled: all that Triton's mode asks of a pool."""

    def __init__(self, pool: ThreadPoolExecutor, launchers: LauncherBuilder) -> None:
        self._pool, self._launchers = pool, launchers

    def submit(self, compile_one: Callable[[], Any]) -> Future[Any]:
        """Begin to compile."""
        return self._pool.submit(self._compile, compile_one)

    def _compile(self, compile_one: Callable[[], Any]) -> Any:
        compiled = compile_one()
        self._launchers.build(compiled)
        return compiled


def _triton_mode(pool: _BuildingPool) -> Any:
    import triton

    made = getattr(triton, "AsyncCompileMode", None)
    try:
        return None if made is None else made(pool, ignore_errors=True)
    except TypeError:  # a release that raises what failed, and leaves the others' results unread
        return None


def compile_one(compile_only: Callable[..., Any], asked: Mapping[str, Any]) -> Any:
    """Compile for one call; what Triton gives."""
    # On the host, and never written: pages that nothing touches take no memory.
    views = {
        name: torch.empty(count + late, dtype=getattr(torch, dtype))[late:]
        for name, (dtype, count, late) in asked["tensors"].items()
    }
    return compile_only(
        **{name: decode_arguments(value, views) for name, value in asked["call"]["kwargs"].items()}
    )
