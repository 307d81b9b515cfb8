"""Claim: which config compiles longer is known before it compiles.

    python -m benchmarks.forecasting.compile_seconds --out benchmarks/results/compile_seconds.json [--asset FILE]

Fits the formula of compile seconds to the recorded compilations of the corpus, and forecasts those of kernels whose
family was left out of the fit. The formula as it ships is tested on kernels of public libraries, which no fit has seen.
Order is Spearman's correlation within one list of configs, the median over lists; the error is that of log2(seconds)
about the list's own mean, which a decision learns from the first that compile. `--asset` writes the formula to a
file. Recorded H200 compilations, evaluated on a CPU; 95 % intervals by bootstrap over kernels.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from forecast_autotune.features.compile_seconds import shipped_compile_seconds
from forecast_autotune.records.table import read_tables
from forecast_train.metrics import cluster_bootstrap
from forecast_train.surrogate.compile_seconds import (
    RecordedCompilation,
    compile_seconds_text,
    fit_compile_seconds,
    recorded_compilations,
)

DATA = ROOT / "benchmarks" / "data"
CORPUS = (
    DATA / "sources_h200.jsonl.xz",
    DATA / "search_sources_h200.jsonl.xz",
    ROOT / "forecast_autotune" / "assets" / "tables" / "h200.jsonl.gz",
)
LIBRARIES = DATA / "libraries_h200.jsonl.gz"
LEAST_CONFIGS = 5
"""Least configs of a list whose order is looked at."""


def order_and_error(rows: list[RecordedCompilation], forecasts: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Order and error of `forecasts`, log2(seconds) [n], within lists of one source."""
    lists: dict[str, list[int]] = defaultdict(list)
    for n, row in enumerate(rows):
        lists[row.source].append(n)
    orders, errors, kernels = [], [], []
    for chosen in lists.values():
        seconds = np.log2([rows[n].seconds for n in chosen])
        if len(chosen) < LEAST_CONFIGS or np.ptp(seconds) == 0 or np.ptp(forecasts[chosen]) == 0:
            continue
        orders.append(float(spearmanr(seconds, forecasts[chosen]).statistic))
        off = seconds - forecasts[chosen]
        errors.append(float(np.sqrt(np.mean((off - off.mean()) ** 2))))
        kernels.append(rows[chosen[0]].kernel)
    result = np.array(orders)
    order = cluster_bootstrap(lambda chosen: float(np.median(result[chosen])), kernels)
    return {
        "lists": len(orders),
        "kernels": len(set(kernels)),
        "compilations": len(rows),
        "order": {"value": round(order.value, 4), "low": round(order.low, 4), "high": round(order.high, 4)},
        "rmse_log2": round(float(np.median(errors)), 4),
    }


def run(a: Namespace) -> dict[str, Any]:
    """Fit, evaluate both ways, write; returns the summary."""
    report = ResultFile(a, "forecasting.compile-seconds", 0)
    rows = recorded_compilations(table for path in CORPUS for table in read_tables(path))
    say(f"{len(rows)} compilations of {len({r.kernel for r in rows})} kernels")
    formula, unseen = fit_compile_seconds(rows)
    if a.asset is not None:
        a.asset.write_text(compile_seconds_text(formula, rows), encoding="utf-8")
    foreign = recorded_compilations(read_tables(LIBRARIES))
    shipped = shipped_compile_seconds()
    summary = {
        "families_left_out": order_and_error(rows, unseen),
        "libraries": order_and_error(foreign, shipped.log2_seconds([r.features for r in foreign])),
        "fit_is_what_ships": formula == shipped,
    }
    report.finish(summary)
    return summary


def main() -> int:
    command_line = parser(__doc__)
    command_line.add_argument("--asset", type=Path, help="write the formula here, too")
    a = parse_arguments(command_line, on_host=True)
    run(a)
    return 0


if __name__ == "__main__":
    sys.exit(main())
