"""Calibrate a surrogate that goes by other devices' tables: each device's table is forecast from the rest.

As in `calibrate`, but with nothing to fit the surrogate to. A kernel's family is left out of the curves
that its reliability is reported with, so no space is judged by curves that have seen the kernel.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from forecast_autotune.records import digest
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.pooled import Pooled, group_of_pool
from forecast_autotune.surrogates.protocol import Relative
from forecast_autotune.tuning.replay import relatives_of
from forecast_train.evaluation.splits import SplitError, family_of
from forecast_train.surrogate.calibrate import report
from forecast_train.surrogate.curves import Seen, fit
from forecast_train.surrogate.observe import observe

TOLERANCES = (0.02, 0.05)
"""The default, and the one that relatives are checked at."""

Job = tuple[Table, Sequence[Relative]]


def jobs_of(tables: Sequence[Table], seed: int) -> list[Job]:
    """Every table with all others of its kernel and sizes on other devices, and with one drawn of them.

    Raises `SplitError` when there is no such table, or only one family of kernels.
    """
    found: list[Job] = []
    for table in tables:
        others = relatives_of(table, tables, "devices")
        if len(others) > 1:
            found.append((table, others))
        if others:
            drawn = np.random.default_rng([seed, int(digest(table.problem.id), 16)]).integers(len(others))
            found.append((table, [others[int(drawn)]]))
    families = {family_of(table.problem) for table, _ in found}
    if len(families) < 2:
        raise SplitError(
            "calibrating what other devices say needs two or more kernel families that were measured on "
            f"several devices at the same sizes, got {', '.join(sorted(families)) or 'none'}: add tables"
        )
    return found


def played(job: Job, *, seed: int) -> list[Seen]:
    """One table's replays, at every tolerance of `TOLERANCES`."""
    table, others = job
    made = []
    for tolerance in TOLERANCES:
        settings = Settings().with_(tolerance=tolerance)
        steps, _ = observe(table, Pooled(), seed=seed, relatives=others, settings=settings)
        family, group = family_of(table.problem), group_of_pool(len(others))
        made.append(Seen(family, table.problem.id, group, len(table.by_candidate()), tuple(steps)))
    return made


def calibrate_elsewhere(
    tables: Sequence[Table], seeds: Sequence[int] = (0, 1), *, jobs: int = 1
) -> dict[str, Any]:
    """What `calibrate.calibrate` returns, of `Pooled`. Raises `SplitError` as `jobs_of` does."""
    seen: list[Seen] = []
    for seed in seeds:
        work, given = partial(played, seed=seed), jobs_of(tables, seed)
        if jobs <= 1:
            found = [work(job) for job in given]
        else:
            # Spawned: numerical libraries have threads, and a fork copies their locks.
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
                found = list(pool.map(work, given))
        seen += [one for same in found for one in same]
    return {
        "surrogate": f"{Pooled.name}/{Pooled.version}",
        "problems": len({s.problem for s in seen}),
        "families": len({s.family for s in seen}),
        "seeds": len(seeds),
        "calibration": fit(seen).to_json(),
        "reliability": report(seen),
    }
