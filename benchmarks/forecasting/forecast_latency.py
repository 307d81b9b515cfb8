"""Claim: a cold 100-candidate problem compiles within 150 ms, and a large space costs little more to decide.

    python -m benchmarks.forecasting.forecast_latency --out benchmarks/results/forecast_latency.json

Fresh processes, with modules imported and the device up, call a decorated matmul with 100 configs for
the first time: the clock runs until the surrogate has answered, until the first compilation is under
way, and until all of the first are. Then the same kernel is called at another shape after its IR was
traced but nothing was compiled. Other fresh processes time the surrogate alone on 100, 1,000 and 10,000
configs, and everything that a decision does besides tracing, compiling and timing (a measurer answers at
once, with made-up times) on 100 and 10,000 configs, the config lists included.

Tracing and forecasting need no GPU: with `--null` the same code runs, compilers included, on a null device.
CPU milliseconds are given next to wall milliseconds, for machines that have other work to do.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton

from benchmarks import kernels
from benchmarks.lib import devices, result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune import Space, autotune
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.records import Candidate, Measurement, MeasuringCost, Outcome
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.tuning.loop import TuningTask, fingerprint, tune
from forecast_integrations.triton.compile.fork import ForkPool
from forecast_integrations.triton.compile.forked_children import ForkedChildren
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.call import KernelCall
from forecast_integrations.triton.trace import make_tracer

FIRST, OTHER = "matmul/4096x4096x4096", "matmul/2048x2048x2048"
COLD_MS, CACHED_MS, FORECAST_MS = 150.0, 15.0, 50.0
_BLOCKS = [16, 32, 64, 128, 256]
SPACES = {
    100: Space(
        {"BLOCK_M": _BLOCKS, "BLOCK_N": _BLOCKS, "BLOCK_K": [64], "GROUP_M": [8]},
        num_warps=[4, 8],
        num_stages=[3, 4],
    ),
    1000: Space(
        {"BLOCK_M": _BLOCKS, "BLOCK_N": _BLOCKS, "BLOCK_K": [32, 64], "GROUP_M": [8]},
        num_warps=[2, 4, 8, 16],
        num_stages=[2, 3, 4, 5, 6],
    ),
    10000: Space(
        {"BLOCK_M": _BLOCKS, "BLOCK_N": _BLOCKS, "BLOCK_K": _BLOCKS, "GROUP_M": [1, 2, 4, 8, 16]},
        num_warps=[2, 4, 8, 16],
        num_stages=[2, 3, 4, 5],
    ),
}


class _FirstMeasurementStarted(BaseException):
    """Ends a decision as soon as all that is timed here has happened."""


class _TimestampingSurrogate:
    """The surrogate that ships, loaded when first asked, noting when it has answered."""

    name = "noted"
    version = "1"

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note

    def forecast(self, query: Query) -> Forecasts:
        found = default_surrogate().forecast(query)
        self._note("forecast")
        return found


def configs_of_space(size: int) -> list[Any]:
    """The configs of a space as a user's list."""
    found = []
    for given in SPACES[size].assignments():
        launch = {name: given.pop(name) for name in ("num_warps", "num_stages", "num_ctas", "maxnreg")}
        found.append(triton.Config(given, **launch))
    return found


