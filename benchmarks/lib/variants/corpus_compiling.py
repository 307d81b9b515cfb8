"""Compiling a pool of sources ahead, on all cores, in a process without a device: see `corpus_recording`.

A forked child compiles a few configs of one source, for every shape that it is timed at: where shapes share
a binary, Triton finds it in the child's memory. What children would each do for themselves, and what takes
longer than compiling (importing the kernels, hashing Triton), their parent has done before. A child that dies
or hangs costs only its task: its configs get children of their own then, so that the guilty one is known.
Binaries travel through Triton's cache.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import kernels
from benchmarks.lib import devices
from benchmarks.lib.processes.kernel_processes import print_line
from benchmarks.lib.variants.corpus_preparing import PreparedKernel, PreparedSource, read_pool
from forecast_autotune import autotune
from forecast_autotune.records import Candidate, Config, Outcome
from forecast_integrations.triton.compile.forked_children import ForkedChild, ForkedChildren
from forecast_integrations.triton.compile.pool import without_device
from forecast_integrations.triton.null_device import null_device
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall, outcome_of
from forecast_integrations.triton.variants.loading import LoadedVariant, add_variants, load_variant

CONFIGS_AT_ONCE = 3
"""Configs of a source that one child compiles."""
COMPILE_S = 15.0
"""A config whose compilation takes longer is given up: that is a label of its own."""

CompiledRow = list[Any]
"""Seconds, and what failed: `{place of the shape: [outcome, message]}`."""


# --- calls of one kernel at all its shapes ---


@dataclass
class ShapedCalls:
    """The calls of a kernel, one per shape, to which sources are added one by one."""

    prepared: PreparedKernel
    cases: list[kernels.Case]
    data: list[kernels.Data]
    calls: list[KernelCall]
    folder: Path | None
    """Where files of sources are written; None: a temporary folder of this process."""

    @classmethod
    def of(cls, prepared: PreparedKernel, where: str, folder: Path | None = None) -> ShapedCalls:
        """With the base alone; `where` is the device of the inputs."""
        cases = prepared.cases()
        data = [case.make(where) for case in cases]
        lead = cases[0]
        listed = kernels.configs(lead)
        options: dict[str, Any] = {"store": False, "reset_to_zero": list(lead.reset_to_zero)}
        tuner = autotune(listed, list(lead.key), **options)(lead.kernel)
        # Shared by all calls, so that a source is loaded once, and compiled once for shapes of a kind.
        configs, functions = describe.configs_by_candidate(listed), dict[str, LoadedVariant]()
        calls = [
            # As Triton passes them: the base kernel's own `run` wants to be told that it is to launch.
            KernelCall(
                tuner,
                tuple(d["args"]),
                {**d["kwargs"], "grid": d["grid"], "warmup": False},
                configs,
                functions,
            )
            for d in data
        ]
        return cls(prepared, cases, data, calls, folder)

    def add(self, source: PreparedSource) -> None:
        """Load a source; the base is there already. Raises `VariantError` for one that cannot be loaded."""
        if source.record is None:
            return
        loaded = load_variant(source.record, self.cases[0].kernel, lambda args, kwargs: True, self.folder)
        call = self.calls[0]
        base = {c: config for c, config in call.configs.items() if c.is_base_variant}
        functions: Any = call.functions
        configs: Any = call.configs
        functions[loaded.name] = loaded
        configs.update(add_variants(base, {loaded.name: loaded}))


# --- in a forked child ---


def compile_configs(shaped: ShapedCalls, source: PreparedSource, which: Sequence[int]) -> list[CompiledRow]:
    """Compile some configs of a source, for all its shapes; a row for each."""
    try:
        shaped.add(source)
    except Exception as error:
        failed = {str(i): _failure(error) for i in source.shapes}
        return [[0.0, failed] for _ in which]
    return [_compile_config(shaped, source, source.configs[i]) for i in which]


def _compile_config(shaped: ShapedCalls, source: PreparedSource, config: Config) -> CompiledRow:
    begin = time.perf_counter()
    failed: dict[str, list[str]] = {}
    by_kind: dict[str, list[str]] = {}
    for place in source.shapes:
        kind = shaped.prepared.kinds[place]
        if kind not in by_kind:
            try:
                shaped.calls[place].compile(Candidate(config, source.variant))
                continue
            except Exception as error:
                by_kind[kind] = _failure(error)
        failed[str(place)] = by_kind[kind]
    return [round(time.perf_counter() - begin, 3), failed]


def _failure(error: Exception) -> list[str]:
    outcome = outcome_of(error)
    known = outcome is not None and outcome is not Outcome.RUNTIME_ERROR
    said = f"{type(error).__name__}: {error}"
    return [str(outcome if known else Outcome.COMPILE_ERROR), said[:300]]


# --- in the process that compiles ---


@dataclass(frozen=True)
class CompileTask:
    """Some configs of one source."""

    kernel: int
    source: int
    which: tuple[int, ...]


class PoolCompiler:
    """Compiles kernel after kernel, always on all cores."""

    def __init__(self, pool: Sequence[PreparedKernel], ahead: Path, workers: int) -> None:
        """`ahead` is the folder that what became of a kernel is written to."""
        self._pool, self._ahead, self._workers = pool, ahead, workers
        self._tasks: deque[CompileTask] = deque()
        self._left: dict[int, int] = {}
        self._rows: dict[int, dict[str, dict[int, CompiledRow]]] = {}
        self._begun: dict[int, float] = {}
        self._shaped: dict[int, ShapedCalls] = {}
        for at, one in enumerate(pool):
            self._rows[at] = {s.name: {} for s in one.sources}
            self._left[at] = sum(len(s.configs) for s in one.sources)
            for number, source in enumerate(one.sources):
                whole = range(len(source.configs))
                for begin in range(0, len(whole), CONFIGS_AT_ONCE):
                    which = tuple(whole[begin : begin + CONFIGS_AT_ONCE])
                    self._tasks.append(CompileTask(at, number, which))

    def run(self) -> None:
        """Compile everything; a line is printed as each kernel is ready."""
        children = ForkedChildren()
        devices.warm_up_device("meta")
        compile_one = without_device(compile_configs)
        while self._tasks or len(children):
            while self._tasks and len(children) < self._workers:
                task = self._tasks.popleft()
                source = self._pool[task.kernel].sources[task.source]
                children.start(task, partial(compile_one, self._calls(task.kernel), source, task.which))
            for child, _ in children.finished(0.2)[0]:
                self._end(child)
            for child in children.overdue(COMPILE_S):
                alone = len(child.tag.which) == 1
                if alone or time.perf_counter() - child.began > 1.5 * COMPILE_S:
                    children.kill(child)
                    self._lost(child.tag, Outcome.TIMEOUT, f"not compiled after {COMPILE_S:g} s")
        children.close()

    def _calls(self, at: int) -> ShapedCalls:
        """The calls of a kernel, with the base alone."""
        if at not in self._shaped:
            self._begun.setdefault(at, time.perf_counter())
            self._shaped[at] = ShapedCalls.of(self._pool[at], "meta", self._ahead)
        return self._shaped[at]

    def _end(self, child: ForkedChild) -> None:
        try:
            rows = child.answer()
        except ValueError:
            self._lost(child.tag, Outcome.COMPILE_ERROR, "the compiler died")
            return
        self._keep(child.tag, rows)

    def _lost(self, task: CompileTask, outcome: Outcome, message: str) -> None:
        if len(task.which) > 1:
            self._tasks.extendleft(CompileTask(task.kernel, task.source, (i,)) for i in task.which)
            return
        source = self._pool[task.kernel].sources[task.source]
        seconds = COMPILE_S if outcome is Outcome.TIMEOUT else 0.0
        self._keep(task, [[seconds, {str(i): [str(outcome), message] for i in source.shapes}]])

    def _keep(self, task: CompileTask, rows: Sequence[CompiledRow]) -> None:
        prepared = self._pool[task.kernel]
        found = self._rows[task.kernel]
        found[prepared.sources[task.source].name].update(zip(task.which, rows, strict=True))
        self._left[task.kernel] -= len(rows)
        if self._left[task.kernel] == 0:
            self._write(task.kernel)

    def _write(self, at: int) -> None:
        kernel, rows = self._pool[at].kernel, self._rows.pop(at)
        del self._shaped[at]
        whole = {name: [row for _, row in sorted(mine.items())] for name, mine in rows.items()}
        part = self._ahead / f"{kernel}.part"
        part.write_text(json.dumps(whole), encoding="utf-8")
        part.replace(self._ahead / f"{kernel}.json")
        every = [row for mine in whole.values() for row in mine]
        failed = sum(bool(row[1]) for row in every)
        core_s = round(sum(row[0] for row in every), 1)
        seconds = round(time.perf_counter() - self._begun[at], 1)
        told = {"compiled": len(every) - failed, "failed": failed, "core_s": core_s, "seconds": seconds}
        print_line({"case": kernel, **told})


def compile_pool(given: Mapping[str, Any]) -> None:
    """Compile the wanted sources of a pool: `{"pool", "ahead", "workers", "left": {kernel: [sources]}}`."""
    left: Mapping[str, Sequence[str]] = json.loads(Path(given["left"]).read_text(encoding="utf-8"))
    pool = [narrowed(one, left[one.kernel]) for one in read_pool(Path(given["pool"])) if one.kernel in left]
    with null_device():
        PoolCompiler(pool, Path(given["ahead"]), given["workers"]).run()


def narrowed(prepared: PreparedKernel, names: Sequence[str]) -> PreparedKernel:
    """A kernel with these sources alone."""
    kept = tuple(one for one in prepared.sources if one.name in names)
    return PreparedKernel(prepared.kernel, prepared.shapes, prepared.kinds, kept)
