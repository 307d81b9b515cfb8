"""Claim: what sharing saves of a job's tuning wall, by recorded H200 tables on a virtual clock.

    python -m benchmarks.fleet.replayed_jobs --out benchmarks/results/replayed_jobs.json
    python -m benchmarks.fleet.replayed_jobs --orders --out benchmarks/results/replayed_orders.json

CPU only: compilations and timings take what they took when the shipped tables were recorded, forecasts and plans take
no time, the store a millisecond at most, and ranks of a host share Triton's cache. The first table of every kernel is
decided by jobs of 1, 2 and 4 ranks, each with a number of compile workers of its own, in tune and in exhaustive mode. A
job's wall is its slowest rank's; printed are sums over tables, as shares of one rank's. It says what to expect of a job
on GPUs; `benchmarks.fleet.two_gpus` measures it. With `--orders`, one job decides all tables, and each of its ranks
meets them in an order of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.ranks.simulated_job import Hazards, SimulatedJob
from benchmarks.lib.result_files import ResultFile
from forecast_autotune.records import Candidate
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.surrogates.factory import surrogate_for
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables

CALM = Hazards(kills=0.0, missing=0.0, late_s=0.0001, slow_answers=0.0, slow_candidates=0.0)
SIZES = (1, 2, 4)


def orders_job(
    tables: Sequence[Table], size: int, workers: int, surrogate: Surrogate, seed: int
) -> dict[str, Any]:
    """A job that decides every table in tune mode, each rank in an order of its own."""
    job = SimulatedJob(size, seed, problems=tables, hazards=CALM, workers=workers, surrogate=surrogate)
    run = job.simulate()
    chosen: dict[str, set[Candidate]] = {}
    for a in run.attempts:
        if a.decision is not None:
            chosen.setdefault(a.problem, set()).add(a.decision.chosen)
    disagreed = sum(len(each) > 1 for each in chosen.values())
    wall_s = max(a.end or 0.0 for a in run.attempts)
    return {"wall_s": round(wall_s, 4), "timed": len(run.timed), "disagreed": disagreed}


def compare_orders(a: argparse.Namespace, report: ResultFile, tables: Sequence[Table]) -> int:
    """Jobs whose ranks meet all tables in orders of their own; how many choices differed."""
    surrogate, summary, disagreed = surrogate_for(Settings()), dict[str, Any](), 0
    for workers in a.workers:
        walls = dict.fromkeys(SIZES, 0.0)
        for seed in range(a.seeds):
            for size in SIZES:
                found = orders_job(tables, size, workers, surrogate, seed)
                walls[size] += found["wall_s"]
                disagreed += found["disagreed"]
                report.add("job", {"workers": workers, "ranks": size, "seed": seed, **found})
        summary[f"tune-{workers}"] = {str(size): round(walls[size] / walls[1], 3) for size in SIZES}
        result_files.say(f"tune with {workers} workers, any order: {summary[f'tune-{workers}']}")
    report.finish({**summary, "tables": len(tables), "disagreed": disagreed})
    return disagreed


def one_job(table: Table, size: int, workers: int, mode: Mode, surrogate: Surrogate) -> dict[str, Any]:
    """A job's wall in virtual seconds, what it timed, and how far its choice is from the table's best."""
    job = SimulatedJob(
        size, 0, problems=[table], hazards=CALM, mode=mode, workers=workers, surrogate=surrogate
    )
    run = job.simulate()
    decisions = [a.decision for a in run.attempts if a.decision is not None]
    chosen = {d.chosen for d in decisions}
    best = min(m.ms for m in table.by_candidate().values() if m.ok)
    return {
        "wall_s": round(max(a.end or 0.0 for a in run.attempts), 4),
        "timed": len(run.timed),
        "disagreed": len(chosen) != 1,
        "regret": round((decisions[0].median_ms or best) / best - 1.0, 4),
    }


def main() -> int:
    """Replay every table; 1 if ranks of a job chose differently."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 16], help="compile workers of a rank")
    parser.add_argument("--orders", action="store_true", help="every rank meets the tables in another order")
    parser.add_argument("--seeds", type=int, default=2, help="orders for each size of a job")
    parser.add_argument("--out", type=Path, required=True, help="the result file (JSON)")
    a = parser.parse_args()
    report = result_files.ResultFile(a, "replayed_jobs", 0)
    tables = list({t.problem.kernel.name: t for t in reversed(load(shipped_tables()))}.values())
    if a.orders:
        return int(compare_orders(a, report, tables) > 0)
    surrogate = surrogate_for(Settings())
    summary: dict[str, Any] = {}
    disagreed = 0
    for mode in (Mode.TUNE, Mode.EXHAUSTIVE):
        for workers in a.workers:
            walls = dict.fromkeys(SIZES, 0.0)
            for table in tables:
                for size in SIZES:
                    found = one_job(table, size, workers, mode, surrogate)
                    walls[size] += found["wall_s"]
                    disagreed += found["disagreed"]
                    named = {"kernel": table.problem.kernel.name, "key": list(table.problem.key)}
                    report.add("job", {**named, "mode": mode, "workers": workers, "ranks": size, **found})
            shares = {str(size): round(walls[size] / walls[1], 3) for size in SIZES}
            summary[f"{mode}-{workers}"] = {"one_rank_s": round(walls[1], 2), **shares}
            result_files.say(f"{mode} with {workers} workers: {shares}")
    report.finish({**summary, "tables": len(tables), "disagreed": disagreed})
    return int(disagreed > 0)


if __name__ == "__main__":
    sys.exit(main())