def cold_child(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child that is called for the first time, and then with its IR traced."""
    seen: dict[str, float] = {}
    clock = [0.0, 0.0]

    def note(name: str) -> None:
        seen.setdefault(f"{name}_ms", (time.perf_counter() - clock[0]) * 1e3)
        seen.setdefault(f"{name}_cpu_ms", (time.process_time() - clock[1]) * 1e3)

    start, schedule = ForkedChildren.start, ForkPool.schedule

    def started(self: ForkedChildren, tag: Any, task: Callable[[], Any], *dispatched: Any) -> None:
        start(self, tag, task, *dispatched)
        if isinstance(tag, Candidate):  # children that trace have another tag
            note("compiling")

    def scheduled(self: ForkPool, candidates: Sequence[Candidate]) -> None:
        schedule(self, candidates)
        if candidates:
            note("submitted")
            seen["submitted"] = len(candidates)
            raise _FirstMeasurementStarted

    ForkedChildren.start, ForkPool.schedule = started, scheduled  # type: ignore[method-assign]
    found = {}
    with devices.device(null) as where:
        devices.warm_up_device(where)
        for name, case in (("cold", FIRST), ("cached", OTHER)):
            (one,) = kernels.cases([case])
            data = one.make(where)
            if name == "cold":
                tuner = autotune(
                    configs_of_space(100),
                    ["M", "N", "K"],
                    surrogate=_TimestampingSurrogate(note),
                    store=False,
                )(one.kernel)
            else:  # a forecast needs all of the IR, and compiles nothing but the choice
                os.environ["FORECAST_AUTOTUNE_MODE"] = "skip"
                tuner[data["grid"]](*data["args"], **data["kwargs"])
                del os.environ["FORECAST_AUTOTUNE_MODE"]
                (one,) = kernels.cases([FIRST])
                data = one.make(where)
            devices.synchronize()
            seen.clear()
            clock[:] = [time.perf_counter(), time.process_time()]
            with suppress(_FirstMeasurementStarted):
                tuner[data["grid"]](*data["args"], **data["kwargs"])
            found[name] = dict(seen)
    return found


class _InstantMeasurer:
    """A measurer that answers at once: a smooth made-up function of the config, and noise."""

    workers = 16
    quiet = False

    def __init__(self, problem: str, seed: int) -> None:
        self._problem, self._noise = problem, np.random.default_rng(seed)

    def ready(self) -> Collection[Candidate]:
        return ()

    def compiling(self) -> Mapping[Candidate, float]:
        return {}

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        pass

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        for candidate in candidates:
            p = candidate.config.parameters()
            away = sum(
                abs(np.log2(float(p[f"BLOCK_{x}"] or 1)) - best)
                for x, best in zip("MNK", (7, 7, 6), strict=True)
            )
            away += abs(np.log2(candidate.config.num_warps) - 3) + 0.2 * abs(candidate.config.num_stages - 4)
            ms = float(0.2 * 1.3 ** (away + 0.1 * self._noise.standard_normal()))
            yield Measurement(self._problem, candidate, Outcome.OK, ms, compile_s=0.5)

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        return []

    def spent(self) -> MeasuringCost:
        return MeasuringCost()

    def close(self) -> None:
        pass


class _FirstCallSimulation:
    """What the integration does for one call, without compiling anything."""

    def __init__(self, where: str) -> None:
        (self.case,) = kernels.cases([FIRST])
        self.data = self.case.make(where)
        fn = self.case.kernel
        self.tuner = SimpleNamespace(fn=fn, arg_names=fn.arg_names)
        self.named = dict(zip(fn.arg_names, self.data["args"], strict=False))
        self.known: dict[str, str] = {}

    def task(self, size: int) -> TuningTask:
        """Configs, candidates, problem and grids, as on a first call."""
        fn, data = self.case.kernel, self.data
        found = describe.configs_by_candidate(configs_of_space(size))
        call = KernelCall(self.tuner, data["args"], data["kwargs"], found)
        problem = describe.describe(fn, describe.kernel_record(fn), self.named, ("4096",), data["grid"])
        return TuningTask(
            problem,
            list(found),
            describe.launch_grids(found, data["grid"], self.named, fn),
            make_tracer(call, self.known, 1),
            fingerprint(list(found)),
        )

    def decide(self, size: int, seed: int) -> dict[str, Any]:
        """One whole decision; returns what it took, in milliseconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        task = self.task(size)
        decision = tune(
            task,
            lambda: _InstantMeasurer(task.problem.id, seed),
            store=Store(None),
            surrogate=default_surrogate(),
            settings=Settings(seed=seed),
        )
        took = {"ms": (time.perf_counter() - wall) * 1e3, "cpu_ms": (time.process_time() - cpu) * 1e3}
        return {**took, "seed": seed, "measured": decision.measured, "rounds": len(decision.rounds)}


def front_child(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child that times the surrogate alone, and decisions without compiling and timing."""
    forecasts: dict[str, list[dict[str, float]]] = {}
    decisions: dict[str, list[dict[str, Any]]] = {}
    with devices.device(null) as where:
        made = _FirstCallSimulation(where)
        for size in SPACES:
            made.decide(size, given["seed"])  # traces what the decision asks for
            if size != 1000:
                decisions[str(size)] = [made.decide(size, given["seed"]) for _ in range(given["repeats"])]
            task = made.task(size)
            texts = dict(made.known)
            measured = list(
                _InstantMeasurer(task.problem.id, given["seed"]).measure(task.candidates[:: size // 20])
            )
            rows = forecasts[str(size)] = []
            for _ in range(given["repeats"]):
                for known in ([], measured):
                    query = Query(task.problem, list(task.candidates), task.grids, known, (), texts)
                    with single_threaded_blas():
                        wall, cpu = time.perf_counter(), time.process_time()
                        default_surrogate().forecast(query)
                        took = (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3
                    rows.append({"measured": len(known), "ms": took[0], "cpu_ms": took[1]})
    return {"forecasts": forecasts, "decisions": decisions}


def _median_of(rows: Sequence[dict[str, Any]], name: str) -> float:
    return round(float(statistics.median(row[name] for row in rows)), 1)


def run(a: Namespace, report: result_files.ResultFile) -> None:
    if a.null:
        report.data["note"] = (
            "null device: CPU only, nothing was launched on a GPU; where other work had the cores, "
            "cpu_ms says more than ms"
        )
    colds, fronts = [], []
    with tempfile.TemporaryDirectory(prefix="forecast-latency-", ignore_cleanup_errors=True) as folder:
        for i in range(a.processes):
            # A folder each: an earlier process's binaries would be found, and no child would compile.
            env = child_processes.child_environment(
                Path(folder) / str(i), FORECAST_AUTOTUNE_WORKERS=str(a.workers)
            )
            colds.append(child_processes.run_child(child_processes.child_command(__file__, a, "cold"), env))
            report.add("cold", colds[-1])
            result_files.say(
                f"process {i}: " + ", ".join(f"{k} {v['compiling_ms']:.0f} ms" for k, v in colds[-1].items())
            )
            given = {"seed": i, "repeats": a.repeats}
            fronts.append(
                child_processes.run_child(child_processes.child_command(__file__, a, "front", given), env)
            )
            report.add("front", fronts[-1])
    summary: dict[str, Any] = {"processes": a.processes, "workers": a.workers}
    for name in ("cold", "cached"):
        rows = [c[name] for c in colds]
        summary[name] = {
            key: {"median": _median_of(rows, key), "most": round(max(row[key] for row in rows), 1)}
            for key in sorted(rows[0])
        }
    summary["forecast"] = {
        size: {
            key: _median_of([r for f in fronts for r in f["forecasts"][size]], key)
            for key in ("ms", "cpu_ms")
        }
        for size in fronts[0]["forecasts"]
    }
    decided = {s: [r for f in fronts for r in f["decisions"][s]] for s in fronts[0]["decisions"]}
    names = ("ms", "cpu_ms", "measured", "rounds")
    summary["decision"] = {
        size: {key: _median_of(rows, key) for key in names} for size, rows in decided.items()
    }
    summary |= {
        "limits_ms": {"cold": COLD_MS, "cached": CACHED_MS, "forecast_1000": FORECAST_MS},
        "cold_within_limit": summary["cold"]["compiling_ms"]["median"] <= COLD_MS,
        "cached_within_limit": summary["cached"]["compiling_ms"]["median"] <= CACHED_MS,
        "forecast_within_limit": summary["forecast"]["1000"]["ms"] <= FORECAST_MS,
    }
    report.finish(summary)


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--processes", type=int, default=5, help="fresh processes of each kind, a seed each")
    parser.add_argument("--repeats", type=int, default=3, help="repetitions inside a process")
    parser.add_argument("--workers", type=int, default=16, help="children that compile at once")
    a = result_files.parse_arguments(parser)
    if a.child:
        # A surrogate that fails is replaced by exhaustive tuning, whose latency is not what is claimed.
        warnings.filterwarnings("error", message="surrogate .* failed")
        roles = {"cold": cold_child, "front": front_child}
        print(json.dumps(roles[a.child](a.given, a.null)), flush=True)
        return 0
    run(a, result_files.ResultFile(a, "forecast_latency"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
