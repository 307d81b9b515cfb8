"""Compiles a variant for calls that are launched later, on all processors. Runs next to the variant, in its cell.

Compiling ahead saves time and decides nothing: a call that cannot be compiled here fails when it is launched, where
the judge sees why. Triton keeps what was compiled for the process's own launches.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple

import torch

from forecast_autotune.processors import usable_processors
from forecast_autotune.records import Argument, Config
from forecast_harness.sandbox.api import CandidateFault, JobContext
from forecast_harness.sandbox.cell_process import load
from forecast_harness.sandbox.jobs import CellAnswer, TensorArrays, TensorBytes
from forecast_harness.trials.variants.files import (
    VARIANT_FILE,
    WRITE_ENTRY,
    architecture_of,
    launchers_among,
    read_cache,
    write_cache,
)
from forecast_harness.verify.inputs import decode_arguments
from forecast_harness.verify.launch_cell import note_answer, note_question
from forecast_harness.verify.problem import LaunchCase

CELL_ENTRY = f"{__name__}:compile_calls"
_MOST_THREADS = 16
"""Threads that compile: an assembler runs beside each, and the cell's processes and threads are limited."""
LEAST_WAIT_S, _TIMES_THE_USUAL = 6.0, 5.0
"""A call is late if it compiles for more than so many seconds, and so many times as long as half of the calls took."""


def call_without_values(case: LaunchCase) -> dict[str, Any]:
    """The part of a case that decides how it is compiled: dtypes, alignment, sizes and scalars. Runs in the judge."""
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

    The arrays are files for Triton's cache, see `write_cache`: they are only read. All that the process
    computes meanwhile was asked of it.
    """
    note_question(state, arrays)
    write_cache({}, arrays, state)
    compile_only = sys.modules[state["entry"].__module__].compile_only
    compile_side_by_side([partial(compile_one, compile_only, request) for request in payload["calls"]])
    note_answer(state)
    return CellAnswer({})


def compile_side_by_side(tasks: Iterable[Callable[[], Any]]) -> None:
    """Call all of these tasks, which make Triton compile and return its result, and wait; their errors are forgotten.

    Triton's own mode compiles each program once, whoever asks for it. Releases without it have every call
    in a thread of its own. The parts of a launch beside its binary are made, too, see `_BuildingPool`.
    """
    threads = ThreadPoolExecutor(min(_MOST_THREADS, usable_processors()), "compile-ahead")
    with threads:
        pool = _BuildingPool(threads)
        mode = _triton_mode(pool)
        if mode is None:
            for future in [pool.submit(task) for task in tasks]:
                future.exception()
            return
        with contextlib.suppress(Exception), mode:
            for task in tasks:
                with contextlib.suppress(Exception):
                    task()


def compile_most(tasks: Sequence[Callable[[], Any]]) -> list[int]:
    """Like `compile_side_by_side`, without waiting for tasks that take far longer than half of them; their numbers.

    An assembler takes minutes for tiles that spill. They go on compiling when this returns: the process should end.
    """
    threads = ThreadPoolExecutor(min(_MOST_THREADS, usable_processors()), "compile-most")
    pool = _BuildingPool(threads)
    mode = _triton_mode(pool)
    if mode is None:
        return numbers_of_late([pool.submit(task) for task in tasks])
    futures: dict[int, Future[Any]] = {}
    mode.__enter__()
    for number, task in enumerate(tasks):
        before = len(pool.futures)
        with contextlib.suppress(Exception):
            task()
        if pool.futures[before:]:  # else it is the same program as an earlier one
            futures[number] = pool.futures[-1]
    numbers = list(futures)
    late = [numbers[place] for place in numbers_of_late(list(futures.values()))]
    if not late:
        with contextlib.suppress(Exception):
            mode.__exit__(None, None, None)
    return late


def numbers_of_late(futures: Sequence[Future[Any]]) -> list[int]:
    """Wait until half of them are done, and for the others a few times as long; the numbers of those not done then."""
    start, pending = time.perf_counter(), set(futures)
    while len(pending) > len(futures) // 2:
        pending = wait(pending, return_when=FIRST_COMPLETED).not_done
    half_s = time.perf_counter() - start
    late = wait(pending, max(LEAST_WAIT_S, _TIMES_THE_USUAL * half_s) - half_s).not_done
    return [number for number, future in enumerate(futures) if future in late]


class _BuildingPool:
    """Threads that compile, and make launchers of the results: all that Triton's mode asks of a pool.

    Triton up to 3.6 runs a C compiler for a launcher at the first launch of every signature, for a third of a second on
    an idle machine, and keeps the module on disk by its source. Later releases build nothing.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self._lock = pool, threading.Lock()
        self._signatures: set[Hashable] = set()
        """Signatures whose launcher is made."""
        self.futures: list[Future[Any]] = []

    def submit(self, task: Callable[[], Any]) -> Future[Any]:
        """Begin to compile."""
        self.futures.append(self._pool.submit(self._compile, task))
        return self.futures[-1]

    def _compile(self, task: Callable[[], Any]) -> Any:
        kernel = task()
        with contextlib.suppress(Exception):  # the launch raises the error again
            self._make_launcher(kernel)
        return kernel

    def _make_launcher(self, kernel: Any) -> None:
        """Make the launcher, unless another thread does."""
        signature = tuple(kernel.src.signature.items())
        with self._lock:
            if signature in self._signatures:
                return
            self._signatures.add(signature)
        from triton.runtime.driver import driver

        driver.active.launcher_cls(kernel.src, kernel.metadata)


