"""Parts of the torch.compile benchmarks: children with fresh caches, their rows, Inductor's own clock."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.kernel_timing import time_in_turns
from benchmarks.lib.processes.child_processes import child_command, child_environment
from benchmarks.lib.result_files import say

Row = dict[str, Any]
_BLOCK = 1 << 24


class RowFile:
    """Rows of children, one line each, kept between runs; failed ones are tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        results = [json.loads(line) for line in text.splitlines()]
        self.rows: list[Row] = [row for row in results if "error" not in row]

    def add(self, row: Row) -> None:
        """Keep a row, and say it."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
        numbers = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if _short(v)}
        say(json.dumps(numbers))

    def drop(self, **unwanted: Any) -> None:
        """Forget rows with these values."""
        gone = self.pick(**unwanted)
        self.rows = [row for row in self.rows if row not in gone]
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")

    def pick(self, **wanted: Any) -> list[Row]:
        """Rows with these values."""
        return [row for row in self.rows if all(row.get(k) == v for k, v in wanted.items())]


def _short(value: Any) -> bool:
    return isinstance(value, int | float | str)


class RowProcess:
    """A child that prints rows, unasked or one per line that it is sent; it ends when nobody listens.

    One that prints none for `patience_s` is ended.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], patience_s: float) -> None:
        self._process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._patience_s = patience_s

    def __enter__(self) -> RowProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def row(self) -> Row | None:
        """The next row; None where there will be none."""
        assert self._process.stdout is not None
        alarm = threading.Timer(self._patience_s, self._process.kill)
        alarm.start()
        try:
            for text in self._process.stdout:
                if text.startswith('{"row"'):  # Inductor prints objects of its own
                    return dict(json.loads(text))
            return None
        finally:
            alarm.cancel()

    def ask(self, line: object) -> Row:
        """The row that it answers. Raises `RuntimeError` where it ends instead."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        result = self.row()
        if result is None:
            raise RuntimeError(f"the child ended when it was asked for {line!r}: see its messages above")
        return result


def stream(command: Sequence[str], env: Mapping[str, str], patience_s: float) -> Iterator[Row]:
    """The rows that a child prints unasked, to its end."""
    with RowProcess(command, env, patience_s) as child:
        while (row := child.row()) is not None:
            yield row


def run_child(rows: RowFile, arguments: argparse.Namespace, role: str, given: Row, until: float) -> None:
    """One child to its end, or to the end of the time."""
    with tempfile.TemporaryDirectory(prefix="torch-compile-") as folder:
        seed = {"FORECAST_AUTOTUNE_SEED": str(given.get("repeat", 0))}
        cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        env = child_environment(Path(folder), **seed, **cache)
        command = child_command(sys.modules["__main__"].__file__ or "", arguments, role, given)
        for row in stream(command, env, arguments.patience):
            rows.add(row)
            if time.monotonic() > until:
                return


def print_row(row: Row) -> None:
    """Print a row for the parent."""
    print(json.dumps(row), flush=True)


def device_of(arguments: argparse.Namespace) -> str:
    """Return where a child works; a dry run needs constant weights for C++ templates."""
    if not arguments.null:
        return "cuda"
    torch._inductor.config.freezing = True
    return "cpu"


def compile_separately(
    module: Any, options: Mapping[str, Any], *, dynamic: bool | None = None
) -> Callable[..., Any]:
    """`torch.compile(module, options=options)`, sharing nothing with other calls of it in this process.

    To dynamo, backends with equal options are equal, and modules of one class run one code: of two modules
    that were compiled in the usual way, both would run what was compiled for the first.
    """
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, config_patches=dict(options))

    return torch.compile(module, backend=backend, dynamic=dynamic)  # type: ignore[no-any-return]


def restart_compile_workers() -> None:
    """Ready compile workers, so that all problems meet them in one state: before, the parent compiles."""
    from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

    shutdown_compile_workers()
    AsyncCompile.warm_pool()
    until = time.monotonic() + 60.0
    while not AsyncCompile.use_process_pool() and time.monotonic() < until:
        time.sleep(0.02)


def wake_compile_workers() -> None:
    """Compile workers that answer: Inductor ends them where nothing was compiled for a minute."""
    from torch._inductor.async_compile import AsyncCompile

    if AsyncCompile.use_process_pool():
        AsyncCompile.wakeup()
        AsyncCompile.process_pool().submit(os.getpid).result(60.0)


def read_library_files() -> None:
    """Read what torch and Triton load, so that no arm that is first on a machine waits for its disk."""
    folders = [Path(package.__file__ or "").parent for package in (torch, importlib.import_module("triton"))]
    for path in (path for folder in folders for path in folder.rglob("*")):
        if path.is_file() and (path.suffix == ".py" or ".so" in path.suffixes):
            with path.open("rb", buffering=0) as stream:
                while stream.read(_BLOCK):
                    pass


def synchronize(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def timed_in_turns(calls: Sequence[Callable[[], object]], rounds: int, device: str) -> list[float]:
    """Median milliseconds of every call, all of them once per round."""
    for call in calls:
        call()
    if device == "cuda":
        return [statistics.median(times) for times in time_in_turns(calls, rounds)]
    results: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, times in zip(calls, results, strict=True):
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
    return [statistics.median(times) for times in results]


def inductor_seconds(suffix: str, before: Mapping[str, float]) -> float:
    """Seconds that Inductor has spent on what ends so, since `before` (a `inductor_clock()`)."""
    return sum(s - before.get(name, 0.0) for name, s in inductor_clock().items() if name.endswith(suffix))


def inductor_clock() -> dict[str, float]:
    """Seconds by Inductor's own names, so far."""
    from torch._dynamo.utils import compilation_time_metrics

    return {name: sum(times) for name, times in compilation_time_metrics.items()}


def geometric_mean(values: Iterable[float]) -> float | None:
    """The geometric mean; None of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else None
