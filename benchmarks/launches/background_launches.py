"""Claim: while a kernel is tuned in the background, its launches wait no longer than the budget, and compute the same.

    python -m benchmarks.launches.background_launches --out benchmarks/results/background_launches.json
    python -m benchmarks.launches.background_launches --out FILE --null   # dry run without a GPU

Each case is launched again and again in `background` mode, from an empty store and an empty compile cache, until its
choice is final and `--launches` launches are made. Milliseconds of a launch are the host's, from the call until the
device is idle; those before the choice is final stand beside those after it, and the first launch, which compiles what
it launches, stands by itself. After each launch its outputs are compared bit by bit with those of one launch of its
config alone. In the end the choice is timed in turns with the one that `tune` mode makes.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import triton

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from forecast_autotune import autotune
from forecast_autotune.store import Store
from forecast_harness.verify.bits import same_bits
from forecast_integrations.triton.problem.describe import to_config

if TYPE_CHECKING:
    import torch

CASES = ("rms_norm/64x5120", "softmax/4096x1000", "matmul/2048x2048x2048")
STALLS_MS = (10.0, 20.0, 50.0)


def quantiles(times_ms: Sequence[float]) -> dict[str, float]:
    """Median, high quantiles and largest of some milliseconds; empty where there are none."""
    if not times_ms:
        return {}
    ordered = sorted(times_ms)
    found = {
        name: ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))
    }
    return {name: round(ms, 4) for name, ms in found.items()}


class OutputComparison:
    """Compares a launch's outputs, bit by bit, with those of one launch of its config alone."""

    def __init__(self, case: kernels.Case, where: str) -> None:
        self._case, self._apart = case, case.make(where)
        self._expected: dict[str, list[torch.Tensor]] = {}
        self.wrong = 0
        self.compared = 0

    def compare(self, data: kernels.Data, config: Any) -> None:
        """Look at the outputs of the latest launch, which had this config."""
        if data["args"][0].device.type == "meta":
            return
        if str(config) not in self._expected:
            kernels.reset(self._case, self._apart)
            kernels.launch(self._case, self._apart, config)
            self._expected[str(config)] = [output.clone() for output in self._apart["outputs"]]
        same = all(
            same_bits(got, want)
            for got, want in zip(data["outputs"], self._expected[str(config)], strict=True)
        )
        self.compared += 1
        self.wrong += not same


def tuned(case: kernels.Case, mode: str, most: int) -> Any:
    """A tuner over the case's kernel and so many of its configs, that knows nothing and has compiled nothing."""
    os.environ["TRITON_CACHE_DIR"] = folder = tempfile.mkdtemp(prefix="background_launches_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return autotune(
        configs=kernels.thinned(case, most),
        key=list(case.key),
        reset_to_zero=list(case.reset_to_zero) or None,
        store=Store(None),
        mode=mode,
    )(triton.jit(case.kernel.fn))


def launched_in_background(case: kernels.Case, where: str, stall_ms: float, a: Namespace) -> dict[str, Any]:
    """What launches of a case took while it was tuned under a budget, and after."""
    os.environ["FORECAST_AUTOTUNE_STALL_MS"] = str(stall_ms)
    tuner, data, comparison = (
        tuned(case, "background", a.configs),
        case.make(where),
        OutputComparison(case, where),
    )
    before: list[float] = []
    after: list[float] = []
    served: list[str] = []
    begin = time.perf_counter()
    settled_s = 0.0
    while len(before) + len(after) < a.launches or len(after) < a.launches // 10:
        if time.perf_counter() - begin > a.seconds:
            break
        if where != "meta":
            kernels.reset(case, data)
        devices.synchronize()
        pending = not tuner.cache
        start = time.perf_counter()
        tuner[data["grid"]](*data["args"], **data["kwargs"])
        devices.synchronize()
        (before if pending else after).append(1e3 * (time.perf_counter() - start))
        comparison.compare(data, tuner.best_config)
        if not served or served[-1] != str(tuner.best_config):
            served.append(str(tuner.best_config))
        if pending and tuner.cache:
            settled_s = time.perf_counter() - begin
    decision = tuner.decision
    return {
        "case": case.name,
        "stall_ms": stall_ms,
        "first_ms": round(before[0], 3),
        "before": quantiles(before[1:]),
        "after": quantiles(after),
        "launches_before": len(before),
        "launches_after": len(after),
        "settled": bool(tuner.cache),
        "settled_s": round(settled_s, 3),
        "served": served,
        "compared": comparison.compared,
        "wrong": comparison.wrong,
        "evidence": str(decision.evidence),
        "chosen_ms": decision.median_ms,
        "measured": decision.measured,
        "chosen": to_config(tuner.best_config).to_json(),
        "longest_ms": [round(ms, 4) for ms in sorted(before[1:])[-200:]],
    }


