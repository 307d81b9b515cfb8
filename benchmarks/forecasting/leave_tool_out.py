"""Claim: what a surrogate that was also fitted to another tool's measurements does to decisions on lists of libraries.

The learned surrogate is fitted to our own recorded tables, and to those and a tool's that were imported; either is
then replayed on lists of configs of public libraries, which neither has seen. Of other tools, only Kernel Tuner's
public spaces (benchmark_hub) are recorded here; of Helion and FlagGems there are no public times of single configs.

    python -m benchmarks.forecasting.leave_tool_out --out benchmarks/results/leave_tool_out.json
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.environment import host_environment
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.learned import LearnedSurrogate
from forecast_autotune.tuning.replays.replay import load, replay, shipped_tables
from forecast_train.splits import family_of
from forecast_train.surrogate import fit_model
from forecast_train.surrogate.fit import FitSettings

DATA = Path(__file__).resolve().parents[1] / "data"
FOREIGN = {"Kernel Tuner": DATA / "benchmark_hub.jsonl.gz"}


def thinned(table: Table, most: int) -> Table:
    """Every n-th row: spaces of thousands would outweigh lists of dozens in time, not in weight."""
    return Table(table.problem, table.measurements[:: max(1, len(table.measurements) // most)])


def judged(tables: list[Table], lists: list[Table], seed: int) -> dict[str, Any]:
    """The replays of one fit."""
    begin = time.perf_counter()
    model = fit_model(tables, seed=seed, recipe=FitSettings(jobs=1))
    fitted = time.perf_counter() - begin
    report = replay(
        lists, surrogate=LearnedSurrogate(model), policy=lambda table: None, settings=Settings(seed=seed)
    )
    rows = [
        {"kernel": r.kernel, "regret": r.regret, "measured": r.measured, "of": r.candidates}
        for r in report.rows
    ]
    regret = np.array([r.regret for r in report.rows])
    share = np.array([r.measured / r.candidates for r in report.rows])
    return {
        "seed": seed,
        "rows_fitted": sum(len(t.measurements) for t in tables),
        "rows_used": int((model.about or {})["rows"]),
        "fit_seconds": fitted,
        "mean_regret": float(regret.mean()),
        "worst_regret": float(regret.max()),
        "within_tolerance": float((regret <= report.tolerance + 1e-9).mean()),
        "measured_share": float(share.mean()),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--most", type=int, default=300, help="rows of a foreign space")
    parser.add_argument("--lists", type=int, default=0, help="lists that are replayed (default: all)")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lists = load([DATA / "libraries_h200.jsonl.gz"])
    lists = lists[:: max(1, len(lists) // options.lists)] if options.lists else lists
    held_out = {family_of(t.problem) for t in lists}
    own = [t for t in load(shipped_tables()) if family_of(t.problem) not in held_out]
    foreign = {tool: [thinned(t, options.most) for t in read_tables(path)] for tool, path in FOREIGN.items()}
    arms = {"own": own, **{f"own and {tool}": [*own, *tables] for tool, tables in foreign.items()}}
    results = {
        arm: [judged(tables, lists, seed) for seed in range(options.seeds)] for arm, tables in arms.items()
    }
    data = {"environment": host_environment(), "lists": len(lists), "own_tables": len(own), "arms": results}
    options.out.write_text(json.dumps(data, indent=1) + "\n")
    for arm, runs in results.items():
        print(arm, [{k: v for k, v in run.items() if k != "rows"} for run in runs])


if __name__ == "__main__":
    main()
