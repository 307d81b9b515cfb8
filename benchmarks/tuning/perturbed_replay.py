"""Claim: decisions on library lists stay as sure as they say where processors are slower and compilations uneven.

    python -m benchmarks.tuning.perturbed_replay --out benchmarks/results/perturbed_replay.json [--seeds 6]

Replays the lists of `benchmarks/data/libraries_h200.jsonl.gz` as `library_replay` does, under the default policy on 16
workers, but not as recorded: each kernel compiles a random factor slower than in the recording, each config deviates
from that, each time is off by the noise of a short timing, and the first plan is made a quarter of a second late, as by
a tuner that has to trace first. Problems that were decided before are relatives of later ones, as in a live run.
Several seeds, once on processors like those of the recording and once on slow ones. Needs no device.
"""

from __future__ import annotations

import sys
import zlib
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np

from benchmarks.lib.libraries.workloads import LIBRARIES
from benchmarks.lib.result_files import ResultFile, parse_arguments, parser, say
from benchmarks.tuning.library_replay import (
    TABLES,
    TIMING_S,
    column,
    decision_figures,
    library_of,
    open_surrogate,
    regret_beside,
)
from forecast_autotune.policy import WallTime
from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.tuning.loop import tune
from forecast_autotune.tuning.replays.replay import load, task_of
from forecast_autotune.tuning.replays.table_measurer import TableMeasurer, recorded_compile_seconds

WORKERS = 16
SLOWNESS = {"as recorded": 0.2, "slow": 0.7}
"""log2 of the mean factor on seconds of compilation: sixteen at once take longer than those of the recording did."""
KERNEL_SD, CONFIG_SD = 0.25, 0.18
"""log2, of a kernel's factor and of a config's beside it."""
TIMING_SD = 0.004
"""Relative, of one short timing."""
FIRST_PLAN_S = 0.25


class PerturbedMeasurer(TableMeasurer):
    """A table whose compilations and times deviate from what was recorded."""

    def __init__(self, table: Table, slowness: float, seed: int) -> None:
        super().__init__(table, workers=WORKERS, timing_s=TIMING_S)
        self._draws = np.random.default_rng([seed, zlib.crc32(table.problem.id.encode())])
        self._kernel = float(2 ** self._draws.normal(slowness, KERNEL_SD))
        self._factors: dict[Candidate, float] = {}
        self._times: dict[Candidate, float] = {}
        self._late = FIRST_PLAN_S

    def factor(self, candidate: Candidate) -> float:
        """Of its seconds of compilation."""
        if candidate not in self._factors:
            self._factors[candidate] = self._kernel * float(2 ** self._draws.normal(0.0, CONFIG_SD))
        return self._factors[candidate]

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """As the table's; time passes after the first, until there is a plan."""
        super().prefetch(candidates)
        self._pass(self._late)
        self._late = 0.0

    def _compile_seconds(self, candidate: Candidate) -> float:
        return super()._compile_seconds(candidate) * self.factor(candidate)

    def _row(self, candidate: Candidate) -> Measurement:
        m = super()._row(candidate)
        if not m.ok:
            return m
        if candidate not in self._times:
            self._times[candidate] = 1.0 + float(self._draws.normal(0.0, TIMING_SD))
        return replace(m, median_ms=m.ms * self._times[candidate], p20_ms=None, p80_ms=None)


def replay_library(library: str, slowness: str, seed: int) -> list[dict[str, Any]]:
    """The lists of a library in their order, with what was measured before in the store."""
    store, surrogate = Store(None), open_surrogate(None, library)
    found = []
    for table in (t for t in load([TABLES]) if library_of(t) == library):
        rows = table.by_candidate()
        best = min((m for m in rows.values() if m.ok), key=lambda m: m.ms)
        measurer = PerturbedMeasurer(table, SLOWNESS[slowness], seed)
        decision = tune(
            task_of(table),
            lambda measurer=measurer: measurer,  # type: ignore[misc]
            store=store,
            surrogate=surrogate,
            settings=Settings(),
            policy=WallTime(),
        )
        floor = recorded_compile_seconds(table)[best.candidate] * measurer.factor(best.candidate) + TIMING_S
        found.append(
            {
                "kernel": table.problem.kernel.name,
                "label": str(table.problem.extra["label"]),
                "slowness": slowness,
                "seed": seed,
                "candidates": len(rows),
                "measured": decision.measured,
                "wall_s": round(measurer.spent().wall_s, 4),
                "floor_s": round(floor, 4),
                "regret": regret_beside(rows[decision.chosen], best),
                "stated_risk": round(decision.stated_risk, 5),
            }
        )
    return found


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all seeds together; intervals over kernels."""
    seeds = len({r["seed"] for r in rows})
    return {
        "decisions": len(rows),
        "contexts": len(rows) // seeds,
        "seeds": seeds,
        "measured": round(float(column(rows, "measured").sum()) / seeds, 1),
        **decision_figures(rows),
    }


def run(a: Namespace) -> dict[str, Any]:
    """Replay everything; returns the summary, after writing it."""
    report = ResultFile(a, "perturbed_replay", 0)
    work = [(library, slow, seed) for slow in SLOWNESS for seed in range(a.seeds) for library in LIBRARIES]
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(a.jobs, get_context("spawn")) as pool:
        for done in pool.map(replay_library, *zip(*work, strict=True)):
            rows += done
    say(f"{len(rows)} decisions")
    summary = {slow: figures([r for r in rows if r["slowness"] == slow]) for slow in SLOWNESS}
    missed = [r for r in rows if r["regret"] > Settings().tolerance]
    report.data["raw"] = {"beyond_tolerance": missed}
    report.finish(summary)
    return summary


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--seeds", type=int, default=6)
    made.add_argument("--jobs", type=int, default=2, help="processes")
    run(parse_arguments(made, on_host=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
