"""Replays of the recorded lists of libraries: what a decision is charged, and how arms are compared."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.tuning import library_replay
from benchmarks.tuning.library_replay import BUDGETS, COMPARED_WORKERS, DEFAULT, WORKERS, replay_decision
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.tuning.replays.replay import load


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return load([library_replay.TABLES])[:3]


def test_everything_has_no_regret_and_more_workers_take_no_longer(tables: list[Table]) -> None:
    for table in tables:
        found = [
            replay_decision(table, DefaultSurrogate(), "learned", "exhaustive", workers, Settings())
            for workers in WORKERS
        ]
        assert {(row.regret, row.measured) for row in found} == {(0.0, len(table.by_candidate()))}
        walls = [row.wall_s for row in found]
        assert walls == sorted(walls, reverse=True)
        assert walls[-1] >= found[0].floor_s, "nothing is faster than the winner alone"


def test_the_default_measures_less_on_one_worker(tables: list[Table]) -> None:
    for table in tables:
        everything, default = (
            replay_decision(table, DefaultSurrogate(), "learned", policy, 1, Settings())
            for policy in ("exhaustive", DEFAULT)
        )
        assert default.measured < everything.measured
        assert default.wall_s < everything.wall_s
        assert 0 <= default.stated_risk <= 1


def decision(table: str, arm: str, regret: float, budget: int | None = None, **more: Any) -> dict[str, Any]:
    row = {
        "table": table,
        "kernel": table,
        "label": "fla/norm",
        "key": "64",
        "candidates": 4,
        "arm": arm,
        "policy": DEFAULT,
        "workers": COMPARED_WORKERS,
        "measured": 2,
        "wall_s": 1.0,
        "floor_s": 0.5,
        "one_by_one_s": 4.0,
        "trace_s": 0.25,
        "regret": regret,
        "stated_risk": 0.1,
        "forecast_s": 0.0,
        "budget": budget,
    }
    return row | more


def test_surrogates_are_compared_on_the_same_lists() -> None:
    arms = {"learned": (0.0, 0.1, 1.0), "formula": (0.21, 0.1, 2.0)}
    rows = [
        decision(table, arm, regret, budget, wall_s=wall)
        for budget in (None, *BUDGETS)
        for arm, (first, second, wall) in arms.items()
        for table, regret in (("a", first), ("b", second))
    ]
    found = library_replay.compare_surrogates(rows[::-1])
    assert set(found) == {"default", *(f"after_{n}" for n in BUDGETS)}
    assert found["default"]["less"]["value"] == pytest.approx(0.1)
    assert (found["default"]["less"]["low"], found["default"]["less"]["high"]) == (0.0, pytest.approx(0.21))
    assert found["default"]["wall_ratio"]["value"] == 2.0


def test_figures_are_told_apart_by_policy_workers_and_length() -> None:
    rows = [
        decision(
            "a", "learned", 0.0 if policy == "exhaustive" else 0.05, policy=policy, workers=w, wall_s=wall
        )
        for policy, wall in (("exhaustive", 4.0), ("risk", 2.0), (DEFAULT, 1.0))
        for w in WORKERS
    ]
    rows += [
        decision("a", arm, 0.0, budget, policy="risk", workers=1)
        for arm in ("learned", "formula")
        for budget in BUDGETS
    ]
    rows.append(decision("a", "formula", 0.0))
    found = library_replay.summarise(rows)["policies"]
    assert {name: found[name]["1"]["speedup_over_exhaustive"]["value"] for name in found} == {
        "exhaustive": 1.0,
        "risk": 2.0,
        DEFAULT: 4.0,
    }
    assert found[DEFAULT]["16"]["beyond_tolerance"]["value"] == 1.0
    assert found["risk"]["64"]["over_floor"]["value"] == 4.0
    assert list(found["risk"]["4"]["by_length"]) == ["1-8"]
    assert found[DEFAULT]["16"]["least_speedup_over_one_by_one"] == pytest.approx(4.0 / 1.25)


def test_tritons_way_is_held_against_what_triton_took(tables: list[Table]) -> None:
    rows = [
        asdict(replay_decision(table, DefaultSurrogate(), "learned", DEFAULT, 16, Settings()))
        for table in load([library_replay.TABLES])[:40]
    ]
    found = library_replay.beside_triton(rows)
    assert 0 < found["contexts"] < len(rows)
    assert 0.2 < found["least"] <= found["value"] <= found["most"] < 5.0
    assert library_replay.beside_triton([decision("a", "learned", 0.0)]) == {"contexts": 0}


def test_a_row_holds_all_that_the_summary_reads(tables: list[Table]) -> None:
    row = asdict(replay_decision(tables[0], DefaultSurrogate(), "learned", DEFAULT, 16, Settings()))
    assert {*row, "budget"} == set(decision("a", "learned", 0.0))
    assert library_replay.library_of(tables[0]) in library_replay.LIBRARIES
