"""Claim: four lanes of a search do the work of at least three, and killing a lane or a node loses nothing.

A Ray cluster of several raylets on one machine, one CPU lane each. What is claimed is about the lanes: that
they overlap, what they cost, and that jobs survive. So that a machine with few cores can show it, the jobs
mostly wait: every lane verifies and times real solutions of a pack in the real sandbox, and all of these
sleep in every launch. Every lane has a timing lock of its own, as machines of their own have. The same is
measured with local lanes.

Then four lanes work while one actor's process gets SIGKILL, then a whole node. A ledger that every judge
writes shows which judgements began and which ended.

    python -m benchmarks.search.lane_scaling --out benchmarks/results/search_lanes.json

With `--gpus`, on a machine with so many GPUs: n lanes, one per GPU and opened as a search opens them, do so
many times the work of one. Nothing sleeps and nothing is killed: lanes judge the pack's Triton solution, in
many copies, by the plan and the rules of a search. Lanes are warm, that is, each has judged a job that is not
counted; n lanes get n times the jobs of one, so that all runs take equally long. Local lanes first, then
lanes on a Ray cluster of a raylet per GPU, if there is Ray.

    python -m benchmarks.search.lane_scaling --gpus 1,2,4 --jobs 16 --out benchmarks/results/search_lanes_gpus.json

A dry run takes CPU lanes in the GPUs' place, and sources that sleep: add `--null`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.judge_lanes import (
    OBJECT_STORE_BYTES,
    LedgerJudge,
    counts_by_job,
    ray_cluster,
    read_ledger,
    shared_run_folder,
    time_jobs,
    wait_until_open,
)
from benchmarks.lib.result_files import say
from forecast_autotune.errors import SettingsError
from forecast_harness.search.history.events import NodeJob
from forecast_harness.search.judging.devices import verification_plan
from forecast_harness.search.judging.factory import open_judge
from forecast_harness.search.judging.packs.judge import PackJudge
from forecast_harness.search.judging.races.rules import RaceRules
from forecast_harness.search.lanes.local_lanes import LocalJudgePool
from forecast_harness.search.lanes.ray_lanes import RayJudgePool, load_ray
from forecast_harness.search.novelty import node_identity
from forecast_harness.search.records import Node, NodeResult, SearchTarget
from forecast_harness.search.targets import open_target
from forecast_harness.verify.plan import VerificationPlan

PACK = "softmax"
SLEEPING = """import time

import torch


def run(x):
    time.sleep({sleep})
    return torch.softmax(x, -1)


NUMBER = {number}
"""
LANES = 4
PLAN = VerificationPlan(cases=4, timed=8)
RULES = RaceRules(first=8, least=8, most=8)
"""So many launches for every job, however noisy the machine is: jobs must take equally long."""
REQUIRED_SPEEDUPS = {2: 1.8, 4: 3.4}
"""Lanes on GPUs -> how many times the work of one they have to do."""
Rates = dict[str, dict[int, list[float]]]
"""Kind of lanes -> number of them -> jobs per minute of each run."""


def make(target: SearchTarget, folder: Path, number: int) -> LedgerJudge:
    """A judge as a search opens it; on a CPU one with few launches and a timing lock of its own."""
    device = "cuda" if "device" in target.payload else "cpu"
    own = folder / f"lane-{number}-{os.getpid()}"
    if device == "cuda":
        return LedgerJudge(
            open_judge(target, device=device, index=number, folder=own), f"cuda:{number}", folder
        )
    own.mkdir(parents=True, exist_ok=True)
    judge = PackJudge(target, PLAN, own / "scratch", number=number, rules=RULES, locks=own)
    return LedgerJudge(judge, f"cpu:{number}", folder)


def job_of(target: SearchTarget, source: str, seed: Node, against: Node, name: str) -> NodeJob:
    """To judge a source of the seed's language."""
    id_ = node_identity(target.id, seed.language, source)
    return NodeJob(name, replace(seed, id=id_, source=source, parents=(seed.id,)), against, {}, target, 0, 1)


def jobs(n: int, sleep: float) -> list[NodeJob]:
    """Jobs that differ in their sources, and all wait as long."""
    target, (seed,) = open_target(PACK, device="cpu")
    against = replace(seed, source=SLEEPING.format(sleep=sleep, number=-1))
    sources = (SLEEPING.format(sleep=sleep, number=number) for number in range(n))
    return [job_of(target, source, seed, against, f"job-{i}") for i, source in enumerate(sources)]


def copies(target: SearchTarget, seed: Node, numbers: Iterator[int], n: int) -> list[NodeJob]:
    """Jobs with copies of the seed that have constants of other names: as much work, and no text twice.

    So nothing that was compiled in one run could serve another, even if cells shared their caches.
    """
    texts = {
        number: seed.source.replace("BLOCK", f"BLOCK_{number}") + f"\n\nNUMBER = {number}\n"
        for number in itertools.islice(numbers, n)
    }
    return [job_of(target, source, seed, seed, f"job-{number}") for number, source in texts.items()]


