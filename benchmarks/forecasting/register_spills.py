"""Claim: a config is not among the best of its list if the same program spills registers with more warps.

    python -m benchmarks.forecasting.register_spills --out benchmarks/results/register_spills.json

Looks at every recorded config of which another, that agrees in all but warps and stages and has more warps, spilled at
least so many registers of a thread: how far it is from the best of its list, and what a list would lose without all of
them. Public libraries' kernels and our own are told apart. Recorded H200 times, evaluated on a CPU.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records.table import Table, latest_labels, read_tables
from forecast_autotune.tuning.preparation.register_spills import SPILLED, spill_slowdowns

DATA = ROOT / "benchmarks" / "data"
TABLES = {
    "libraries": ("libraries_h200.jsonl.gz",),
    "own": ("corpus_h200.jsonl.gz", "corpus_h200_2.jsonl.gz"),
}
WITHIN = 1.02


def expected_losers(tables: Iterable[Table], least: int) -> dict[str, Any]:
    """Configs that are expected to lose, where a spill of `least` registers counts, and what they did."""
    kernels, ratios, losses = set(), [], []
    for table in tables:
        labels = latest_labels(table.measurements)
        names = CandidateList(labels)
        slow = spill_slowdowns(names, labels.values(), least) > 0
        ran = {row: labels[c].ms for row, c in enumerate(names) if labels[c].ok}
        if not slow.any() or not ran:
            continue
        best = min(ran.values())
        kernels.add(table.problem.kernel.name)
        ratios += [ran[row] / best if row in ran else float("inf") for row in slow.nonzero()[0].tolist()]
        losses.append(min(ms for row, ms in ran.items() if not slow[row]) / best - 1)
    return {
        "least": least,
        "configs": len(ratios),
        "lists": len(losses),
        "kernels": len(kernels),
        "near_best": sum(ratio < WITHIN for ratio in ratios),
        "median_ratio": round(statistics.median(ratios), 2) if ratios else None,
        "largest_loss": round(max(losses, default=0.0), 5),
    }


def run(a: Namespace) -> dict[str, Any]:
    """Look at all tables with the threshold that decisions have, and with the least one."""
    report = ResultFile(a, "forecasting.register-spills", 0)
    summary: dict[str, Any] = {}
    for what, files in TABLES.items():
        tables = [table for name in files for table in read_tables(DATA / name)]
        summary[what] = {str(least): expected_losers(tables, least) for least in (1, SPILLED)}
        say(f"{what}: {summary[what]}")
    counted = [found[str(SPILLED)] for found in summary.values()]
    summary["all"] = {
        key: sum(one[key] for one in counted) for key in ("configs", "lists", "kernels", "near_best")
    }
    report.finish(summary)
    return summary


def main() -> int:
    run(parse_arguments(parser(__doc__), on_host=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
