"""Guesses that a language model learns from come of surrogates that have not seen the family."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.evaluation.splits import family_of, kernel_identities
from forecast_train.llm.data.cross_fitting import cross_fit, cross_fit_sides, formula_surrogate
from forecast_train.surrogate.errors import FitError

TABLES = load(shipped_tables())


class Learned(AnalyticSurrogate):
    """Remembers what it was taught."""

    def __init__(self, tables: Sequence[Table]) -> None:
        super().__init__()
        self.taught = list(tables)


def test_no_surrogate_has_seen_the_family_or_the_kernel_it_is_asked_about() -> None:
    believe = cross_fit(TABLES, learn=Learned, parts=3)
    for table in TABLES:
        surrogate = believe(table)
        assert isinstance(surrogate, Learned)
        assert surrogate.taught
        for other in surrogate.taught:
            assert family_of(other.problem) != family_of(table.problem)
            assert not kernel_identities(other.problem) & kernel_identities(table.problem)


def test_one_family_and_nothing_to_learn_are_believed_by_the_formula() -> None:
    assert cross_fit(TABLES[:1], learn=Learned) is formula_surrogate

    def nothing(tables: Sequence[Table]) -> AnalyticSurrogate:
        raise FitError("no IR")

    assert type(cross_fit(TABLES, learn=nothing)(TABLES[0])) is AnalyticSurrogate


def test_a_missing_package_is_told() -> None:
    def missing(tables: Sequence[Table]) -> AnalyticSurrogate:
        raise FitError("fitting needs LightGBM") from ImportError("lightgbm")

    with pytest.raises(FitError, match="LightGBM"):
        cross_fit(TABLES, learn=missing)


def test_other_sides_are_believed_by_what_the_training_side_taught() -> None:
    half = len(TABLES) // 2
    sides = {"train": TABLES[:half], "test": TABLES[half:]}
    found = cross_fit_sides(sides, learn=Learned)
    surrogate = found["test"](TABLES[-1])
    assert isinstance(surrogate, Learned)
    assert surrogate.taught == sides["train"]
    train = found["train"](TABLES[0])
    assert not isinstance(train, Learned) or TABLES[0] not in train.taught
