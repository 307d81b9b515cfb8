"""Claim: a surrogate's statements are about as often true as it says. Fits and checks the shipped curves.

    pip install 'forecast-autotune[eval]' && python -m benchmarks.forecasting.calibration \
        --out benchmarks/results/calibration.json [--write forecast_autotune/assets/calibration.json] \
        [--unseen]

Replays the recorded tables (several seeds; kernel unseen, tuned at other shapes, without IR, on a device
renamed beyond recognition; or, for `pooled`, measured on other devices), each kernel family by a surrogate
that has not seen it. With `--unseen` only the first of these, in a quarter of the time: other groups stay as
they are written. The reliability that is printed leaves each family out of the curves too; only what is
written for the package was fitted to all.

With `--untimed`, what happens where nothing is timed (mode `skip`; `tune` does so where the risk is accepted), on lists
of libraries that are in no fit: stated against observed, with Wilson's 95 % intervals, by what is known. The constants
of `Forecasts.untimed_risk` are fitted by `--untimed --fit`, in ten minutes, to recorded kernels in four folds.

Replays run on the CPU; the times in the tables were measured on the devices they name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.environment import environment
from benchmarks.lib.recorded_advice import FamilyModels, advice_by_source
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.calibration import FAMILIAR, INFORMED, SCHEMA, STRANGE
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Relative, Surrogate
from forecast_autotune.tuning.loop import TaskForecaster
from forecast_autotune.tuning.replays.replay import (
    load,
    replay_one,
    shipped_tables,
    tables_elsewhere,
    tables_of_other_shapes,
    task_of,
)
from forecast_train.splits import family_of, spread_over_kernels
from forecast_train.surrogate.calibrate import calibrate_cross_device, calibrate_surrogate
from forecast_train.surrogate.fit import fit
from forecast_train.surrogate.replays import FitSurrogate

DATA = Path(__file__).resolve().parents[1] / "data"
HUB_TABLES = DATA / "benchmark_hub.jsonl.gz"
RISKS, TOLERANCES = (0.05, 0.1, 0.2), (0.02, 0.05, 0.1)
_NEAREST = 4
"""Other shapes of a kernel that were tuned before."""
_MOST_ROWS = 300
"""Rows of a space of thousands."""


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


def with_tuned_shapes(
    tables: Sequence[Table], known: Sequence[Table], surrogate: Surrogate
) -> Iterator[tuple[Table, list[Relative]]]:
    """Each table of a kernel that has others, with what the tuner itself measured of the nearest, nearest first."""
    tuned: dict[str, Relative] = {}
    for table in tables:
        near = tables_of_other_shapes(table.problem, known)[:_NEAREST]
        for other in near:
            if other.problem.id not in tuned:
                plain = Settings(advice="off")
                _, seen = replay_one(other, surrogate=surrogate, policy=None, settings=plain)
                tuned[other.problem.id] = Relative(other.problem, tuple(seen))
        if near:
            yield table, [tuned[other.problem.id] for other in near]


def untimed_decisions(limit: int | None) -> list[dict[str, Any]]:
    """Decisions without a clock by the surrogate that ships, with their stated risk and regret."""
    lists = load([DATA / "libraries_h200.jsonl.gz"])[:: 1 if limit is None else max(1, 117 // limit)]
    spaces = [
        Table(t.problem, t.measurements[:: max(1, len(t.measurements) // _MOST_ROWS)])
        for t in read_tables(HUB_TABLES)
    ]
    given = {
        "nothing": [(table, []) for table in lists],
        "other arguments": list(with_tuned_shapes(lists, lists, default_surrogate())),
        "another GPU": [(t, tables_elsewhere(t, spaces)) for t in spaces[:limit]],
    }
    rows = []
    for known, advice, tolerance in itertools.product(given, ("off", "stored"), TOLERANCES):
        settings = Settings().with_(mode="skip", advice=advice, tolerance=tolerance)
        for table, relatives in given[known]:
            row, _ = replay_one(
                table, surrogate=default_surrogate(), policy=None, settings=settings, relatives=relatives
            )
            about = {"known": known, "advice": advice, "tolerance": tolerance, "kernel": row.kernel}
            rows.append({**about, "risk": round(row.stated_risk, 4), "regret": round(row.regret, 5)})
    return rows


def untimed_table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The decisions that an accepted risk would have made without a clock, and their regret."""
    lines = []
    for known, advice, tolerance in dict.fromkeys((r["known"], r["advice"], r["tolerance"]) for r in rows):
        these = [r for r in rows if (r["known"], r["advice"], r["tolerance"]) == (known, advice, tolerance)]
        for accepted in (*RISKS, 1.0):
            some = [r for r in these if r["risk"] <= accepted]
            line = {
                "known": known,
                "advice": advice,
                "tolerance": tolerance,
                "risk": accepted,
                "of": len(these),
            }
            if n := len(some):
                beyond, z = sum(r["regret"] > tolerance + 1e-9 for r in some), 1.96
                middle, half = (
                    beyond / n + z * z / 2 / n,
                    math.sqrt(beyond * (n - beyond) / n + z * z / 4) * z / n,
                )
                low, high = ((middle + sign * half) / (1 + z * z / n) for sign in (-1, 1))
                worst = max(some, key=lambda r: r["regret"])
                line |= {"stated": float(np.mean([r["risk"] for r in some])), "beyond": beyond}
                line |= {
                    "low": max(0.0, low),
                    "high": high,
                    "worst": worst["regret"],
                    "worst_kernel": worst["kernel"],
                }
            lines.append({**line, "decided": len(some)})
    return lines


