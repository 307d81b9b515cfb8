"""Claim: four lanes of a search do the work of at least three, and killing a lane or a node loses nothing.

A Ray cluster of several raylets on one machine, one CPU lane each. What is claimed is about the lanes: that
they overlap, what they cost, and that jobs survive. So that a machine with few cores can show it, the jobs
mostly wait: every lane verifies and times real solutions of a pack in the real sandbox, and all of these
sleep in every launch. Every lane has a timing lock of its own, as machines of their own have. The same is
measured with local lanes.

Then four lanes work while one actor's process gets SIGKILL, then a whole node. A ledger that every judge
writes shows which judgements began and which ended.

    python benchmarks/search_lanes.py --out benchmarks/results/search_lanes.json
"""

from __future__ import annotations

import json
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.common import say
from forecast_harness.search.events import Job
from forecast_harness.search.judge_pack import PackJudge
from forecast_harness.search.lanes import LocalLanes
from forecast_harness.search.novelty import identity
from forecast_harness.search.racing import Rules
from forecast_harness.search.ray_lanes import RayLanes, load_ray
from forecast_harness.search.records import Judged
from forecast_harness.search.targets import open_target
from forecast_harness.verify.plan import Plan

PACK = "softmax"
SOURCE = """import time

import torch


def run(x):
    time.sleep({sleep})
    return torch.softmax(x, -1)


NUMBER = {number}
"""
LANES = 4
PLAN = Plan(cases=4, timed=8)
RULES = Rules(first=8, least=8, most=8)
"""So many launches for every job, however noisy the machine is: jobs must take equally long."""
STORE = 80 << 20
"""Bytes of each raylet's object store, the least that Ray allows."""


class Noted(PackJudge):
    """A judge that notes when a judgement begins and ends, in a line each that is written at once."""

    ledger: Path

    def judge(self, job: Job) -> Judged:
        self._note("begin", job)
        found = super().judge(job)
        self._note("end", job)
        return found

    def _note(self, what: str, job: Job) -> None:
        line = json.dumps({"what": what, "job": job.id, "pid": os.getpid(), "at": time.time()})
        with self.ledger.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def make(number: int, folder: str) -> Noted:
    """A judge with a folder and a timing lock of its own."""
    target, _ = open_target(PACK, device="cpu")
    own = Path(folder) / f"lane-{number}-{os.getpid()}"
    own.mkdir(parents=True, exist_ok=True)
    judge = Noted(target, PLAN, own / "scratch", number=number, rules=RULES, locks=own)
    judge.ledger = Path(folder) / "ledger"
    return judge


def jobs(n: int, sleep: float) -> list[Job]:
    """Jobs that differ in their sources, and all wait as long."""
    target, (seed,) = open_target(PACK, device="cpu")
    against = replace(seed, source=SOURCE.format(sleep=sleep, number=-1))
    found = []
    for number in range(n):
        source = SOURCE.format(sleep=sleep, number=number)
        node = replace(seed, id=identity(target.id, "torch", source), source=source, parents=(seed.id,))
        found.append(Job(f"job-{number}", node, against, {}, target, 0, 1))
    return found


def ledger(folder: Path) -> dict[str, Counter[str]]:
    """How often each job began and ended, by job."""
    found: dict[str, Counter[str]] = {}
    for line in (folder / "ledger").read_text(encoding="utf-8").splitlines():
        said = json.loads(line)
        found.setdefault(said["job"], Counter())[said["what"]] += 1
    return found


def timed(open_lanes: Callable[[str], LocalLanes], listed: list[Job]) -> dict[str, Any]:
    """Seconds from the first submission to the last result, once all lanes are open."""
    with tempfile.TemporaryDirectory(prefix="search-lanes-") as folder:
        lanes = open_lanes(folder)
        try:
            ready(lanes)
            began = time.perf_counter()
            results = [f.result(600) for f in [lanes.submit(job) for job in listed]]
            seconds = time.perf_counter() - began
        finally:
            lanes.close()
        entries = ledger(Path(folder))
    return {
        "seconds": seconds,
        "jobs_per_minute": 60 * len(listed) / seconds,
        "outcomes": dict(Counter(str(r.outcome) for r in results)),
        "judged_once": sum(c["end"] == 1 for c in entries.values()),
        "job_seconds": statistics.median(r.wall_seconds for r in results),
    }


def ready(lanes: LocalLanes) -> None:
    """Until all lanes are open. Raises `TimeoutError`."""
    end = time.monotonic() + 180
    while any(lane.state != "ready" for lane in lanes.lanes):
        if time.monotonic() > end:
            raise TimeoutError(f"lanes do not open: {lanes.lanes}")
        time.sleep(0.05)


