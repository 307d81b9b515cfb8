"""Claim: at equal numbers of measurements the tuner lands much nearer to the best than baselines do.

    python -m benchmarks.tuning.search_baselines --out benchmarks/results/replay.json

Replays the recorded H200 tables on the CPU, several seeds: the default policy with the kernel unseen
(`none`) and with the kernel tuned at its other shapes before (`tuned`), and, with as many measurements
as the default policy may make, random and first-k. The seconds are simulated from the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import environment
from forecast_autotune.policy import Fixed, Policy, RiskBounded
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.tuning.replays.replay import load, replay, shipped_tables


def most_measurements(table: Table) -> int:
    """The most measurements the default policy makes of a problem of this size (up to 100 configs)."""
    default = RiskBounded()
    n = len(table.by_candidate())
    assert n <= default.many, "larger problems follow the square-root rule"
    return max(default.floor, -int(-default.share * n // 1))


CONTENDERS: dict[str, tuple[str, Callable[[Table], Policy | None]]] = {
    "default, kernel unseen": ("none", lambda table: None),
    "default, other shapes tuned": ("tuned", lambda table: None),
    "random": ("none", lambda table: Fixed(most_measurements(table), random=True)),
    "first k": ("none", lambda table: Fixed(most_measurements(table))),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    tables = load(shipped_tables())
    raw: dict[str, list[Any]] = {}
    summary: dict[str, Any] = {}
    for name, (prior, policy) in CONTENDERS.items():
        runs = [
            replay(
                tables,
                surrogate=AnalyticSurrogate(),
                policy=policy,
                settings=Settings(seed=seed),
                prior=prior,
            )
            for seed in range(1 if name == "first k" else arguments.seeds)
        ]
        raw[name] = [run.to_json() for run in runs]
        for report in raw[name]:
            for row in report["problems"]:
                del row["path"]
        sums = [run.summary() for run in runs]
        keys = (
            "geomean_regret",
            "p95_regret",
            "median_measured_share",
            "beyond_tolerance_share",
            "mean_stated_risk",
        )
        summary[name] = {k: round(statistics.mean(s[k] for s in sums), 5) for k in keys}
        summary[name]["geomean_regret_by_seed"] = [round(s["geomean_regret"], 5) for s in sums]
        print(name, summary[name], flush=True)
    report = {"environment": environment(seed=arguments.seeds), "problems": len(tables), "summary": summary}
    arguments.out.write_text(json.dumps({**report, "raw": raw}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
