"""Claim: before its first plan, a decision costs the main process 30 ms at most beside tracing, on long kernels too.

    python -m benchmarks.tuning.forecast_cost --null --out benchmarks/results/forecast_cost.json

Fresh processes trace, read and forecast a kernel of about 200, 500 and 1,500 operations with 16 and 64
candidates, each with IR of its own: a first decision, which also loads the surrogate, and decisions about
further shapes, which read remembered texts again and know what the earlier ones have measured. CPU milliseconds
of the main process are counted: to start the children that trace and read, to take in what they answer, to
load, to forecast, and to forecast again after each measurement. Beside it stands what the main process would
take to parse the same texts and to read their facts itself, and the wall milliseconds until all facts are there,
which are mostly Triton's own.

Nothing is compiled or launched. With `--null` it needs no GPU, and the result is one of this machine's CPU; with
a GPU, a fork has more of a process to copy.
"""

# Triton kernels carry no annotations: their arguments have no Python type.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.lib import devices, result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune.features.stored_facts import collect_facts
from forecast_autotune.features.traced_texts import TracedTexts
from forecast_autotune.features.ttir.extraction import extract_facts
from forecast_autotune.features.ttir.module import cached_module
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.records import Measurement, Outcome
from forecast_autotune.store import Store
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.tuning.forecaster import TaskForecaster
from forecast_autotune.tuning.task import TuningTask
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.trace import make_tracer

STEPS = {"small": 5, "medium": 15, "large": 48}
"""Unrolled steps of the kernel; one has about 30 operations."""
COUNTS = (16, 64)
SHAPES = (2048, 4096, 1024, 8192)
MAIN_MS, UPDATE_MS = 30.0, 3.0
"""Limits of the main process before the first plan, and after each measurement."""
PHASES = ("load_ms", "start_ms", "take_in_ms", "forecast_ms")


@triton.jit
def unrolled_products(
    left_ptr,
    right_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    scale,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, inner, BLOCK_K):
        place = first + tl.arange(0, BLOCK_K)
        for step in tl.static_range(STEPS):
            left = tl.load(
                left_ptr + (step * rows + row[:, None]) * inner + place[None, :],
                mask=(row[:, None] < rows) & (place[None, :] < inner),
                other=0.0,
            )
            right = tl.load(
                right_ptr + (step * inner + place[:, None]) * columns + column[None, :],
                mask=(place[:, None] < inner) & (column[None, :] < columns),
                other=0.0,
            )
            part = tl.dot(left, right)
            largest = tl.max(part, 1)
            total += tl.exp2((part - largest[:, None]) * scale)
    tl.store(
        out_ptr + row[:, None] * columns + column[None, :],
        total.to(tl.float16),
        mask=(row[:, None] < rows) & (column[None, :] < columns),
    )


class _Clock:
    """CPU milliseconds of this process, by phase."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens inside under this name."""
        begin = time.process_time()
        try:
            yield
        finally:
            self.took[name] = self.took.get(name, 0.0) + (time.process_time() - begin) * 1e3


