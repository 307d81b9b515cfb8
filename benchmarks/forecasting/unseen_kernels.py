"""Claim: how good forecasts are on kernels, hands and shapes that the surrogate has not seen.

    pip install -e '.[eval]'
    python -m benchmarks.forecasting.unseen_kernels --out benchmarks/results/forecasts.json \
        [--leave-out family hand shape] [--seeds 5] [--jobs 2] [--tables FILE... [--limit 262]] [--scores] \
        [--short 20]

Runs `forecast-autotune replay --leave-out ...` over the shipped tables (and `--tables`; at most `--limit`
problems, in turn from each kernel), all baselines beside it, and keeps its JSON whole. With `--short` every
list is so many of its candidates, drawn at random, and what is fitted is fitted to those lists alone. Replays
run on the CPU; the times in the tables were measured on the H200.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import environment
from benchmarks.lib.result_files import say
from forecast_autotune.records.table import write_tables
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.evaluation.rows import INTERVAL_LEVELS
from forecast_train.evaluation.splits import spread_over_kernels
from forecast_train.surrogate.calibrate import shorten_table

SUMMARY_FIGURES = (
    ("top-1, nothing measured", "static.top1.geomean_regret"),
    ("top-3, nothing measured", "static.top3.geomean_regret"),
    ("adaptive, max(3, 10 %)", "adaptive.max3_10%.geomean_regret"),
    ("... 95th percentile", "adaptive.max3_10%.p95_regret"),
    ("adaptive, max(5, 15 %)", "adaptive.max5_15%.geomean_regret"),
    ("default policy: beyond 2 %", "default.beyond_tolerance"),
    ("default policy: stated", "default.mean_stated_risk"),
    ("default policy: share measured, n >= 30", "default.measured_share.large"),
    ("... n < 30", "default.measured_share.small"),
    ("ECE of the stated risk", "default.ece_risk"),
    ("ECE of P(within 5 %)", "static.ece_within"),
    ("AUROC of P(failure)", "static.auroc_fail"),
    ("rank correlation", "static.spearman"),
    *(
        (f"in the stated {level:.0%} interval", f"static.coverage_stated.{level:.0%}")
        for level in INTERVAL_LEVELS
    ),
)
"""What the summary shows of `learned`, `analytic` and `random`."""


def gather_tables(paths: list[Path], limit: int | None, into: Path, short: int | None = None) -> list[str]:
    """The file of shipped and given tables, thinned to `limit` problems; none where nothing is given.

    With `short`, so many candidates of each that has more.
    """
    if not paths and short is None:
        return []
    tables = load([*shipped_tables(), *paths])
    if limit is not None:
        tables = spread_over_kernels(tables, limit)
    if short is not None:
        tables = [few for t in tables if (few := shorten_table(t, short, 0)) is not None]
    write_tables(into, tables)
    return [str(into)]


def leave_one_out(
    what: str, seeds: int, jobs: int, baselines: str | None, files: list[str], *, scores: bool = False
) -> dict[str, Any]:
    """The JSON of one `replay --leave-out`; with `scores` of one `eval`, which fits every fold but once."""
    command = [sys.executable, "-m", "forecast_autotune", "eval" if scores else "replay", "--json", *files]
    command += ["--leave-out", what, "--seeds", str(seeds), "--jobs", str(jobs)]
    if baselines is not None:
        command += ["--methods", f"learned,{baselines}"] if scores else ["--baselines", baselines]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return {"evaluation": found} if scores else found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--leave-out", nargs="+", default=["family", "hand", "shape"])
    parser.add_argument("--baselines", help="comma-separated (default: all)")
    parser.add_argument(
        "--tables", type=Path, nargs="*", default=[], help="recorded tables besides the shipped"
    )
    parser.add_argument("--limit", type=int, help="at most so many problems")
    parser.add_argument("--short", type=int, help="of each list so many candidates")
    parser.add_argument("--scores", action="store_true", help="no problem by problem: half the time")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    report: dict[str, Any] = {"claim": "forecasts", "environment": environment(arguments.seeds), "raw": {}}
    report["summary"] = {}
    with tempfile.TemporaryDirectory() as folder:
        files = gather_tables(
            arguments.tables, arguments.limit, Path(folder) / "tables.jsonl.gz", arguments.short
        )
        evaluate_splits(arguments, files, report)
    return 0


def evaluate_splits(arguments: argparse.Namespace, files: list[str], report: dict[str, Any]) -> None:
    """Every kind of fold, written and shown as it is done."""
    for what in arguments.leave_out:
        found = leave_one_out(
            what, arguments.seeds, arguments.jobs, arguments.baselines, files, scores=arguments.scores
        )
        report["raw"][what] = found
        methods = found["evaluation"]["methods"]
        shown: dict[str, Any] = {}
        for name in methods:
            figures = methods[name]["figures"]
            shown[name] = {
                title: [figures[key][k] for k in ("value", "low", "high")]
                for title, key in SUMMARY_FIGURES
                if key in figures
            }
        report["summary"][what] = shown
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        for title, key in SUMMARY_FIGURES:
            cells = [
                f"{name} {methods[name]['figures'].get(key, {}).get('value')}"
                for name in ("learned", "analytic", "random")
                if name in methods
            ]
            say(f"{what}: {title}: {', '.join(cells)}")


if __name__ == "__main__":
    sys.exit(main())
