"""Claim: the first call of a matmul with 72 configs returns many times sooner than with `triton.autotune`.

    python -m benchmarks.tuning.matmul72 --out benchmarks/results/tune_matmul72.json

fp16, 4096^3, then 2048^3 in the same process. Every run of a contender is a fresh process with empty
caches of Triton and of ours. Before the clock starts all have imported everything, made their inputs
and launched one trivial kernel; the clock runs from just before the decorated call until the device is
idle after it. The contenders:

    triton     `triton.autotune` on the list
    threads16  all 72 compiled on as many threads as there are cores, then `triton.autotune`'s sweep
    forecast   `forecast_autotune` on the list, with several seeds
    floor      triton's winner alone, compiled once and timed once by `do_bench`: no tuner can beat it

Then one process times all winners and triton's five fastest in turns, with L2 flushed: the regret of a
contender is its winner's median over the best median - 1. One config takes part twice: the noise.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import triton

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune import autotune
from forecast_autotune.settings import Settings

CASES = ("matmul/4096x4096x4096", "matmul/2048x2048x2048")
TOP = 5


def tune(role: str, given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child: both shapes through one contender."""
    cases = kernels.cases(CASES)
    cases.sort(key=lambda c: CASES.index(c.name))
    with devices.device(null) as where:
        data = [case.make(where) for case in cases]
        devices.warm_up_device(where)
        configs = kernels.configs(cases[0])[:: given["every"]]
        kernel, key = cases[0].kernel, list(cases[0].key)
        shapes = []
        for case, d in zip(cases, data, strict=True):
            if role == "floor":
                shapes.append(
                    known_winner(case, d, kernel_timing.config_from_json(given["winners"][case.name]))
                )
            else:
                if not shapes:
                    make = autotune if role == "forecast" else triton.autotune
                    tuner = make(configs=configs, key=key)(kernel)
                threads = given["threads"] if role == "threads16" else 0
                before = partial(kernel_timing.precompile, kernel, d, configs, threads)
                shapes.append(kernel_timing.tuned_call(case, tuner, d, before))
            shapes[-1]["correct"] = kernel_timing.check_output(case, d, where)
    return {
        "contender": role,
        "configs": len(configs),
        "seed": Settings.from_environment().seed,
        "shapes": shapes,
    }


def known_winner(case: kernels.Case, data: kernels.Data, config: Any) -> dict[str, Any]:
    """Return what is left when the winner is known: compile it, time it once, launch it."""

    class Known:
        """Looks like a tuner that has nothing to search."""

        best_config = config

        def __getitem__(self, grid: Any) -> Any:
            return lambda *_, **__: kernels.launch(case, data, config)

    bench = triton.runtime.driver.active.get_benchmarker()
    result: dict[str, Any] = kernel_timing.tuned_call(
        case,
        Known(),
        data,
        lambda: bench(lambda: kernels.launch(case, data, config), quantiles=(0.5, 0.2, 0.8)),
    )
    return result


def retime_winners(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child that times all winners in turns."""
    with devices.device(null) as where:
        devices.warm_up_device(where)
        return {
            "shapes": [
                kernel_timing.retime(case, where, given["configs"][case.name], given["rounds"])
                for case in kernels.cases(CASES)
            ]
        }


def run(a: Namespace, report: result_files.ResultFile) -> None:
    every = 18 if a.null else 1
    given: dict[str, Any] = {"every": every, "threads": a.threads}
    raw: dict[str, list[dict[str, Any]]] = {}

    def once(role: str, more: dict[str, Any] | None = None, **env: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="tune-", ignore_cleanup_errors=True) as folder:
            result = child_processes.run_child(
                child_processes.child_command(__file__, a, role, {**given, **(more or {})}),
                child_processes.child_environment(Path(folder), **env),
            )
        report.add(role, result)
        raw.setdefault(role, []).append(result)
        for s in result["shapes"] if role != "again" else ():
            result_files.say(
                f"{role}: {s['case']} {s['seconds']:.2f} s, {s['timed']} timed, "
                + kernel_timing.config_text(s["winner"])
            )
        return result

    for seed in range(1 if a.null else a.repeats):
        once("forecast", FORECAST_AUTOTUNE_SEED=str(seed))
    if a.baseline:
        before = json.loads(a.baseline.read_text(encoding="utf-8"))
        report.data["baseline"] = before["environment"]
        raw |= {
            role: runs for role, runs in before["raw"].items() if role in ("threads16", "triton", "floor")
        }
    for role in ("threads16", "triton"):
        if role not in raw:
            once(role)
    exhaustive = {s["case"]: s for s in raw["triton"][0]["shapes"]}
    if "floor" not in raw:
        once("floor", {"winners": {name: s["winner"] for name, s in exhaustive.items()}})
    configs = {
        name: [config for config, _ in s["timings"][:TOP]]
        + [s["winner"] for runs in raw.values() for r in runs for s in r["shapes"] if s["case"] == name]
        for name, s in exhaustive.items()
    }
    times = once("again", {"configs": configs, "rounds": 5 if a.null else a.rounds})
    del raw["again"]
    report.finish(summary(raw, times))


def summary(raw: dict[str, list[dict[str, Any]]], times: dict[str, Any]) -> dict[str, Any]:
    """Per shape: seconds, speedups and regrets; medians over repeats, and all of them."""
    figures: dict[str, Any] = {}
    for place, shape in enumerate(("first", "next")):
        side = kernel_timing.read_retimed(next(t for t in times["shapes"] if t["case"] == CASES[place]))
        runs = {role: [r["shapes"][place] for r in done] for role, done in raw.items()}
        seconds = {role: statistics.median(r["seconds"] for r in done) for role, done in runs.items()}
        regrets = {role: [round(side.regret(r["winner"]), 5) for r in done] for role, done in runs.items()}
        decisions = [r["decision"] for r in runs["forecast"]]
        figures[shape] = {
            "case": CASES[place],
            "seconds": {role: round(s, 3) for role, s in seconds.items()},
            "forecast_seconds": [round(r["seconds"], 3) for r in runs["forecast"]],
            "speedup_over_triton": round(seconds["triton"] / seconds["forecast"], 2),
            "speedup_over_threads16": round(seconds["threads16"] / seconds["forecast"], 2),
            "seconds_above_floor": round(seconds["forecast"] - seconds["floor"], 3),
            "times_the_floor": round(seconds["forecast"] / seconds["floor"], 2),
            "regret": {role: r for role, r in regrets.items() if role != "floor"},
            "noise": round(side.noise, 5),
            "best_ms": min(side.medians.values()),
            "measured": [d["measured"] for d in decisions],
            "stated_risk": [round(d["stated_risk"], 4) for d in decisions],
        }
    return figures


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="processes of `forecast`, one seed each")
    parser.add_argument("--rounds", type=int, default=200, help="launches per config in the final timing")
    parser.add_argument("--threads", type=int, default=16, help="compile threads of the baseline `threads16`")
    parser.add_argument(
        "--baseline",
        type=Path,
        help="a result of this script: its contenders, on a like machine, stand; what it lacks is run",
    )
    a = result_files.parse_arguments(parser)
    if a.child:
        result = retime_winners(a.given, a.null) if a.child == "again" else tune(a.child, a.given, a.null)
        print(json.dumps(result), flush=True)
        return 0
    run(a, result_files.ResultFile(a, "tune_matmul72"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