def configs(size: str, count: int) -> list[Any]:
    """As many configs, each with IR of its own."""
    blocks = [16, 32, 64, 128]
    every = [
        triton.Config({"STEPS": STEPS[size], "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k})
        for m in blocks
        for n in blocks
        for k in blocks
    ]
    return every[:: len(every) // count]


def one_decision(
    where: str, size: str, count: int, extent: int, known: TracedTexts, store: Store, workers: int
) -> dict[str, Any]:
    """What a decision does before its first plan, and six updates; milliseconds of the main process by phase."""
    clock, fn = _Clock(), unrolled_products
    steps = STEPS[size]

    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float16, device="meta" if where == "meta" else where)

    args = (tensor(steps, extent, 1024), tensor(steps, 1024, extent), tensor(extent, extent))
    args = (*args, extent, extent, 1024, 0.5)  # type: ignore[assignment]
    tuner = SimpleNamespace(fn=fn, arg_names=fn.arg_names)

    def grid(meta: Mapping[str, Any]) -> tuple[int, int]:
        return triton.cdiv(extent, meta["BLOCK_M"]), triton.cdiv(extent, meta["BLOCK_N"])

    found = describe.configs_by_candidate(configs(size, count))
    named = dict(zip(fn.arg_names, args, strict=False))
    problem = describe.describe(fn, describe.kernel_record(fn), named, (str(extent),), grid)
    grids = describe.launch_grids(found, grid, named, fn)
    call = KernelCall(tuner, args, {"grid": grid}, found)
    task = TuningTask(problem, list(found), grids, make_tracer(call, known, workers, problem, grids))
    relatives = store.relatives(problem)
    surrogate = default_surrogate()
    forecaster = TaskForecaster(task, surrogate)
    begin = time.perf_counter()
    with clock.phase("start_ms"):
        forecaster.traces.start_initial()
    with clock.phase("load_ms"):
        surrogate.load()
    with clock.phase("take_in_ms"):
        forecaster.traces.trace_initial()
    facts_s = time.perf_counter() - begin
    with clock.phase("forecast_ms"), single_threaded_blas():
        order = forecaster.forecast((), relatives).order()
    with single_threaded_blas():
        rows, updates = list[Measurement](), list[float]()
        for place in order[:6].tolist():
            candidate = forecaster.candidates[place]
            ms = 0.2 + 0.01 * len(rows)
            rows.append(Measurement(problem.id, candidate, Outcome.OK, ms, grid=grids[candidate]))
            again = _Clock()
            with again.phase("ms"):
                forecaster.forecast(tuple(rows), relatives)
            updates.append(again.took["ms"])
    for row in rows:
        store.add(problem, row)
    measured, texts = [m.candidate for m in rows], forecaster.traces.texts
    store.put_facts(problem, collect_facts(problem, measured, grids, texts, within_s=10.0))
    return {
        **clock.took,
        "main_ms": sum(clock.took.values()),
        "update_ms": statistics.median(updates),
        "facts_wall_ms": facts_s * 1e3,
        "texts": len(texts),
        "lines": max(text.count("\n") for text in texts.values()),
        "relatives": len(relatives),
        "read_here": _read_here(texts, forecaster),
    }


def _read_here(texts: TracedTexts, forecaster: TaskForecaster) -> dict[str, float]:
    """What this process takes to parse these texts, and then to read their facts."""
    clock, problem = _Clock(), forecaster.problem
    names, keys = forecaster.candidates.assignments
    whole = {name: texts[name] for name in texts}
    cached_module.cache_clear()
    with clock.phase("parse_ms"):
        for text in whole.values():
            cached_module(text)
    with clock.phase("facts_ms"):
        for place, candidate in enumerate(forecaster.candidates):
            extract_facts(whole[names[keys[place]]], problem.arguments, forecaster.grids[candidate])
    return clock.took


def decisions_child(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child that makes a first decision, and then others about further shapes."""
    known, store = TracedTexts(), Store(None)
    with devices.device(null) as where:
        devices.warm_up_device(where)
        rows = [
            one_decision(where, given["size"], given["count"], extent, known, store, given["workers"])
            for extent in SHAPES
        ]
    return {"first": rows[0], "later": rows[1:]}


def _medians(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = (*PHASES, "main_ms", "update_ms", "facts_wall_ms")
    found = {name: round(statistics.median(row[name] for row in rows), 1) for name in names}
    for name in ("parse_ms", "facts_ms"):
        found[f"here_{name}"] = round(statistics.median(row["read_here"][name] for row in rows), 1)
    return found


def run(a: Namespace, report: result_files.ResultFile) -> None:
    if a.null:
        report.data["note"] = (
            "null device: milliseconds of this machine's CPU; nothing was compiled or launched"
        )
    summary: dict[str, Any] = {
        "processes": a.processes,
        "workers": a.workers,
        "limits": {"main_ms": MAIN_MS, "update_ms": UPDATE_MS},
    }
    with tempfile.TemporaryDirectory(prefix="forecast-cost-", ignore_cleanup_errors=True) as folder:
        for size in STEPS:
            for count in COUNTS:
                found = []
                for i in range(a.processes):
                    env = child_processes.child_environment(Path(folder) / f"{size}-{count}-{i}")
                    given = {"size": size, "count": count, "workers": a.workers}
                    command = child_processes.child_command(__file__, a, "decisions", given)
                    found.append(child_processes.run_child(command, env))
                    report.add("decisions", {"size": size, "count": count, **found[-1]})
                first, later = [f["first"] for f in found], [row for f in found for row in f["later"]]
                summary[f"{size}/{count}"] = {
                    "lines": first[0]["lines"],
                    "first": _medians(first),
                    "later": _medians(later),
                }
                result_files.say(f"{size}, {count} candidates: {json.dumps(summary[f'{size}/{count}'])}")
    cases = [
        one[when] for one in summary.values() if isinstance(one, dict) and "first" in one for when in one
    ]
    timed = [case for case in cases if isinstance(case, dict)]
    summary["most_main_ms"] = max(case["main_ms"] for case in timed)
    summary["most_update_ms"] = max(case["update_ms"] for case in timed)
    summary["within_limits"] = summary["most_main_ms"] <= MAIN_MS and summary["most_update_ms"] <= UPDATE_MS
    report.finish(summary)


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--processes", type=int, default=3, help="fresh processes of each kind")
    parser.add_argument("--workers", type=int, default=16, help="children that trace and read at once")
    a = result_files.parse_arguments(parser)
    if a.child:
        print(json.dumps(decisions_child(a.given, a.null)), flush=True)
        return 0
    run(a, result_files.ResultFile(a, "forecast_cost"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