def _triton_mode(pool: _BuildingPool) -> Any:
    import triton

    result = getattr(triton, "AsyncCompileMode", None)
    try:
        return None if result is None else result(pool, ignore_errors=True)
    except TypeError:  # a release that raises the first failure, and leaves the others' results unread
        return None


def compile_one(compile_only: Callable[..., Any], request: Mapping[str, Any]) -> Any:
    """Compile for one call; the result is Triton's."""
    # On the host, and never written: pages that nothing touches take no memory.
    views = {
        name: torch.empty(count + late, dtype=getattr(torch, dtype))[late:]
        for name, (dtype, count, late) in request["tensors"].items()
    }
    return compile_only(
        **{name: decode_arguments(value, views) for name, value in request["call"]["kwargs"].items()}
    )


BESIDE_ENTRY = f"{__name__}:compile_beside"
_NICENESS = 10
"""Opening a device waits for every other process that opens it: none is to wait for a processor meanwhile."""


class CompiledCalls(NamedTuple):
    """The result for the calls that a variant was to be compiled for."""

    files: TensorArrays
    """Files for the cache of the cell that launches; none where nothing could be compiled."""
    late: Sequence[int] = ()
    """The numbers of the calls that took too long, see `compile_most`: less than half, of a compilation that did take
    long. More the judge does not believe, as it is the variant's word."""


_NOTHING = CompiledCalls({})


class VariantCompiler:
    """Has a variant compiled ahead of its launches. Runs in the judge.

    A variant is compiled in a cell that never opens the device, while the cell that will launch it does: cells open a
    device one after the other, for seconds where many verify at once. It decides nothing. Its results are the
    variant's words under Triton's own keys, and they reach nobody but the variant's other cell, whose cache was the
    variant's to write before, too.
    """

    def __init__(self, work: JobContext, binaries: TensorArrays) -> None:
        """`binaries` of the base, as `binaries_as_arrays` gives them, tell what to compile for."""
        self._work, self._launchers = work, launchers_among(binaries)
        self._architecture = architecture_of(binaries)

    def compiled(self, calls: Sequence[Mapping[str, Any]]) -> CompiledCalls:
        """The compiled calls; empty where the variant cannot be compiled so, or no architecture is known."""
        if self._architecture is None:
            return _NOTHING
        payload = {
            "file": VARIANT_FILE,
            "architecture": self._architecture,
            "calls": [dict(call) for call in calls],
        }
        began = time.monotonic()
        try:
            with self._work.cell() as cell:
                if self._launchers:
                    cell.ask(WRITE_ENTRY, {}, self._launchers)
                answer = cell.ask(BESIDE_ENTRY, payload)
        except CandidateFault:  # the cell that launches raises the error
            return _NOTHING
        numbers = answer.value.get("late")
        late = {n for n in range(len(calls)) if n in numbers} if isinstance(numbers, list) else set()
        is_plausible = time.monotonic() - began >= LEAST_WAIT_S and 2 * len(late) <= len(calls)
        return CompiledCalls(answer.arrays, sorted(late) if is_plausible else ())


