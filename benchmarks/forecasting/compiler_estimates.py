"""Claim: shared memory, spills and failures are known before compiling; checked against the compiler.

    pip install -e ".[eval]" && python -m benchmarks.forecasting.compiler_estimates --out FILE.json

Reads what `harvest_compiler_output.py` recorded (Triton 3.6 for sm_90, no GPU) and compares the compile-free
estimates with it: shared memory, registers, spills, and P(failure) against "needs more shared memory than
the device has, or did not compile in time". Nothing was fitted to these kernels by name; the rules of the
shared-memory estimate were written while looking at about half of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from benchmarks.lib.environment import environment
from forecast_autotune.features.devices import device_spec
from forecast_autotune.records import Candidate, Config, Problem
from forecast_autotune.records.table import read_lines
from forecast_autotune.surrogates.prior import formula_prior

RECORDED = Path(__file__).parents[1] / "data" / "compiled_sm90.jsonl.gz"


def config_rows(path: Path) -> list[dict[str, Any]]:
    """One row per compiled config: truth and estimates."""
    problems: dict[str, Problem] = {}
    compiled: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _, line in read_lines(path):
        if line["type"] == "problem":
            problem = Problem.from_json(line)
            problems[problem.id] = problem
        elif line["type"] == "compiled":
            compiled[line["problem"]].append(line)
    found = []
    for name, lines in compiled.items():
        problem = problems[name]
        candidates = [Candidate(Config.from_json(line["config"])) for line in lines]
        grids = {c: tuple(line["grid"]) for c, line in zip(candidates, lines, strict=True) if line["grid"]}
        before = formula_prior(problem, candidates, grids, problem.ttir)
        if before.costs is None:
            continue
        limit = device_spec(problem.device).shared_memory_bytes
        for i, line in enumerate(lines):
            ok = line["outcome"] == "ok"
            found.append(
                {
                    "kernel": problem.kernel.name,
                    "family": problem.extra["family"],
                    "hand": problem.extra["hand"],
                    "failed": not ok or line["shared"] > limit,
                    "too_large": ok and line["shared"] > limit,
                    "p_fail": float(before.p_fail[i]),
                    "shared": line.get("shared"),
                    "registers": line.get("registers"),
                    "spilt": bool(line.get("stack")),
                    "estimated_shared": float(before.costs.shared_bytes[i]),
                    "estimated_registers": float(before.costs.registers[i]),
                }
            )
    return found


def estimate_errors(found: list[dict[str, Any]]) -> dict[str, Any]:
    """How the estimates compare with the truth."""
    ok = [r for r in found if r["shared"] is not None]
    failed = np.array([r["failed"] for r in found])
    large = np.array([r["too_large"] for r in ok])
    p = np.array([r["p_fail"] for r in found])
    p_ok = np.array([r["p_fail"] for r in ok])
    shared, guess = (np.array([r[k] for r in ok], float) for k in ("shared", "estimated_shared"))
    registers, expected = (np.array([r[k] for r in ok], float) for k in ("registers", "estimated_registers"))
    spilt = np.array([r["spilt"] for r in ok])
    big = shared > 16384

    def auroc(truth: Any, score: Any) -> float | None:
        return round(float(roc_auc_score(truth, score)), 4) if 0 < truth.sum() < len(truth) else None

    return {
        "configs": len(found),
        "kernels": len({r["kernel"] for r in found}),
        "failed": int(failed.sum()),
        "too_large": int(large.sum()),
        "auroc_too_large": auroc(large, p_ok),
        "recall_too_large_at_0.9": round(float((p_ok[large] > 0.9).mean()), 4) if large.any() else None,
        "auroc_failed": auroc(failed, p),
        "brier_failed": round(float(((p - failed) ** 2).mean()), 5),
        "brier_of_base_rate": round(float(failed.mean() * (1 - failed.mean())), 5),
        "shared_within_3_percent_above_16_KiB": round(
            float((abs(guess[big] - shared[big]) <= 0.03 * shared[big]).mean()), 4
        )
        if big.any()
        else None,
        "registers_spearman": round(float(spearmanr(np.minimum(expected, 255), registers)[0]), 4),
        "registers_median_ratio": round(float(np.median(np.minimum(expected, 255) / registers)), 4),
        "spilt": int(spilt.sum()),
        "auroc_spilt": auroc(spilt, expected),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recorded", type=Path, default=RECORDED)
    arguments = parser.parse_args()
    found = config_rows(arguments.recorded)
    hands = sorted({r["hand"] for r in found})
    report = {
        "claim": "compiled_truth",
        "environment": environment(),
        "summary": estimate_errors(found),
        "by_hand": {hand: estimate_errors([r for r in found if r["hand"] == hand]) for hand in hands},
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
