"""Refreshing the learned surrogate: due or not, kept or rolled back, and never half-written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.learned import LearnedModel
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.surrogate.fit import FitError, FitSettings, fit_model
from forecast_train.surrogate.model_refresh import (
    is_held_out,
    previous_model_path,
    refresh_model,
    roll_back,
)

TABLES = [t for i, t in enumerate(load(shipped_tables())) if i % 3]
"""Two problems of each kernel."""
QUICK = FitSettings(trees=8, rounds=30, rate=0.2, jobs=1)


def upside_down(table: Table) -> Table:
    """The table with its fastest times given to its slowest candidates."""
    ran = sorted((m for m in table.measurements if m.ok), key=lambda m: m.ms)
    times = {m.candidate: other.ms for m, other in zip(ran, reversed(ran), strict=True)}
    turned = [
        replace(m, median_ms=times[m.candidate], p20_ms=None, p80_ms=None) if m.ok else m
        for m in table.measurements
    ]
    return Table(table.problem, turned)


@pytest.fixture(scope="module")
def bad() -> LearnedModel:
    """A model that was taught the reverse of the truth."""
    return fit_model([upside_down(t) for t in TABLES if not is_held_out(t)], recipe=QUICK)


def test_some_kernels_are_always_held_out_and_most_are_not() -> None:
    out = {t.problem.kernel.name for t in TABLES if is_held_out(t)}
    assert 0 < len(out) < len({t.problem.kernel.name for t in TABLES}) / 2


def test_a_model_that_is_better_on_held_out_kernels_replaces_the_one_before(
    tmp_path: Path, bad: LearnedModel
) -> None:
    path = tmp_path / "online.npz"
    first = refresh_model(TABLES, path, None, recipe=QUICK)
    if not first.kept:  # the bare formula may be better on these few kernels: then nothing is written
        assert not path.exists()
        assert first.before is not None
        assert first.after.worse_than(first.before)
    second = refresh_model(TABLES, path, bad, recipe=QUICK)
    assert second.kept
    assert second.after.tenth <= second.before.tenth + 0.02
    assert LearnedModel.load(path).about is not None


def test_a_model_that_is_worse_is_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "online.npz"
    good = fit_model([t for t in TABLES if not is_held_out(t)], recipe=QUICK)
    good.save(path)
    before = path.read_bytes()
    spoilt = [t if is_held_out(t) else upside_down(t) for t in TABLES]
    result = refresh_model(spoilt, path, good, recipe=QUICK)
    assert not result.kept
    assert "rolled back" in result.reason
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["online.npz"]


def test_without_held_out_kernels_nothing_is_replaced(tmp_path: Path) -> None:
    result = refresh_model([t for t in TABLES if not is_held_out(t)], tmp_path / "x.npz", None, recipe=QUICK)
    assert not result.kept
    assert "nothing to judge by" in result.reason
    assert list(tmp_path.iterdir()) == []
    assert not refresh_model([], tmp_path / "x.npz", None).kept


def test_the_model_before_can_be_put_back(tmp_path: Path, bad: LearnedModel) -> None:
    path = tmp_path / "online.npz"
    bad.save(path)
    old = path.read_bytes()
    assert refresh_model(TABLES, path, bad, recipe=QUICK).kept
    assert previous_model_path(path).read_bytes() == old
    roll_back(path)
    assert path.read_bytes() == old
    with pytest.raises(FitError, match="nothing was replaced"):
        roll_back(path)
