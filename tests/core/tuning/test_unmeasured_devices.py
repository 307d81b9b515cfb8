"""Decisions under the datasheet of a device that was never measured: surer of nothing, and measuring more."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from forecast_autotune.features.devices import datasheet_device
from forecast_autotune.policy import REFUSED
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.tuning.replays.replay import ReplayRow, load, replay_one, shipped_tables

SMALL = 3
"""Of the shipped tables, the shortest so many with eight candidates or more."""


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    every = [t for t in load(shipped_tables()) if len(t.by_candidate()) >= 8]
    return sorted(every, key=lambda t: (len(t.by_candidate()), t.problem.id))[:SMALL]


def as_if_on(model: str, table: Table) -> Table:
    """The table under another device's name and limits."""
    device = datasheet_device(model)
    problem = replace(table.problem, device=device, id=f"{table.problem.id}-{device.slug}")
    return Table(problem, [replace(m, problem=problem.id) for m in table.measurements])


def replayed(model: str, tables: list[Table]) -> list[ReplayRow]:
    surrogate, settings = default_surrogate(), Settings()
    return [
        replay_one(as_if_on(model, t), surrogate=surrogate, policy=None, settings=settings, workers=2)[0]
        for t in tables
    ]


def test_more_is_measured_where_nothing_was_and_the_risk_covers_what_goes_wrong(tables: list[Table]) -> None:
    known, unmeasured = replayed("h200", tables), replayed("gpu max 1550", tables)
    assert sum(r.measured for r in unmeasured) > sum(r.measured for r in known)
    over = sum(r.regret > Settings().tolerance for r in unmeasured)
    said = [r.stated_risk for r in unmeasured]
    chance = 2 * math.sqrt(sum(p * (1 - p) for p in said))
    assert over <= sum(said) + chance, "as many as was said, and what chance adds"
    assert min(said) > max(r.stated_risk for r in known)


@pytest.mark.parametrize("model", ["gpu max 1550"])
def test_no_candidate_is_refused_by_rules_that_were_never_checked(model: str, tables: list[Table]) -> None:
    surrogate = default_surrogate()
    for table in tables:
        given = as_if_on(model, table)
        grids = given.grids()
        forecasts = surrogate.forecast(
            Query(given.problem, list(given.by_candidate()), grids, ttir=given.problem.ttir)
        )
        assert forecasts.group == "unknown device"
        assert (forecasts.p_fail < REFUSED).all()