def compile_beside(
    payload: Mapping[str, Any], arrays: Mapping[str, TensorBytes], state: dict[str, Any]
) -> CellAnswer:
    """Import `file` and compile what `calls` lists, for a device of this `architecture`; the files as `read_cache`
    gives them, and the numbers of those that are `late`. Runs next to the variant. Raises whatever its file raises."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.driver import driver

    from forecast_harness.clocks.recording.device import AbsentDevice

    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    device = AbsentDevice(int(payload["architecture"]))
    device.launcher_cls = CudaLauncher
    driver.set_active(device)
    compile_only = load(payload["file"]).compile_only
    tasks = [partial(compile_one, compile_only, request) for request in payload["calls"]]
    late = compile_most(tasks)
    return CellAnswer({"late": late}, read_cache({}, {}, {}).arrays)


_INT32 = 1 << 31


def call_form(arguments: Sequence[Argument], scalars: Mapping[str, Any]) -> Hashable:
    """The part of a call that, beside the config, decides how a kernel is compiled: calls of one form share a binary.

    Dtypes and alignment of tensors; of whole numbers whether they are one, multiples of sixteen and how long; every
    other value as it is. Too fine a form costs a compilation, and is no mistake.
    """
    tensors = [(a.name, a.dtype, a.aligned) for a in arguments if a.kind == "tensor"]
    constants = {a.name for a in arguments if a.kind == "constexpr"}
    numbers = [(name, _scalar_form(value, name in constants)) for name, value in scalars.items()]
    return tuple(tensors), tuple(sorted(numbers, key=lambda item: item[0]))


def _scalar_form(value: Any, constant: bool) -> Hashable:
    if isinstance(value, int) and not isinstance(value, bool) and not constant:
        return value == 1, value % 16 == 0, -_INT32 <= value < _INT32
    if isinstance(value, float) and not constant:
        return "float"
    return repr(value)


class CompiledForms:
    """The configs that a variant was compiled with, for which forms of calls, and the launches of each."""

    def __init__(self) -> None:
        self._forms: dict[Config, set[Hashable]] = {}
        self._launches: Counter[Config] = Counter()

    def note(self, config: Config, form: Hashable | None) -> None:
        """Count a launch with a config, which is compiled for this form; None where no launch is possible."""
        if form is not None:
            self._forms.setdefault(config, set()).add(form)
        self._launches[config] += 1

    def instead_of(
        self, config: Config, among: Sequence[Config], form_with: Callable[[Config], Hashable | None]
    ) -> Config:
        """The config to launch a call with that was drawn for `config`: itself, if it was compiled for such a call.

        Else the least launched of `among` that was, and whose tiles are no larger: sizes were drawn to go beyond
        these, too. Itself where there is none. `form_with`: the call's form under a config; None where it has none.
        """
        own = form_with(config)
        if own is None or own in self._forms.get(config, ()):
            return config
        limit = largest_tile(config)
        candidates = [
            c
            for c in among
            if c in self._forms and largest_tile(c) <= limit and form_with(c) in self._forms[c]
        ]
        return min(candidates, key=lambda c: self._launches[c], default=config)


def largest_tile(config: Config) -> int:
    """The largest whole number among a config's meta-parameters; 0 without one."""
    numbers = [v for _, v in config.kwargs if isinstance(v, int) and not isinstance(v, bool)]
    return max(numbers, default=0)