def fit_untimed() -> dict[str, float]:
    """The constants of `Forecasts.untimed_risk`: logistic regression; a kernel weighs as the root of its decisions."""
    names = ("corpus_h200.jsonl.xz", "corpus_h200_2.jsonl.xz", "corpus_h200_near.jsonl.gz")
    tables = load([*shipped_tables(), *(DATA / name for name in names)])
    fold_of = {t.problem.id: zlib.crc32(family_of(t.problem).encode()) % 4 for t in tables}
    seen: list[tuple[str, list[float], bool]] = []
    for fold in range(4):
        surrogate = fit([t for t in tables if fold_of[t.problem.id] != fold])
        held = [t for t in tables if fold_of[t.problem.id] == fold][::5]
        for table, relatives in [*((t, []) for t in held), *with_tuned_shapes(held, tables, surrogate)]:
            forecaster = TaskForecaster(task_of(table), surrogate)
            forecaster.traces.trace_initial()
            forecasts, times = forecaster.forecast([], relatives, once=True), table.by_candidate()
            row, best = int(forecasts.order()[0]), min(m.ms for m in times.values() if m.ok)
            chosen = times[forecasts.candidates[row]]
            for tolerance in TOLERANCES:
                risk = min(max(1.0 - float(forecasts.p_within(tolerance)[row]), 0.002), 0.998)
                about = [
                    1.0,
                    math.log(risk / (1 - risk)),
                    -math.log2(tolerance / 0.02),
                    -float(row == forecasts.proven),
                ]
                seen.append(
                    (table.problem.kernel.name, about, not chosen.ok or chosen.ms > best * (1 + tolerance))
                )
    count = Counter(kernel for kernel, *_ in seen)
    x, y = np.array([about for _, about, _ in seen]), np.array([beyond for *_, beyond in seen], float)
    weight, theta = np.array([count[kernel] ** -0.5 for kernel, *_ in seen]), np.zeros(4)
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-x @ theta))
        theta -= np.linalg.solve(
            (x.T * (weight * p * (1 - p))) @ x + 0.1 * np.eye(4), x.T @ (weight * (p - y)) + 0.1 * theta
        )
    return dict(zip(("odds", "slope", "per doubling", "proven"), theta.round(3).tolist(), strict=True))


def untimed(arguments: argparse.Namespace) -> int:
    """Everything of `--untimed`."""
    warnings.simplefilter("ignore")
    rows = untimed_decisions(arguments.limit)
    report = {"environment": environment(seed=0), "table": untimed_table(rows)}
    if arguments.fit:
        report["fitted"] = fit_untimed()
        print(report["fitted"])
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for x in report["table"]:
        text = (
            f"{x['known']}, advice {x['advice']}, {x['tolerance']:.0%}, risk {x['risk']:.0%}: {x['decided']}"
        )
        if x["decided"]:
            text += f", stated {x['stated']:.2f}, beyond {x['beyond']} ({x['low']:.2f} to {x['high']:.2f})"
            text += f", worst {x['worst']:.1%} {x['worst_kernel']}"
        print(f"{text}; of {x['of']}")
    return 0


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
    parser.add_argument("--untimed", action="store_true", help="only decisions in which nothing is timed")
    parser.add_argument("--fit", action="store_true", help="with --untimed: fit what their risk is made of")
    arguments = parser.parse_args()
    if arguments.untimed:
        return untimed(arguments)
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
