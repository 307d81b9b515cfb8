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
from forecast_autotune.surrogates.pooled import PooledSurrogate, pool_group
from forecast_autotune.surrogates.protocol import Relative
from forecast_autotune.tuning.replays.replay import relatives_of
from forecast_train.evaluation.splits import SplitError, family_of
from forecast_train.surrogate.calibrate import reliability_report
from forecast_train.surrogate.calibration_curves import ReplayRecord, fit_curves
from forecast_train.surrogate.replay_observation import observe_replay

TOLERANCES = (0.02, 0.05)
"""The default, and the one that relatives are checked at."""

DeviceReplay = tuple[Table, Sequence[Relative]]


def device_replays(tables: Sequence[Table], seed: int) -> list[DeviceReplay]:
    """Every table with all others of its kernel and sizes on other devices, and with one drawn of them.

    Raises `SplitError` when there is no such table, or only one family of kernels.
    """
    found: list[DeviceReplay] = []
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


def run_device_replay(job: DeviceReplay, *, seed: int) -> list[ReplayRecord]:
    """One table's replays, at every tolerance of `TOLERANCES`."""
    table, others = job
    made = []
    for tolerance in TOLERANCES:
        settings = Settings().with_(tolerance=tolerance)
        steps, _ = observe_replay(table, PooledSurrogate(), seed=seed, relatives=others, settings=settings)
        family, group = family_of(table.problem), pool_group(len(others))
        made.append(ReplayRecord(family, table.problem.id, group, len(table.by_candidate()), tuple(steps)))
    return made


def calibrate_cross_device(
    tables: Sequence[Table], seeds: Sequence[int] = (0, 1), *, jobs: int = 1
) -> dict[str, Any]:
    """What `calibrate.calibrate` returns, of `PooledSurrogate`. Raises `SplitError` as `device_replays` does."""
    seen: list[ReplayRecord] = []
    for seed in seeds:
        work, given = partial(run_device_replay, seed=seed), device_replays(tables, seed)
        if jobs <= 1:
            found = [work(job) for job in given]
        else:
            # Spawned: numerical libraries have threads, and a fork copies their locks.
            with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
                found = list(pool.map(work, given))
        seen += [one for same in found for one in same]
    return {
        "surrogate": f"{PooledSurrogate.name}/{PooledSurrogate.version}",
        "problems": len({s.problem for s in seen}),
        "families": len({s.family for s in seen}),
        "seeds": len(seeds),
        "calibration": fit_curves(seen).to_json(),
        "reliability": reliability_report(seen),
    }
