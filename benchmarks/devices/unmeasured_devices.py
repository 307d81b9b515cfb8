"""Claim: where a device was never measured, the stated risk covers what the forecasts get wrong.

    python -m benchmarks.devices.unmeasured_devices --out FILE.json [--each 60] [--workers 2]

Recorded tables of libraries' kernels, which nothing shipped was fitted to, are replayed under the names and
datasheets of other devices: the formula prices every candidate for a machine that the times do not come from, as
wrong as a formula can well be for a new device. The tuner measures what it asks for, stops when it states the
accepted risk, and is judged by the table: how often its choice is over the tolerance, against how often it said.
Everything is replayed on the CPU from an H200's times; no figure depends on this machine's speed, and none is
one of the devices named.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune.features.devices import datasheet_device
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.records import Device
from forecast_autotune.records.table import Table, read_tables
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.tuning.replays.replay import replay_one

TABLES = Path(__file__).resolve().parents[1] / "data" / "libraries_h200.jsonl.gz"
MODELS = ("h200", "mi300x", "b200", "rtx 5090", "gpu max 1550")
"""The device whose times they are, and four that they are not."""
LEAST = 8
"""Candidates of a table that has anything to decide."""


def renamed(table: Table, device: Device) -> Table:
    """The table as if it were of another device, whose own limits the tuner then believes."""
    problem = replace(table.problem, device=device, id=f"{table.problem.id}-{device.slug}")
    rows = [replace(m, problem=problem.id) for m in table.measurements]
    return Table(problem, rows)


def replayed(job: tuple[str, Table], settings: Settings) -> dict[str, Any]:
    """One table under one name."""
    model, table = job
    given = renamed(table, datasheet_device(model))
    with single_threaded_blas():
        row, _ = replay_one(given, surrogate=default_surrogate(), policy=None, settings=settings)
    return {
        "model": model,
        "kernel": row.kernel,
        "label": row.label,
        "candidates": row.candidates,
        "measured": row.measured,
        "regret": round(row.regret, 5),
        "stated_risk": round(row.stated_risk, 4),
        "over": row.regret > settings.tolerance,
    }


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Stated against observed, for the tables under one name."""
    stated = np.array([r["stated_risk"] for r in rows])
    over = np.array([r["over"] for r in rows], float)
    share = np.array([r["measured"] / r["candidates"] for r in rows])
    # How far above the stated mean chance alone reaches: one-sided 95 %, of so many independent decisions.
    chance = 1.645 * float(np.sqrt(np.mean(stated * (1 - stated)) / len(rows)))
    return {
        "tables": len(rows),
        "stated": round(float(stated.mean()), 4),
        "over_tolerance": round(float(over.mean()), 4),
        "honest_up_to": round(float(stated.mean()) + chance, 4),
        "median_measured": float(np.median([r["measured"] for r in rows])),
        "mean_share_measured": round(float(share.mean()), 4),
        "median_regret": round(float(np.median([r["regret"] for r in rows])), 5),
        "p90_regret": round(float(np.quantile([r["regret"] for r in rows], 0.9)), 5),
    }


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--each", type=int, default=60, help="tables under each name, drawn at random")
    command_line.add_argument("--seed", type=int, default=0)
    command_line.add_argument("--workers", type=int, default=2)
    arguments = parse_arguments(command_line, on_host=True)
    result = ResultFile(arguments, "unmeasured_devices", seed=arguments.seed)
    tables = [t for t in read_tables(TABLES) if sum(m.ok for m in t.measurements) >= LEAST]
    drawn = np.random.default_rng(arguments.seed).permutation(len(tables))[: arguments.each]
    settings = Settings()
    jobs = [(model, tables[i]) for model in MODELS for i in sorted(drawn)]
    by_model: dict[str, list[dict[str, Any]]] = {}
    with ProcessPoolExecutor(arguments.workers) as pool:
        for row in pool.map(partial(replayed, settings=settings), jobs):
            by_model.setdefault(row["model"], []).append(row)
            result.add(row.pop("model"), row)
            if len(by_model) and sum(map(len, by_model.values())) % 20 == 0:
                say(f"{sum(map(len, by_model.values()))} of {len(jobs)}")
    result.finish({model: summary_of(rows) for model, rows in by_model.items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
