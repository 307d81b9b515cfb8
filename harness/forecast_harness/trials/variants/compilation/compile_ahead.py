"""Compiles a variant for calls that are launched later, on all processors. Runs next to the variant, in its cell.

It saves time and decides nothing: a call that cannot be compiled here fails when it is launched, where the judge
sees why. Triton keeps what was compiled for the process's own launches.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch

from forecast_harness.sandbox.jobs import CellAnswer, TensorBytes
from forecast_harness.trials.variants.compilation.base_binaries import write_cache
from forecast_harness.verify.launches.process_watch import note_answer, note_question
from forecast_harness.verify.problems.argument_codec import decode_arguments
from forecast_harness.verify.problems.problem import LaunchCase

CELL_ENTRY = f"{__name__}:compile_calls"
_MOST_THREADS = 16
"""Beside each of which an assembler runs; the cell's processes and threads are counted."""
LEAST_WAIT_S, _TIMES_THE_USUAL = 6.0, 5.0
"""What compiles longer than so many seconds, and than so many times what half of the calls took, is late."""


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


def compile_most(each: Sequence[Callable[[], Any]], *, builds_launchers: bool = True) -> list[int]:
    """Like `compile_side_by_side`, without waiting for what takes far longer than half of them; the numbers of those.

    An assembler takes minutes for tiles that spill. They go on compiling when this returns: the process should end.
    """
    threads = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "compile-most")
    pool = _BuildingPool(threads, LauncherBuilder() if builds_launchers else None)
    mode = _triton_mode(pool)
    if mode is None:
        return numbers_of_late([pool.submit(one) for one in each])
    begun: dict[int, Future[Any]] = {}
    mode.__enter__()
    for number, one in enumerate(each):
        before = len(pool.begun)
        with contextlib.suppress(Exception):
            one()
        if pool.begun[before:]:  # else it is the same program as an earlier one
            begun[number] = pool.begun[-1]
    numbers = list(begun)
    late = [numbers[place] for place in numbers_of_late(list(begun.values()))]
    if not late:
        with contextlib.suppress(Exception):
            mode.__exit__(None, None, None)
    return late


def numbers_of_late(begun: Sequence[Future[Any]]) -> list[int]:
    """Wait until half of them are done, and for the others a few times as long; which are still under way."""
    began, left = time.perf_counter(), set(begun)
    while len(left) > len(begun) // 2:
        left = wait(left, return_when=FIRST_COMPLETED).not_done
    half_s = time.perf_counter() - began
    late = wait(left, max(LEAST_WAIT_S, _TIMES_THE_USUAL * half_s) - half_s).not_done
    return [number for number, future in enumerate(begun) if future in late]


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

    def __init__(self, pool: ThreadPoolExecutor, launchers: LauncherBuilder | None) -> None:
        self._pool, self._launchers = pool, launchers
        self.begun: list[Future[Any]] = []

    def submit(self, compile_one: Callable[[], Any]) -> Future[Any]:
        """Begin to compile."""
        self.begun.append(self._pool.submit(self._compile, compile_one))
        return self.begun[-1]

    def _compile(self, compile_one: Callable[[], Any]) -> Any:
        compiled = compile_one()
        if self._launchers is not None:
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