def local_lanes(target: SearchTarget, n: int, folder: Path) -> LocalJudgePool:
    """`n` lanes of this process."""
    return LocalJudgePool(partial(make, target, folder), n)


def ray_lanes(target: SearchTarget, n: int, folder: Path) -> RayJudgePool:
    """`n` lanes on the cluster that this process is connected to."""
    gpus = "device" in target.payload
    return RayJudgePool(partial(make, target, folder), gpus=gpus, most=n, poll_s=0.5)


# --- lanes that sleep, and are killed ---


def run_with_kills(
    open_lanes: Callable[[Path], RayJudgePool], on: Any, last: Any, listed: list[NodeJob]
) -> dict[str, Any]:
    """Kill an actor's process after a sixth of the jobs, a node after a third; add one after the half."""
    with shared_run_folder() as folder:
        lanes = open_lanes(folder)
        widths = []
        try:
            wait_until_open(lanes)
            began = time.perf_counter()
            futures = [lanes.submit(job) for job in listed]
            again = [lanes.submit(job) for job in listed]
            wait_for_results(futures, len(listed) // 6)
            victim = next(x["pid"] for x in reversed(read_ledger(folder)) if x["what"] == "begin")
            os.kill(victim, signal.SIGKILL)
            say(f"killed the process of a lane, {victim}")
            wait_for_results(futures, len(listed) // 3)
            on.remove_node(last, allow_graceful=False)
            say("killed a node")
            end = time.monotonic() + 60
            while lanes.capacity == LANES and time.monotonic() < end:
                time.sleep(0.05)
            wait_for_results(futures, len(listed) // 2)
            widths.append(lanes.capacity)
            on.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
            say("added a node")
            results = [f.result(600) for f in futures]
            seconds = time.perf_counter() - began
            widths.append(lanes.capacity)
        finally:
            lanes.close()
        entries = counts_by_job(read_ledger(folder))
    return {
        "seconds": seconds,
        "submitted": len(listed),
        "results": sum(r.log2_ratio is not None for r in results),
        "second_submissions_that_are_the_same": sum(a is b for a, b in zip(futures, again, strict=True)),
        "judgements_begun": sum(c["begin"] for c in entries.values()),
        "judgements_ended": sum(c["end"] for c in entries.values()),
        "ended_once": sum(c["end"] == 1 for c in entries.values()),
        "ended_twice": sum(c["end"] > 1 for c in entries.values()),
        "lanes_with_the_node_away_and_at_the_end": widths,
    }


def wait_for_results(futures: list[Future[NodeResult]], n: int) -> None:
    """Until `n` of them are done."""
    while sum(f.done() for f in futures) < n:
        wait([f for f in futures if not f.done()], timeout=0.2, return_when="FIRST_COMPLETED")


def measure_cpu_lanes(a: argparse.Namespace) -> int:
    """Lanes whose launches sleep: how much they overlap, and what they survive."""
    report = result_files.ResultFile(a, "search_lanes")
    listed = jobs(a.jobs, a.sleep)
    target = listed[0].target
    rates: Rates = {"local": {}, "ray": {}}
    with ray_cluster([{"num_cpus": 1}] * LANES) as (on, nodes):
        for number in range(a.rounds):
            for name, kind in (("local", local_lanes), ("ray", ray_lanes)):
                for n in (1, LANES) if number % 2 == 0 else (LANES, 1):
                    row = {"kind": name, "lanes": n, **time_jobs(partial(kind, target, n), listed)}
                    record_run(report, row, rates)
        survived = run_with_kills(partial(ray_lanes, target, LANES), on, nodes[-1], jobs(2 * a.jobs, a.sleep))
        report.add("killed", survived)
    found = summary(rates)
    speedups = {kind: found["speedups"][f"{kind} {LANES}"] for kind in rates}
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = {
        "cores": found["cores"],
        "jobs_per_minute": found["jobs_per_minute"],
        "speedup_of_4_lanes": speedups,
        "at_least_3": all(value >= 3 for value in speedups.values()),
        "nothing_lost": survived["results"] == survived["submitted"],
        "nothing_judged_twice": survived["ended_twice"] == 0,
        "cpu_seconds_of_children": round(usage.ru_utime + usage.ru_stime, 1),
        **{f"killed_{name}": value for name, value in survived.items()},
    }
    report.finish(done)
    return 0 if done["at_least_3"] and done["nothing_lost"] and done["nothing_judged_twice"] else 1


# --- a lane per GPU ---


def measure_gpu_lanes(a: argparse.Namespace) -> int:
    """Lanes with a GPU each, or with none in a dry run: how much more several do than one."""
    if not a.null:
        verification_plan("cuda", max(a.gpus) - 1)  # raises where there are fewer
    report = result_files.ResultFile(a, "search_lanes_gpus")
    began, most = time.perf_counter(), max(a.gpus)
    target, (seed, *_) = open_target(PACK, device="cpu" if a.null else "cuda")
    if a.null:
        seed = replace(seed, source=SLEEPING.format(sleep=a.sleep, number=-1))
    say(f"{target.name}, {target.language}, {len(os.sched_getaffinity(0))} cores")
    numbers = itertools.count()
    rates: Rates = {}
    right, failed = True, list[str]()
    kinds: list[tuple[str, Callable[[SearchTarget, int, Path], LocalJudgePool]]] = [("local", local_lanes)]
    try:
        load_ray()
        kinds.append(("ray", ray_lanes))
    except SettingsError:
        say("RAY IS ABSENT: local lanes alone are measured")
    for name, kind in kinds:
        nodes = [_node_resources(number, a.null) for number in range(most)]
        try:
            with nullcontext() if kind is local_lanes else ray_cluster(nodes):
                for number in range(a.rounds):
                    for n in a.gpus if number % 2 == 0 else reversed(a.gpus):
                        listed = copies(target, seed, numbers, max(n, a.jobs * n // most))
                        warm = copies(target, seed, numbers, n)
                        row = {"kind": name, "lanes": n, **time_jobs(partial(kind, target, n), listed, warm)}
                        record_run(report, row, rates)
                        right &= row["outcomes"] == {"ok": len(listed)}
                        if len(row["jobs_of_each_lane"]) < n:
                            raise RuntimeError(f"not all of {n} lanes had a job: {row['jobs_of_each_lane']}")
        except Exception as error:  # what was measured so far is summed up, and other lanes may do better
            traceback.print_exc()
            failed.append(f"{name}: {type(error).__name__}: {error}")
    found = summary(rates)
    met = {
        f"{name} {n}": found["speedups"].get(f"{name} {n}", 0.0) >= REQUIRED_SPEEDUPS[n]
        for name, _ in kinds
        for n in a.gpus
        if n in REQUIRED_SPEEDUPS
    }
    report.finish(
        {
            **found,
            "wanted": REQUIRED_SPEEDUPS,
            "met": met,
            "all_jobs_are_right": right,
            "failed": failed,
            "ray": len(kinds) > 1,
            "whole_seconds": round(time.perf_counter() - began, 1),
        }
    )
    return 0 if met and all(met.values()) and right and not failed else 1


def _node_resources(number: int, null: bool) -> dict[str, Any]:
    """What a raylet owns. Each counts its GPUs from 0; the variable says which of the machine's that is."""
    if null:
        return {"num_cpus": 1}
    return {"num_cpus": 1, "num_gpus": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": str(number)}}


# --- both ---


def record_run(report: result_files.ResultFile, row: dict[str, Any], rates: Rates) -> None:
    """Write a run down, and say what it was."""
    report.add("throughput", row)
    rates.setdefault(row["kind"], {}).setdefault(row["lanes"], []).append(row["jobs_per_minute"])
    say(
        f"{row['kind']}, {row['lanes']} lanes: {row['jobs']} jobs in {row['seconds']:.1f} s, "
        f"{row['jobs_per_minute']:.1f} per minute, {row['job_seconds']:.1f} s each, {row['outcomes']}, "
        f"by {row['jobs_of_each_lane']}"
    )


def summary(rates: Rates) -> dict[str, Any]:
    """Cores, medians over all runs, and how many times the work of one lane several do."""
    middle = {kind: {n: statistics.median(r) for n, r in by.items()} for kind, by in rates.items()}
    return {
        "cores": len(os.sched_getaffinity(0)),
        "jobs_per_minute": {f"{k} {n}": round(r, 2) for k, by in middle.items() for n, r in by.items()},
        "speedups": {
            f"{k} {n}": round(r / by[1], 3) for k, by in middle.items() for n, r in by.items() if n > 1
        },
    }


def widths(text: str) -> list[int]:
    """Numbers of lanes, in rising order; 1 has to be among them, since others are compared with it."""
    found = sorted({int(word) for word in text.split(",")})
    if found[0] != 1:
        raise argparse.ArgumentTypeError(f"1 must be among the numbers of GPUs, and none below it: {text}")
    return found


def main() -> int:
    made = result_files.parser(__doc__)
    made.add_argument("--gpus", type=widths, default=[], help="1,2,4: measure lanes on so many GPUs instead")
    made.add_argument("--jobs", type=int, default=8, help="jobs of each run; with --gpus, of the widest")
    made.add_argument("--sleep", type=float, default=0.1, help="seconds that a launch on a CPU sleeps")
    made.add_argument("--rounds", type=int, default=2, help="runs of each kind, in turns")
    made.set_defaults(stub_only=True)
    a = result_files.parse_arguments(made)
    return measure_gpu_lanes(a) if a.gpus else measure_cpu_lanes(a)


if __name__ == "__main__":
    sys.exit(main())
