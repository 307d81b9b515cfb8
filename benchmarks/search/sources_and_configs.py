"""Claim: with as many configs timed, a search that forecasts sources and configs finds a faster kernel.

    python -m benchmarks.search.sources_and_configs --record --out RECORDING.jsonl [--seconds 540] [--null]
    python -m benchmarks.search.sources_and_configs --pack RECORDING.jsonl --out TABLE.jsonl.gz
    python -m benchmarks.search.sources_and_configs --replay TABLE.jsonl.gz --models FOLDER --out RESULT.json

`--record` times many configs of every source of the benchmark kernels on a GPU: the base, what a language
model wrote, our own rewrites; each source is checked against the reference first. Lines are on disk as they
come, and the same command goes on where it stopped, so it may be run in pieces. `--pack` makes a measurement
table of them. Compiling decides how long it takes: some ten (source, config) pairs a second on 16 cores, of
which there are 11,600 with the defaults: a run of nine minutes records about half of the kernels.

`--replay` needs no device: it runs the real search against the table, several seeds for every problem and arm
(see `source_replay`). The surrogate of a problem is fitted without its whole family of kernels, once per
family; it lies in `--models` then. An evaluation is one (source, config) that is timed, or tried in vain: all
arms pay for each, and are read after equally many. With `--tuned`, the base's configs were timed before and
cost nothing: there is less to gain then. Scores are log2(time / time of the base under the best of its
recorded configs), and the figures are those of `equal_budget`; the arm `--claim` at the last of the
budgets decides whether the claim holds. `timing_noise` says how far two timings of a candidate disagree. With
`--judgements RESULT`, a result file of `source_ranking`, there are arms that know what was forecast of the sources
before: `judged by model`, `judged by ensemble`. Of a kernel with tables at several shapes, the first is searched.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import result_files
from benchmarks.lib.result_files import say
from benchmarks.lib.search.pool_replay import ReplayedSearch
from benchmarks.lib.search.source_pool import BASE, write_tables
from benchmarks.lib.search.source_recording import compile_kernel, record_kernels, time_kernel
from benchmarks.lib.search.source_replay import ARMS, JUDGED, KernelRecord, replay_sources
from benchmarks.lib.surrogates_without import surrogates_by_family
from benchmarks.lib.variants.variant_forecasts import file_digest
from benchmarks.search.equal_budget import summary
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.variants.judgement import SourceJudgement
from forecast_harness.search.records import SearchSettings


def replay_all(a: Namespace, report: result_files.ResultFile) -> dict[str, Any]:
    """Every arm on every problem with every seed; the summary."""
    tables = read_tables(a.replay)
    only = set(filter(None, a.only.split(",")))
    tables = [t for t in tables if not only or t.problem.extra["label"].partition("/")[0] in only]
    tables = [t for t in tables if all("text" in one for one in t.problem.extra["sources"].values())]
    judged = {} if a.judgements is None else recorded_judgements(a.judgements)
    known = surrogates_by_family(sorted({t.problem.extra["family"] for t in tables}), a.models)
    budgets = sorted(int(b) for b in a.budgets.split(","))
    settings = SearchSettings(samples=a.samples, k=a.k)
    asked = {"unfiltered", a.claim, *a.arms.split(",")}
    arms = [arm for arm in (*ARMS, *judged) if not a.arms or arm in asked]
    runs: list[ReplayedSearch] = []
    pools = {}
    for table in tables:
        try:
            recorded = KernelRecord(table, known[table.problem.extra["family"]])
        except ValueError as error:
            say(f"left out: {error}")
            continue
        pool = recorded.pool
        if len(pool.nodes) < a.least:
            say(f"left out: {pool.target.name} has {len(pool.nodes)} sources that were timed to the end")
            continue
        pools[pool.target.name] = pool
        report.add("table", record_summary(recorded))
        for seed, arm in itertools.product(range(a.seeds), arms):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run = replay_sources(
                    recorded,
                    arm,
                    budget=budgets[-1],
                    seed=seed,
                    trials=a.trials,
                    settings=settings,
                    tuned=a.tuned,
                    judgements=judged.get(arm),
                )
            runs.append(run)
            row = {"problem": run.problem, "seed": seed, "arm": arm, "ended": run.ended}
            report.add("runs", {**row, "best": [round(b, 4) for b in run.best]})
        mine = [r for r in runs if r.problem == pool.target.name]
        at = {
            arm: round(statistics.fmean(r.at(budgets[-1]) for r in mine if r.arm == arm), 4) for arm in arms
        }
        say(f"{pool.target.name}: best of the pool {min(pool.scores.values()):+.4f}, mean of the runs {at}")
    if not runs:
        raise ValueError(f"{a.replay} holds no kernel with {a.least} sources that were timed to the end")
    origin = {"table": file_digest(a.replay), "device": tables[0].problem.device.name}
    options = {"trials": a.trials, "base_is_tuned": a.tuned, "claim": a.claim}
    return {**origin, **options, **summary(pools, runs, budgets, a.claim)}


def recorded_judgements(path: Path) -> dict[str, dict[str, SourceJudgement]]:
    """What `source_ranking` found to be forecast of each source, by arm, then by digest of the text.

    The spread is that of the faster side: what could be gained is asked of it.
    """
    rows = json.loads(path.read_text(encoding="utf-8"))["raw"]["sources"]
    found: dict[str, dict[str, SourceJudgement]] = {}
    for row in rows:
        for arm in ("model", "ensemble"):
            _, score, faster, _, p_wrong = map(float, row["arms"][arm].split())
            said = SourceJudgement(score, faster, p_wrong)
            found.setdefault(f"{JUDGED}{arm}", {})[row["sha256"]] = said
    return found


def record_summary(recorded: KernelRecord) -> dict[str, Any]:
    """What the record of a kernel holds, and how good forecasts of its configs are before any is timed."""
    table, pool = recorded.table, recorded.pool
    rows = recorded.rows
    outcomes = Counter(str(m.outcome) for m in rows.values())
    gaps = []
    for variant, said in recorded.before.items():
        best = recorded.best(variant)
        first = next(c for c in recorded.by_variant[variant] if c.config == said.configs[said.order[0]])
        if best is not None and rows[first].ok:
            gaps.append(math.log2(rows[first].ms / rows[best].ms))
    return {
        "problem": pool.target.name,
        "family": table.problem.extra["family"],
        "sources": dict(Counter(n.arm for n in pool.nodes.values())),
        "wrong_or_lost": sum(one.get("outcome") != "ok" for one in table.problem.extra["sources"].values()),
        "evaluations": len(rows),
        "outcomes": dict(sorted(outcomes.items())),
        "best": round(min(pool.scores.values()), 4),
        "speedups": speedups_by_origin(recorded),
        "first_config_forecast_is_slower_by": round(2 ** statistics.median(gaps) - 1, 4) if gaps else None,
        "timing": timing_noise(table),
    }


def speedups_by_origin(recorded: KernelRecord) -> dict[str, float]:
    """By origin (`llm`, `mechanical`): time of the base over that of the best source, at their best configs.

    The finalists' times are those that were taken in turns.
    """
    told, found = recorded.table.problem.extra["sources"], dict[str, float]()
    for variant in recorded.variants.values():
        best = recorded.best(variant)
        if variant != BASE and best is not None and told[variant]["outcome"] == "ok":
            gain = 2 ** (recorded.yardstick - math.log2(recorded.rows[best].ms))
            origin = told[variant]["origin"]
            found[origin] = round(max(gain, found.get(origin, 0.0)), 4)
    return found


def timing_noise(table: Table) -> dict[str, float | int]:
    """Median |log2| between what a candidate took alone and in turns with the finalists, and how many."""
    alone: dict[Any, float] = {}
    apart = []
    for row in table.measurements:
        if row.ok and row.in_turns and row.candidate in alone:
            apart.append(abs(math.log2(row.ms / alone[row.candidate])))
        elif row.ok:
            alone[row.candidate] = row.ms
    return {"retimed": len(apart), "apart": round(statistics.median(apart), 5) if apart else 0.0}


def options() -> ArgumentParser:
    """Of all modes."""
    made = result_files.parser(__doc__)
    cores = len(os.sched_getaffinity(0))
    what = made.add_mutually_exclusive_group()
    what.add_argument("--record", action="store_true", help="on a GPU: add to --out what is missing of it")
    what.add_argument("--pack", type=Path, metavar="RECORDING", help="write its tables to --out")
    what.add_argument("--replay", type=Path, metavar="TABLE", help="search this table")
    made.add_argument("--only", default="", help="comma-separated kernels")
    made.add_argument("--mechanical", type=int, default=4, help="rewrites of a kernel at most")
    made.add_argument("--each", type=int, default=48, metavar="N", help="configs of a source at most")
    made.add_argument("--workers", type=int, default=max(1, cores - 1), help="compilations at a time")
    made.add_argument("--seconds", type=float, default=540.0, help="begin no kernel after so many")
    made.add_argument("--limit", type=float, default=60.0, help="seconds without a line: a source hangs")
    made.add_argument("--models", type=Path, help="folder of surrogates, fitted without a family each")
    made.add_argument(
        "--arms", default="", help="comma-separated, beside unfiltered and the claimed one; all by default"
    )
    made.add_argument("--judgements", type=Path, metavar="RESULT", help="of source_ranking, for more arms")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--claim", default="updated", help="the arm that is to be better than unfiltered")
    made.add_argument("--tuned", action="store_true", help="the base's configs were timed before, for free")
    made.add_argument("--budgets", default="6,12,24", help="evaluations; the last decides")
    made.add_argument("--trials", type=int, default=3, help="configs of a source that a run may time")
    made.add_argument("--least", type=int, default=8, help="sources of a kernel that is replayed")
    made.add_argument("--samples", type=int, default=16)
    made.add_argument("--k", type=int, default=4)
    made.set_defaults(stub_only="--record" not in sys.argv)
    return made


def main() -> int:
    made = options()
    a = result_files.parse_arguments(made)
    if a.child:
        torch.set_num_threads(1)
        if a.child == "compile":
            compile_kernel(a.given)
        else:
            time_kernel(a.given, a.null)
        return 0
    if a.record:
        return record_kernels(__file__, a)
    if a.pack is not None:
        say(f"{write_tables(a.pack, a.out)} measurements in {a.out.name}")
        return 0
    if a.replay is None or a.models is None:
        made.error("say --record, --pack RECORDING, or --replay TABLE with --models FOLDER")
    report = result_files.ResultFile(a, "search_sources")
    done = replay_all(a, report)
    report.finish(done)
    return 0 if done["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