def killed(
    open_lanes: Callable[[str], RayLanes], cluster: Any, last: Any, listed: list[Job]
) -> dict[str, Any]:
    """Kill an actor's process after a sixth of the jobs, a node after a third; add one after the half."""
    with tempfile.TemporaryDirectory(prefix="search-lanes-") as folder:
        lanes = open_lanes(folder)
        widths = []
        try:
            ready(lanes)
            began = time.perf_counter()
            futures = [lanes.submit(job) for job in listed]
            again = [lanes.submit(job) for job in listed]
            reached(futures, len(listed) // 6)
            lines = [json.loads(x) for x in (Path(folder) / "ledger").read_text().splitlines()]
            victim = next(x["pid"] for x in reversed(lines) if x["what"] == "begin")
            os.kill(victim, signal.SIGKILL)
            say(f"killed the process of a lane, {victim}")
            reached(futures, len(listed) // 3)
            cluster.remove_node(last, allow_graceful=False)
            say("killed a node")
            end = time.monotonic() + 60
            while lanes.width == LANES and time.monotonic() < end:
                time.sleep(0.05)
            reached(futures, len(listed) // 2)
            widths.append(lanes.width)
            cluster.add_node(num_cpus=1, object_store_memory=STORE)
            say("added a node")
            results = [f.result(600) for f in futures]
            seconds = time.perf_counter() - began
            widths.append(lanes.width)
        finally:
            lanes.close()
        entries = ledger(Path(folder))
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


def reached(futures: list[Future[Judged]], n: int) -> None:
    """Until `n` of them are done."""
    while sum(f.done() for f in futures) < n:
        wait([f for f in futures if not f.done()], timeout=0.2, return_when="FIRST_COMPLETED")


def main() -> int:
    made = common.parser(__doc__)
    made.add_argument("--jobs", type=int, default=8, help="jobs of each run")
    made.add_argument("--sleep", type=float, default=0.1, help="seconds that a launch sleeps")
    made.add_argument("--rounds", type=int, default=2, help="runs of each kind, in turns")
    made.set_defaults(stub_only=True)
    a = common.parse(made)
    report = common.Report(a, "search_lanes")
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(common.ROOT), os.environ.get("PYTHONPATH")]))
    listed = jobs(a.jobs, a.sleep)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})
    try:
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(LANES - 1)]
        load_ray().init(address=cluster.address, log_to_driver=False, logging_level="ERROR")

        def ray(most: int, folder: str) -> RayLanes:
            return RayLanes(partial(make, folder=folder), most=most, poll_s=0.5)

        def local(n: int, folder: str) -> LocalLanes:
            return LocalLanes(partial(make, folder=folder), n)

        found: dict[str, list[float]] = {}
        for number in range(a.rounds):
            for name, kind in (("local", local), ("ray", ray)):
                for n in (1, LANES) if number % 2 == 0 else (LANES, 1):
                    row = {"kind": name, "lanes": n, **timed(partial(kind, n), listed)}
                    report.add("throughput", row)
                    found.setdefault(f"{name} {n}", []).append(row["jobs_per_minute"])
                    say(f"{name}, {n} lanes: {row['jobs_per_minute']:.1f} jobs per minute, {row['outcomes']}")
        survived = killed(partial(ray, LANES), cluster, nodes[-1], jobs(2 * a.jobs, a.sleep))
        report.add("killed", survived)
    finally:
        load_ray().shutdown()
        cluster.shutdown()
    rates = {name: statistics.median(values) for name, values in found.items()}
    speedups = {kind: round(rates[f"{kind} {LANES}"] / rates[f"{kind} 1"], 3) for kind in ("local", "ray")}
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    summary = {
        "cores": len(os.sched_getaffinity(0)),
        "jobs_per_minute": {name: round(value, 2) for name, value in rates.items()},
        "speedup_of_4_lanes": speedups,
        "at_least_3": all(value >= 3 for value in speedups.values()),
        "nothing_lost": survived["results"] == survived["submitted"],
        "nothing_judged_twice": survived["ended_twice"] == 0,
        "cpu_seconds_of_children": round(usage.ru_utime + usage.ru_stime, 1),
        **{f"killed_{name}": value for name, value in survived.items()},
    }
    report.finish(summary)
    return 0 if summary["at_least_3"] and summary["nothing_lost"] and summary["nothing_judged_twice"] else 1


if __name__ == "__main__":
    sys.exit(main())
