"""Claim: ranks that share measure no candidate twice, decide alike, and never wait beyond their deadline.

    python -m benchmarks.fleet.rank_schedules --out benchmarks/results/rank_schedules.json

CPU only, on a virtual clock. Each schedule is a job of 8 or 64 simulated ranks that run the real tuner over a store
with random delays. Its seed says when each rank begins, which of three problems it meets and in which order, which
answers and measurements are slow, and which ranks are killed at which moments. After each schedule the run is checked:
every candidate measured once unless who had undertaken it died, one decision for all ranks, no wait beyond the
deadline. A schedule whose seed is given again goes exactly as before.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.ranks.simulated_job import RULES, SimulatedJob, broken_rules, longest_wait, small_problem
from forecast_autotune.ranks.job import JobLimits
from forecast_autotune.settings import Mode

PROBLEMS = 3
LIMITS = JobLimits(idle_poll_s=0.25)
"""As by default, but that ranks which only wait look for news more rarely, which saves most of a simulation's time."""


def one_schedule(size: int, seed: int) -> dict[str, Any]:
    """Counts of one schedule; every third one measures everything."""
    mode = Mode.TUNE if seed % 3 else Mode.EXHAUSTIVE
    job = SimulatedJob(
        size,
        seed,
        problems=[small_problem(PROBLEMS * seed + i) for i in range(PROBLEMS)],
        limits=LIMITS,
        mode=mode,
    )
    run = job.simulate()
    done = [a for a in run.attempts if a.decision is not None]
    found = broken_rules(run, job.limits)
    return {
        **{name: found[name] for name in (*RULES, "taken_over")},
        "kills": len(run.killed_at),
        "killed_while_deciding": len(run.attempts) - len(done),
        "found_dead": sum('"lost"' in text for _, text in run.entries),
        "decisions": len(done),
        "problems": len({a.problem for a in done}),
        "timed": len(run.timed),
        "without_measuring": sum(a.measured == 0 for a in done),
        "longest_wait_s": round(max((longest_wait(a, run) for a in done), default=0.0), 3),
    }


def main() -> int:
    """Run all schedules; 1 if a rule was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="*", default=[8, 64], help="ranks of a job")
    parser.add_argument("--schedules", type=int, default=500, help="schedules for each size")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--jobs", type=int, default=1, help="schedules at a time")
    parser.add_argument("--out", type=Path, required=True, help="the result file (JSON)")
    a = parser.parse_args()
    report = result_files.ResultFile(a, "rank_schedules", a.seed)
    summary: dict[str, Any] = {}
    pool = ProcessPoolExecutor(a.jobs)
    for size in a.sizes:
        total: Counter[str] = Counter()
        longest = 0.0
        seeds = range(a.seed, a.seed + a.schedules)
        for seed, found in zip(seeds, pool.map(one_schedule, [size] * len(seeds), seeds), strict=True):
            longest = max(longest, found.pop("longest_wait_s"))
            total.update(found)
            if any(found[name] for name in RULES):
                report.add("broken", {"size": size, "seed": seed, **found})
                result_files.say(f"{size} ranks, seed {seed}: BROKEN {found}")
            if (seed - a.seed) % 50 == 49:
                report.add("counts", {"size": size, "schedules": seed - a.seed + 1, **total})
                result_files.say(f"{size} ranks, {seed - a.seed + 1} schedules: {dict(total)}")
        summary[str(size)] = {"schedules": a.schedules, **total, "longest_wait_s": longest}
    pool.shutdown()
    report.finish(summary)
    return int(any(counts[name] for counts in summary.values() for name in RULES))


if __name__ == "__main__":
    sys.exit(main())