def slowdown(case: kernels.Case, where: str, chosen: Any, best: Any, rounds: int) -> float:
    """How much slower one config is than another, timed in turns: 0.01 is 1 %."""
    data = case.make(where)
    calls = [partial(kernels.launch, case, data, config) for config in (chosen, best)]
    for call in calls:
        call()
    ours, theirs = (statistics.median(t) for t in kernel_timing.time_in_turns(calls, rounds))
    return ours / theirs - 1


def run(a: Namespace, report: result_files.ResultFile) -> None:
    """All cases under all budgets; a result is written before the next begins."""
    found = []
    with devices.device(a.null) as where:
        devices.warm_up_device(where)
        for name in a.cases[: 1 if a.null else None]:
            (case,) = kernels.cases([name])
            tuner, data = tuned(case, "tune", a.configs), case.make(where)
            tuner[data["grid"]](*data["args"], **data["kwargs"])
            for stall_ms in a.stalls[: 1 if a.null else None]:
                one = launched_in_background(case, where, stall_ms, a)
                chosen = kernel_timing.config_from_json(one["chosen"])
                one["tune_ms"] = tuner.decision.median_ms
                one["slowdown"] = round(slowdown(case, where, chosen, tuner.best_config, a.rounds), 5)
                found.append(one)
                report.add("runs", one)
                result_files.say(
                    f"{name} at {stall_ms:g} ms/s: settled after {one['settled_s']} s, before {one['before']}, "
                    f"after {one['after']}, {one['wrong']} of {one['compared']} wrong, {one['slowdown']:+.2%}"
                )
    report.finish(summarize(found))


def summarize(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all runs; milliseconds by which the 99.9th percentile while tuning is over that after it and the budget."""
    return {
        "wrong": sum(one["wrong"] for one in found),
        "compared": sum(one["compared"] for one in found),
        "settled": sum(one["settled"] for one in found),
        "runs": len(found),
        "largest_slowdown": max(one["slowdown"] for one in found),
        "most_switches": max(len(one["served"]) - 1 for one in found),
        "largest_p999_ms": max(one["before"].get("p999", 0.0) for one in found),
        **{
            f"p999_over_{stall_ms:g}_ms": max(
                round(one["before"].get("p999", 0.0) - one["after"].get("p50", 0.0) - stall_ms, 4)
                for one in found
                if one["stall_ms"] == stall_ms
            )
            for stall_ms in sorted({one["stall_ms"] for one in found})
        },
    }


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="cases of benchmarks.kernels")
    parser.add_argument("--stalls", nargs="+", type=float, default=list(STALLS_MS), help="ms a second")
    parser.add_argument("--configs", type=int, default=1000, help="most configs of a case")
    parser.add_argument("--launches", type=int, default=10_000, help="launches of a case at least")
    parser.add_argument("--seconds", type=float, default=60.0, help="most seconds of a case under one budget")
    parser.add_argument("--rounds", type=int, default=200, help="launches of each of the two choices")
    a = result_files.parse_arguments(parser)
    run(a, result_files.ResultFile(a, "background-launches"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
