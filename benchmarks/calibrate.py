"""Claim: a decision's stated risk is about as often true as it says. Fits and checks the shipped curve.

    pip install scikit-learn && python benchmarks/calibrate.py --out benchmarks/results/calibration.json \
        [--write forecast_autotune/assets/calibration.json]

Replays the recorded tables (several seeds, kernel unseen and kernel tuned at other shapes), notes at
every step the risk as the surrogate states it and whether the incumbent's regret really exceeded the
tolerance, and fits an isotonic curve. The reliability table is made with each kernel left out of the
fit in turn. Replays run on the CPU; the times in the tables were measured on the H200.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.isotonic import IsotonicRegression

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report_environment import environment
from forecast_autotune.policy import RiskBounded, State
from forecast_autotune.replay import load, relatives_of, replay_one, shipped
from forecast_autotune.results import Plan
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.analytic import Analytic
from forecast_autotune.table import Table

KNOTS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
EDGES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0001)


class Watched(RiskBounded):
    """The default policy, noting its raw risk and the truth at every step. Goes on past its limits."""

    def note(self, table: Table, rows: list[tuple[str, float, bool]]) -> Watched:
        best = min(m.ms for m in table.by_candidate().values() if m.ok)
        object.__setattr__(self, "_table", (table.problem.kernel.name, math.log2(best), rows))
        return self

    def plan(self, state: State) -> Plan:
        # The raw share of draws, without the curve that is being fitted.
        raw = replace(state, forecasts=replace(state.forecasts, calibrate=float), risk=0.02)
        plan = super().plan(raw)
        kernel, best, rows = self._table  # type: ignore[attr-defined]
        if math.isfinite(state.best()):
            rows.append((kernel, plan.risk, state.best() - best > math.log2(1 + state.tolerance) + 1e-9))
        return plan


def observe(tables: list[Table], seed: int) -> list[tuple[str, float, bool]]:
    """(kernel, stated, came true) of every step of one pass over all problems, twice."""
    rows: list[tuple[str, float, bool]] = []
    settings = Settings(seed=seed)
    tuned: dict[str, Any] = {}
    for prior in ("none", "tuned"):
        for table in tables:
            _, seen = replay_one(
                table,
                surrogate=Analytic(),
                policy=Watched(share=0.3).note(table, rows),
                settings=settings,
                relatives=relatives_of(table, tables, prior, tuned),
            )
            if prior == "none":
                tuned[table.problem.id] = seen[:12]
    return rows


def curve(stated: Any, true: Any) -> list[tuple[float, float]]:
    """Isotonic knots; a little pessimism where there are few cases."""
    fit = IsotonicRegression(y_min=0.005, y_max=1.0, out_of_bounds="clip").fit(stated, true)
    values = np.maximum.accumulate(fit.predict(np.array(KNOTS)))
    return [(k, round(float(v), 4)) for k, v in zip(KNOTS, values, strict=True)]


def reliability(stated: Any, true: Any) -> dict[str, Any]:
    """Stated against observed by bin, and the expected calibration error."""
    bins = []
    for low, high in itertools.pairwise(EDGES):
        inside = (stated >= low) & (stated < high)
        if inside.any():
            row = {"low": low, "high": min(high, 1.0), "n": int(inside.sum())}
            bins.append(
                {**row, "stated": float(stated[inside].mean()), "observed": float(true[inside].mean())}
            )
    error = sum(b["n"] * abs(b["stated"] - b["observed"]) for b in bins) / len(stated)
    return {"ece": error, "bins": bins}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--write", type=Path, help="where the package keeps its curve")
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    tables = load(shipped())
    rows: list[tuple[str, float, bool]] = []
    for seed in range(arguments.seeds):
        rows += observe(tables, seed)
        print(f"seed {seed}: {len(rows)} steps so far", flush=True)
    kernels = np.array([r[0] for r in rows])
    stated = np.array([r[1] for r in rows])
    true = np.array([r[2] for r in rows], dtype=float)
    held_out = np.zeros(len(rows))
    for kernel in sorted(set(kernels)):
        out = kernels == kernel
        knots = curve(stated[~out], true[~out])
        held_out[out] = np.interp(stated[out], *zip(*knots, strict=True))
    knots = curve(stated, true)
    surrogate = f"{Analytic.name}/{Analytic.version}"
    report = {
        "environment": environment(seed=arguments.seeds),
        "surrogate": surrogate,
        "problems": len(tables),
        "kernels": len(set(kernels)),
        "steps": len(rows),
        "curve": knots,
        "raw": reliability(stated, true),
        "kernel_left_out": reliability(held_out, true),
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.write:
        text = {"fitted_by": "benchmarks/calibrate.py", "steps": len(rows), "curves": {surrogate: knots}}
        arguments.write.write_text(json.dumps(text, indent=1) + "\n")
    for name in ("raw", "kernel_left_out"):
        part: dict[str, Any] = report[name]  # type: ignore[assignment]
        print(f"{name}: ECE {part['ece']:.3f}")
        for b in part["bins"]:
            print(f"  stated {b['stated']:.2f} observed {b['observed']:.2f} (n={b['n']})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
