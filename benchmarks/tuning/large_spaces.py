"""Claim: thousands of configs are searched in less time than `triton.autotune` takes for a short list.

And what is found is as fast as, or faster than, the best of that list.

    python -m benchmarks.tuning.large_spaces --out benchmarks/results/tune_space.json \
        --baseline benchmarks/results/tune_matmul72.json --attention-sample 50

Two kernels: fp16 matmul 4096^3 over 2976 configs, against the usual list of 72, and causal attention
over 1470 configs, against a random sample of them (`triton.autotune` cannot be waited for on all).
Every tuning is one fresh process with empty caches, timed as in `matmul72.py`; without
`--baseline` the list of 72 is timed here. Then one process times our winner and the fastest three of
the list or sample in turns, and compares our winner's output with the reference.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import triton

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune import Space, autotune
from forecast_autotune.settings import Budget
from forecast_integrations.triton.problem.call import outcome_of

MATMUL, ATTENTION = "matmul/4096x4096x4096", "attention/4x32x8x4096x128-causal"
TOP = 3


def case_space(case: kernels.Case) -> Space:
    """The case's wide space as the `Space` a user would write."""
    wide = case.wide
    assert wide is not None, f"{case.name} has no wide space"
    return Space(
        wide["kwargs"], num_warps=wide["num_warps"], num_stages=wide["num_stages"], where=[wide["where"]]
    )


def tolerant_do_bench(call: Any, quantiles: Any) -> Any:
    """`do_bench`, with a config that cannot be compiled counted as slow.

    A random config may fail in a way that makes Triton's own sweep abort; the baseline is spared that.
    """
    try:
        return triton.runtime.driver.active.get_benchmarker()(call, quantiles=quantiles)
    except Exception as error:
        if outcome_of(error) is None:
            raise
        return [float("inf")] * 3


def tune(role: str, given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child that tunes: `ours` on the space, `list` or `sample` with `triton.autotune`."""
    (case,) = kernels.cases([given["case"]])
    with devices.device(null) as where:
        data = case.make(where)
        devices.warm_up_device(where)
        key = list(case.key)
        if role == "ours":
            space = case_space(case)
            size = sum(1 for _ in space)
            limit = given["measurements"]
            tuner = autotune(
                space, key, budget=Budget(limit) if limit else None, tolerance=given["tolerance"]
            )(case.kernel)
        else:
            configs = kernels.configs(case, wide=role == "sample")
            if given["count"]:
                configs = random.Random(given["seed"]).sample(configs, given["count"])
            size = len(configs)
            tuner = triton.autotune(configs, key, do_bench=tolerant_do_bench if role == "sample" else None)(
                case.kernel
            )
        result = kernel_timing.tuned_call(case, tuner, data, lambda: None)
        result["correct"] = kernel_timing.check_output(case, data, where)
    del result["timings"][max(TOP, 20) :]
    return {**result, "role": role, "configs": size}


def retime_winners(given: dict[str, Any], null: bool) -> dict[str, Any]:
    """The child that times the winners in turns and checks the output of ours."""
    (case,) = kernels.cases([given["case"]])
    with devices.device(null) as where:
        devices.warm_up_device(where)
        result: dict[str, Any] = kernel_timing.retime(case, where, given["configs"], given["rounds"])
        winner = kernel_timing.config_from_json(given["configs"][0])
        result["correct"] = kernel_timing.check_output(case, case.make(where), where, winner)
    return result


def run(a: Namespace, report: result_files.ResultFile) -> None:
    def once(name: str, role: str, **given: Any) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="tune-", ignore_cleanup_errors=True) as folder:
            result = child_processes.run_child(
                child_processes.child_command(__file__, a, role, {"case": name, **given}),
                child_processes.child_environment(Path(folder)),
                580,
            )
        report.add(f"{name}/{role}", result)
        if role != "again":
            winner = kernel_timing.config_text(result["winner"])
            result_files.say(f"{role}: {name} {result['seconds']:.2f} s, {result['timed']} timed, {winner}")
        return result

    measurements = 3 if a.null else a.measurements
    summary: dict[str, Any] = {}
    for name in [n for n in (MATMUL, ATTENTION) if n.startswith(a.only)]:
        ours = once(name, "ours", measurements=measurements, tolerance=a.tolerance)
        if name == MATMUL:
            other = (
                baseline(a.baseline) if a.baseline else once(name, "list", count=3 if a.null else 0, seed=0)
            )
        elif a.attention_sample:
            other = once(name, "sample", count=a.attention_sample, seed=a.seed)
        else:
            continue
        configs = [ours["winner"]] + [config for config, _ in other["timings"][:TOP]]
        times = once(name, "again", configs=configs, rounds=5 if a.null else a.rounds)
        summary[name] = compare(ours, other, times)
        result_files.say(f"{name}: {summary[name]}")
    report.finish(summary)


def baseline(path: Path) -> dict[str, Any]:
    """`triton.autotune` on the 72, from the result of `matmul72.py`. Raises if it is not there."""
    run_ = json.loads(path.read_text(encoding="utf-8"))["raw"]["triton"][0]
    (shape,) = [s for s in run_["shapes"] if s["case"] == MATMUL]
    return {**shape, "configs": run_["configs"]}


def compare(ours: dict[str, Any], other: dict[str, Any], times: dict[str, Any]) -> dict[str, Any]:
    """Seconds and speed of what was found; `faster` is above zero where our winner is the faster one."""
    side = kernel_timing.read_retimed(times)
    mine = side.medians[kernel_timing.config_text(ours["winner"])]
    theirs = min(side.medians[kernel_timing.config_text(config)] for config, _ in other["timings"][:TOP])
    return {
        "configs": ours["configs"],
        "measured": ours["decision"]["measured"],
        "stated_risk": round(ours["decision"]["stated_risk"], 4),
        "seconds": round(ours["seconds"], 3),
        "baseline_configs": other["configs"],
        "baseline_seconds": round(other["seconds"], 3),
        "speedup": round(other["seconds"] / ours["seconds"], 2),
        "winner_ms": mine,
        "baseline_best_ms": theirs,
        "faster": round(theirs / mine - 1, 5),
        "noise": round(side.noise, 5),
        "winner_correct": times["correct"],
        "winner": kernel_timing.config_text(ours["winner"]),
    }


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--baseline", type=Path, help="result of matmul72.py, to not repeat its baseline")
    parser.add_argument(
        "--attention-sample", type=int, default=0, help="configs in the sample; 0: no baseline"
    )
    parser.add_argument(
        "--measurements", type=int, default=0, help="most measurements of ours; 0: by the policy"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.001, help="accepted regret of ours; 0.001 asks for the best"
    )
    parser.add_argument("--only", default="", help="matmul or attention")
    parser.add_argument("--rounds", type=int, default=200, help="launches per config in the final timing")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    a = result_files.parse_arguments(parser)
    if a.child:
        result = retime_winners(a.given, a.null) if a.child == "again" else tune(a.child, a.given, a.null)
        print(json.dumps(result), flush=True)
        return 0
    if a.baseline:
        baseline(a.baseline)  # fails now if it cannot be read
    run(a, result_files.ResultFile(a, "tune_space", a.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
