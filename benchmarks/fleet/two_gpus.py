"""Claim: a job of two ranks tunes in less wall time than one rank, and both ranks choose alike.

    python -m benchmarks.fleet.two_gpus --out benchmarks/results/two_gpus.json

Needs as many GPUs as ranks. Each arm is a job of its own under plain torchrun, with fresh stores and a fresh Triton
cache: `one` rank with its share of the host's cores, `one_all_cores`, `shared` (all ranks, sharing), and `apart` (all
ranks, FORECAST_AUTOTUNE_RANKS=alone, which is one store and its lock). With `--orders same` ranks meet all cases in
the same order, each at once: an arm's wall is the sum of every case's slowest rank. With `--orders rotated` each rank
begins with other cases, and none waits for another: an arm's wall is its slowest rank's. Arms take turns in an order
that the seed shuffles, as are the cases. Nothing in the workers knows of sharing.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks import kernels
from benchmarks.lib import devices, kernel_timing, result_files
from benchmarks.lib.processes import child_processes
from forecast_autotune import autotune

CASES = [
    "matmul/4096x4096x4096",
    "softmax/16384x4096",
    "layer_norm/16384x1024",
    "rms_norm/8192x4096",
    "swiglu/2048x11008",
    "attention/1x32x32x2048x128-causal",
]
"""By default: what a transformer's step meets. `--cases` names others."""
ARMS = ("one", "one_all_cores", "shared", "apart")
JOB_S = 280.0


def decide_each(given: dict[str, Any], null: bool) -> None:
    """One rank: tune every case when all ranks are there, and write what was chosen and how long it took."""
    import torch
    import torch.distributed as dist

    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if given["bound"]:
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // given["shares"])
        os.sched_setaffinity(0, cores[local * share : (local + 1) * share])
    if not null:
        torch.cuda.set_device(local)
    dist.init_process_group("gloo")  # for the barrier: every call begins on all ranks at once
    found = []
    with devices.device(null) as where:
        devices.warm_up_device(where)
        known = {case.name: case for case in kernels.cases(given["cases"])}
        names = given["cases"]
        first = rank * len(names) // dist.get_world_size() if given["rotated"] else 0
        dist.barrier()
        for case in map(known.__getitem__, [*names[first:], *names[:first]]):
            data = case.make(where, small=null)
            listed = kernels.configs(case)[:: 12 if null else 1]
            tuner = autotune(listed, list(case.key), mode=given["mode"])(case.kernel)
            if not given["rotated"]:
                dist.barrier()
            result = kernel_timing.tuned_call(case, tuner, data, lambda: None)
            result["correct"] = kernel_timing.check_output(case, data, where)
            del result["timings"]
            found.append(result)
    path = Path(given["folder"]) / f"rank-{rank}.json"
    path.write_text(json.dumps({"rank": rank, "calls": found}), encoding="utf-8")
    dist.destroy_process_group()


def run_job(a: Namespace, arm: str, mode: str, cases: list[str]) -> dict[str, Any]:
    """One job with everything fresh; what each rank says, and the slowest rank's seconds per case."""
    size = 1 if arm.startswith("one") else a.ranks
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        given = {
            "folder": folder,
            "mode": mode,
            "cases": cases,
            "bound": arm != "one_all_cores",
            "shares": a.ranks,
            "rotated": a.orders == "rotated",
        }
        more = {"FORECAST_AUTOTUNE_RANKS": "alone" if arm == "apart" else "share", "OMP_NUM_THREADS": "1"}
        if a.workers:
            more["FORECAST_AUTOTUNE_WORKERS"] = str(a.workers)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
        command = [*launcher, *child_processes.child_command(__file__, a, "rank", given)[1:]]
        env = child_processes.child_environment(Path(folder), **more)
        done = subprocess.run(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=JOB_S,
        )
        if done.returncode:
            raise RuntimeError(f"the job failed with {done.returncode}: {done.stdout[-2000:]}")
        ranks = [json.loads(p.read_text()) for p in sorted(Path(folder).glob("rank-*.json"))]
    if len(ranks) != size:
        raise RuntimeError(f"{len(ranks)} of {size} ranks said what they chose")
    told = [{c["case"]: c for c in r["calls"]} for r in ranks]
    calls = [[each[name] for each in told] for name in cases]
    if a.orders == "rotated":
        wall_s = max(sum(c["seconds"] for c in each.values()) for each in told)
    else:
        wall_s = sum(max(c["seconds"] for c in at_once) for at_once in calls)
    return {
        "arm": arm,
        "mode": mode,
        "wall_s": wall_s,
        "cases": [
            {
                "case": at_once[0]["case"],
                "wall_s": max(c["seconds"] for c in at_once),
                "seconds": [round(c["seconds"], 4) for c in at_once],
                "chosen": sorted({kernel_timing.config_text(c["winner"]) for c in at_once}),
                "measured": [c["decision"]["measured"] for c in at_once],
                "reasons": [c["decision"]["reason"] for c in at_once],
                "median_ms": at_once[0]["decision"]["median_ms"],
            }
            for at_once in calls
        ],
    }


