"""Claim: a surrogate's statements are about as often true as it says. Fits and checks the shipped curves.

    pip install 'forecast-autotune[eval]' && python -m benchmarks.forecasting.calibration \
        --out benchmarks/results/calibration.json [--write forecast_autotune/assets/calibration.json] \
        [--unseen]

Replays the recorded tables (several seeds; kernel unseen, tuned at other shapes, without IR, on a device
renamed beyond recognition; or, for `pooled`, measured on other devices), each kernel family by a surrogate
that has not seen it. With `--unseen` only the first of these, in a quarter of the time: other groups stay as
they are written. The reliability that is printed leaves each family out of the curves too; only what is
written for the package was fitted to all.
Replays run on the CPU; the times in the tables were measured on the devices they name.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import environment
from benchmarks.lib.recorded_advice import FamilyModels, advice_by_source
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.calibration import FAMILIAR, INFORMED, SCHEMA, STRANGE
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.splits import family_of, spread_over_kernels
from forecast_train.surrogate.calibrate import calibrate_cross_device, calibrate_surrogate
from forecast_train.surrogate.fit import fit
from forecast_train.surrogate.replays import FitSurrogate

HUB_TABLES = Path(__file__).resolve().parents[1] / "data" / "benchmark_hub.jsonl.gz"


def analytic(_: Sequence[Table]) -> Surrogate:
    """The untrained surrogate: there is nothing to fit."""
    return AnalyticSurrogate()


def learned(tables: Sequence[Table]) -> Surrogate:
    """The learned surrogate, fitted to these tables alone."""
    return fit(tables)


SURROGATES = {"analytic": analytic, "learned": learned}
ADVISED = "advised"
"""The learned surrogate, following recorded advice; with `--models`."""
GROUPS_WITH_IR = (INFORMED, FAMILIAR, STRANGE)
"""Groups that `--unseen` is for."""
POOLED = "pooled"
"""Goes by other devices' tables, so that it is calibrated on the spaces that several devices know."""


def calibration_report(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One surrogate's curves and their reliability."""
    seeds, jobs = range(arguments.seeds), arguments.jobs
    if name == POOLED:
        return calibrate_cross_device(load(arguments.tables or [HUB_TABLES]), seeds, jobs=jobs)
    tables = load([*shipped_tables(), *arguments.tables])
    make: FitSurrogate | None = SURROGATES.get(name)
    if make is None or arguments.models is not None:
        advice = advice_by_source() if name == ADVISED else None
        make = FamilyModels(arguments.models, [family_of(t.problem) for t in tables], advice)
    if arguments.limit is not None:
        tables = spread_over_kernels(tables, arguments.limit)
    return calibrate_surrogate(tables, make, seeds, jobs=jobs, unseen=arguments.unseen)


def reliability_text(name: str, report: dict[str, Any]) -> None:
    """One surrogate's reliability, for a terminal."""
    for group, parts in report.items():
        print(f"{name}, {group}:")
        for what, part in parts.items():
            if "bins" not in part:
                print(f"  {what}: " + ", ".join(f"{k} -> {v:.3f}" for k, v in part.items()))
                continue
            print(
                f"  {what}: n {part['n']}, ECE {part['ece']:.3f}, Brier {part['brier']:.3f} "
                f"(base rate {part['brier_of_base_rate']:.3f})"
            )
            for b in part["bins"]:
                print(f"    stated {b['stated']:.2f} observed {b['observed']:.2f} (n={b['n']:.0f})")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "tables",
        nargs="*",
        type=Path,
        help="table files besides the shipped ones (pooled: instead of those of benchmarks/data)",
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--write", type=Path, help="where the package keeps its curves")
    parser.add_argument(
        "--surrogates", nargs="+", choices=sorted({*SURROGATES, POOLED, ADVISED}), default=["analytic"]
    )
    parser.add_argument(
        "--models", type=Path, help="folder of learned surrogates, fitted without a family each"
    )
    parser.add_argument("--limit", type=int, help="at most so many problems, spread over the kernels")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--unseen", action="store_true", help="only kernels as recorded that nothing else is known of"
    )
    arguments = parser.parse_args()
    if ADVISED in arguments.surrogates and arguments.models is None:
        parser.error("--surrogates advised needs --models FOLDER")
    results = [calibration_report(name, arguments) for name in arguments.surrogates]
    for one in results:
        reliability_text(one["surrogate"], one["reliability"])
    report = {"environment": environment(seed=arguments.seeds), "surrogates": results}
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.write:
        old = json.loads(arguments.write.read_text()) if arguments.write.is_file() else {}
        kept = old["surrogates"] if old.get("schema") == SCHEMA else {}
        # Of one surrogate only the version that was just fitted: nobody can ask for an older one.
        fitted = {one["surrogate"].split("/")[0] for one in results}
        curves = {name: part for name, part in kept.items() if name.split("/")[0] not in fitted}
        for one in results:
            before = kept.get(one["surrogate"], {}) if arguments.unseen else {}
            # Of the other groups such a run holds next to nothing.
            fresh = {n: g for n, g in one["calibration"].items() if not before or n in GROUPS_WITH_IR}
            curves[one["surrogate"]] = {**before, **fresh}
        text = {"schema": SCHEMA, "fitted_by": "benchmarks/forecasting/calibration.py", "surrogates": curves}
        arguments.write.write_text(json.dumps(text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
