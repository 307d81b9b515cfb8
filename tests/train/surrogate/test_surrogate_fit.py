"""Fitting the learned surrogate: what goes in, what comes out, and that the file holds all of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.calibration import (
    FAMILIAR,
    FAMILIARITY_BOUNDS,
    INFORMED,
    LONG_LIST,
    STRANGE,
)
from forecast_autotune.surrogates.forest import Forest
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate
from forecast_autotune.surrogates.prior import Prior, formula_prior
from forecast_autotune.testing import SurrogateContract, example_table, query_of
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.surrogate import fit, fit_model
from forecast_train.surrogate.fit import FitError, FitSettings, summed_forest

SMALL = FitSettings(trees=12, leaf=8, rounds=60, rate=0.2, jobs=1)


@pytest.fixture(scope="module")
def tables() -> list[Table]:
    return load(shipped_tables())[::3]


@pytest.fixture(scope="module")
def model(tables: list[Table]) -> LearnedModel:
    return fit_model(tables, recipe=SMALL)


@cache
def learned() -> LearnedSurrogate:
    """Fitted once: what it has learnt does not change when it is asked."""
    return fit(load(shipped_tables())[:4], recipe=SMALL)


class TestLearned(SurrogateContract):
    def make(self) -> LearnedSurrogate:
        return learned()


def test_the_residual_brings_forecasts_nearer_to_what_it_was_fitted_to(
    tables: list[Table], model: LearnedModel
) -> None:
    def error(surrogate: AnalyticSurrogate, table: Table) -> float:
        mean = surrogate.forecast(query_of(table)).mean
        times = np.array([np.log2(m.ms) if m.ok else np.nan for m in table.by_candidate().values()])
        fast = times < np.nanmin(times) + 1.0
        gap = (mean - times)[fast]
        return float(np.std(gap))

    learned = LearnedSurrogate(model)
    better = [error(learned, t) < error(AnalyticSurrogate(), t) for t in tables]
    assert np.mean(better) > 0.8


def test_a_file_holds_the_whole_model(tmp_path: Path, tables: list[Table], model: LearnedModel) -> None:
    path = tmp_path / "model.npz"
    model.save(path)
    again = LearnedModel.load(path)
    assert (again.names, again.hyper, again.weight) == (model.names, model.hyper, model.weight)
    query = query_of(tables[0])
    one, two = LearnedSurrogate(model).forecast(query), LearnedSurrogate(again).forecast(query)
    np.testing.assert_array_equal(one.mean, two.mean)
    np.testing.assert_array_equal(one.p_fail, two.p_fail)
    np.testing.assert_array_equal(again.corpus.points, model.corpus.points)
    np.testing.assert_array_equal(again.corpus.kernels, model.corpus.kernels)
    assert list(tmp_path.iterdir()) == [path], "no half-written file is left"


def test_a_kernel_unlike_all_that_were_learned_from_is_strange_to_the_model(
    tables: list[Table], model: LearnedModel
) -> None:
    long = next(t for t in tables if len(t.by_candidate()) >= LONG_LIST and t.problem.ttir)
    corpus = model.corpus
    assert len(corpus.points) == len(tables)

    def group(points: np.ndarray) -> str:  # type: ignore[type-arg]
        other = replace(model, corpus=replace(corpus, points=points.astype(np.float32)))
        return LearnedSurrogate(other).forecast(query_of(long)).group

    before = LearnedSurrogate(model).prior(query_of(long))
    assert before.training_distance is not None
    assert before.training_distance < FAMILIARITY_BOUNDS[1], "the model has seen this very kernel"
    assert group(corpus.points + 20.0 * corpus.points.std(axis=0)) == STRANGE
    mine = corpus.points[tables.index(long)]
    beyond = mine + np.array([[50.0], [99.0]])
    assert group(np.concatenate([np.tile(mine, (len(corpus.points) - 2, 1)), beyond])) == FAMILIAR
    assert LearnedSurrogate(replace(model, corpus=None)).forecast(query_of(long)).group == INFORMED


def test_boosted_trees_as_arrays_predict_what_the_library_does() -> None:
    import lightgbm

    draw = np.random.default_rng(0)
    x = draw.choice(np.linspace(-2, 2, 9), (400, 5)).astype(np.float32)
    y = x[:, 0] * x[:, 1] + draw.normal(0, 0.1, 400)
    fitted = lightgbm.LGBMRegressor(n_estimators=20, num_leaves=7, verbose=-1).fit(x, y)
    forest = summed_forest([fitted.booster_])
    np.testing.assert_allclose(forest(x).mean(axis=1), fitted.predict(x), atol=1e-5)
    # On both sides of every threshold, too.
    edges = np.repeat(x[:1], 2 * len(forest.threshold), axis=0)
    # (It takes numbers below 1e-35 for zeros.)
    inner = np.flatnonzero((forest.feature >= 0) & (np.abs(forest.threshold) > 1e-30))
    for row, node in enumerate(inner):
        edges[2 * row : 2 * row + 2, forest.feature[node]] = forest.threshold[node]
        edges[2 * row + 1, forest.feature[node]] = np.nextafter(forest.threshold[node], np.float32(9))
    np.testing.assert_allclose(forest(edges).mean(axis=1), fitted.predict(edges), atol=1e-5)


def test_a_model_of_other_features_is_refused(tmp_path: Path, model: LearnedModel) -> None:
    path = tmp_path / "model.npz"
    model.save(path)
    with np.load(path) as arrays:
        held = dict(arrays)
    held["head"] = np.array(str(held["head"]).replace("vector-", "vektor-"))
    np.savez_compressed(path, **held)
    with pytest.raises(RecordError, match="fitted to features 'vektor-"):
        LearnedModel.load(path)


def test_tables_without_ir_cannot_be_fitted_and_say_what_to_do() -> None:
    table = example_table()
    bare = Table(replace(table.problem, ttir={}), table.measurements)
    with pytest.raises(FitError, match="none of 1 tables has TTIR"):
        fit_model([bare])


@pytest.mark.parametrize("right", [[2, 0, 4, 0, 0], [1, 0, 3, 0, 0]], ids=["depth first", "the other way"])
@pytest.mark.parametrize("value", [[0, 10, 0, 20, 30], [1] * 5], ids=["values", "one value"])
def test_a_forest_is_read_as_it_was_written(right: list[int], value: list[float]) -> None:
    left = [{2: 1, 1: 2}[right[0]], 0, {4: 3, 3: 4}[right[2]], 0, 0]
    forest = Forest(
        feature=np.array([0, -1, 1, -1, -1], dtype=np.int16),
        threshold=np.array([0.5, 0, 2.0, 0, 0], dtype=np.float32),
        left=np.array(left, dtype=np.int32),
        right=np.array(right, dtype=np.int32),
        value=np.array(value, dtype=np.float32),
        roots=np.array([0], dtype=np.int32),
    )
    arrays = forest.arrays("x")
    for name in ("x_left", "x_right"):
        assert (name in arrays) == (right[0] == 1), "what follows from the order is left out"
    again = Forest.of(arrays, "x")
    for name in Forest.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(again, name), getattr(forest, name))
        assert getattr(again, name).dtype == getattr(forest, name).dtype


def test_a_forest_whose_walk_would_not_end_is_refused() -> None:
    with pytest.raises(RecordError, match="children after their parents"):
        Forest(
            feature=np.array([0, -1], dtype=np.int16),
            threshold=np.zeros(2, dtype=np.float32),
            left=np.array([0, 0], dtype=np.int32),
            right=np.array([1, 0], dtype=np.int32),
            value=np.zeros(2, dtype=np.float32),
            roots=np.array([0], dtype=np.int32),
        )


def test_what_is_learned_is_what_the_given_formula_gets_wrong(tables: list[Table]) -> None:
    """Told to believe twice the slowdowns of the formula, the trees learn to take the excess back."""

    def steep(*asked: Any) -> Prior:
        plain = formula_prior(*asked)
        return replace(plain, mean=plain.mean.min() + 2.0 * (plain.mean - plain.mean.min()))

    few, tilts = tables[:4], []
    plain, tilted = (
        LearnedSurrogate(fit_model(few, recipe=SMALL, believe=believe)) for believe in (formula_prior, steep)
    )
    for query in map(query_of, few):
        belief = formula_prior(query.problem, query.candidates, query.grids, query.ttir)
        difference = tilted.prior(query).mean - plain.prior(query).mean
        tilts.append(float(np.corrcoef(difference, belief.mean)[0, 1]))
    assert max(tilts) < -0.3
    assert np.mean(tilts) < -0.6