def summarise(jobs: list[dict[str, Any]], modes: list[str]) -> dict[str, Any]:
    """Per mode: median walls, ratios to one rank with its share of the cores, and how often ranks disagreed."""
    summary: dict[str, Any] = {}
    for mode in modes:
        mine = [j for j in jobs if j["mode"] == mode]
        walls = {arm: [j["wall_s"] for j in mine if j["arm"] == arm] for arm in ARMS}
        medians = {arm: statistics.median(found) for arm, found in walls.items() if found}
        shared = [c for j in mine if j["arm"] == "shared" for c in j["cases"]]
        others = {arm: seconds for arm, seconds in medians.items() if arm != "shared"}
        summary[mode] = {
            **{f"{arm}_s": round(seconds, 3) for arm, seconds in medians.items()},
            **{f"shared_to_{arm}": round(medians["shared"] / seconds, 3) for arm, seconds in others.items()},
            "decisions": len(shared),
            "disagreed": sum(len(c["chosen"]) > 1 for c in shared),
        }
    return summary


def main() -> int:
    """Run all jobs; 1 if ranks of a job chose differently."""
    parser = result_files.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks, and GPUs, of a job")
    parser.add_argument("--seeds", type=int, default=3, help="how often every arm is run")
    parser.add_argument("--modes", nargs="*", default=["tune", "exhaustive"], help="tune and exhaustive")
    parser.add_argument(
        "--arms", nargs="*", choices=ARMS, default=[*ARMS], help="shared, and what to compare"
    )
    parser.add_argument("--cases", nargs="*", default=CASES, help="names of benchmarks.kernels")
    parser.add_argument("--orders", choices=("same", "rotated"), default="same", help="of each rank's cases")
    parser.add_argument("--workers", type=int, default=0, help="compilations at a time of each rank")
    a = result_files.parse_arguments(parser)
    if a.child:
        decide_each(a.given, a.null)
        return 0
    kernels.cases(a.cases)  # a name that is wrong is found here
    if "shared" not in a.arms:
        parser.error("--arms must name `shared`, which the others are compared with")
    report = result_files.ResultFile(a, "two_gpus", 0)
    jobs = []
    for seed in range(a.seeds):
        order = random.Random(seed)
        arms = [(arm, mode) for mode in a.modes for arm in a.arms]
        order.shuffle(arms)
        cases = list(a.cases)
        order.shuffle(cases)
        for arm, mode in arms:
            job = run_job(a, arm, mode, cases)
            jobs.append(job)
            report.add("job", {"seed": seed, **job})
            result_files.say(f"seed {seed} {mode:10} {arm:13} {job['wall_s']:7.2f} s")
            for c in job["cases"]:
                result_files.say(
                    f"    {c['case']:28} {c['seconds']} s, measured {c['measured']}: {' | '.join(c['chosen'])}"
                )
    summary = summarise(jobs, a.modes)
    report.finish(summary)
    return int(any(counts["disagreed"] for counts in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
