"""Claim: installed advice, written blind, makes decisions on lists of public libraries better.

    python -m benchmarks.forecasting.advice --out RESULT.json [--jobs 2]

Every recorded list of fla-core, liger-kernel and flag_gems whose kernel has installed advice. The surrogate is the one
that ships, which was fitted to none of these libraries. The default policy's decisions are replayed with 1, 4 and 16
compile workers, without advice (`learned`) and with it (`advice`), once more where no IR can be read (`no IR`). Regret
after 1, 3 and 5 measured is that of the best measured so far. Replays of H200 timings on a CPU; intervals are 95 %,
over kernels, and paired.
"""

from __future__ import annotations

import multiprocessing
import sys
import warnings
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.lib import result_files
from benchmarks.lib.recorded_advice import DATA, decision_figures, paired_figures
from benchmarks.lib.result_files import say
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.records.problem import FACTS
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.store.installed_advice import advice_for
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.tuning.replays.replay import load

LISTS = DATA / "libraries_h200.jsonl.gz"
WORKERS = (1, 4, 16)


@cache
def advised_lists() -> list[tuple[Table, Advice]]:
    """The recorded lists of kernels with installed advice."""
    given = [(table, advice_for(Store(None), table.problem.kernel)) for table in load([LISTS])]
    return [(table, advice) for table, advice in given if advice is not None]


def play(number: int) -> list[dict[str, Any]]:
    """All arms on one list."""
    warnings.simplefilter("ignore")
    table, advice = advised_lists()[number]
    plain = Settings.from_environment().with_(advice="off")
    bare = replace(table, problem=replace(table.problem, extra={**table.problem.extra, FACTS: None}))
    rows = []
    for workers in WORKERS:
        arms = [
            (f"{workers}", "learned", table, default_surrogate(), plain),
            (f"{workers}", "advice", table, default_surrogate(), plain.with_(advice="stored")),
            (f"{workers}, no IR", "learned", bare, default_surrogate(), plain),
            (f"{workers}, no IR", "advice", bare, default_surrogate(), plain.with_(advice="stored")),
        ]
        for condition, arm, given, surrogate, settings in arms:
            figures = decision_figures(given, surrogate, settings, workers)
            about = {"kernel": advice.source_sha256[:8], "problem": table.problem.id[:8]}
            rounded = {name: round(value, 5) for name, value in figures.items()}
            rows.append({"condition": condition, "arm": arm, **about, **rounded})
    return rows


def main() -> int:
    parser = result_files.parser(__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(stub_only=True)
    options: Namespace = result_files.parse_arguments(parser)
    report = result_files.ResultFile(options, "advice", seed=options.seed)
    warnings.simplefilter("ignore")
    lists = advised_lists()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        for number, done in enumerate(pool.map(play, range(len(lists)))):
            rows += done
            if number % 20 == 0:
                say(f"{number + 1} of {len(lists)}")
    report.put("rows", rows)
    summary: dict[str, Any] = {}
    for condition in dict.fromkeys(r["condition"] for r in rows):
        summary[condition] = paired_figures([r for r in rows if r["condition"] == condition])
    report.finish(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
