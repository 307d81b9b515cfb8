"""The baselines are honest surrogates: they obey the contract, and know what they claim to know."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from forecast_autotune.records import Candidate, Config, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.testing import SurrogateContract, example_table, query_of
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.evaluation.baselines import (
    MedianConfigBaseline,
    NearestProblemBaseline,
    RooflineBaseline,
    methods,
    methods_by_name,
    with_seed,
)
from forecast_train.evaluation.learners import MissingLearningLibrary, raw_features
from forecast_train.evaluation.metrics import spearman


def other_shape(seed: int = 1, size: int = 8192) -> Table:
    """The example kernel at another shape: another id, the same function."""
    table = example_table(seed=seed)
    p = table.problem
    arguments = (replace(p.arguments[0], shape=(size, size)), replace(p.arguments[1], value=size))
    made = Problem.of(p.kernel, arguments, p.device, key=(str(size),))
    return Table(made, [replace(m, problem=made.id) for m in table.measurements])


class TestRandom(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["random"]([])


class TestRoofline(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["roofline"]([])


class TestFormula(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["formula"]([])


class TestMedianConfig(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["median_config"]([other_shape()])


class TestNearest(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["nearest"]([other_shape()])


@cache
def boosting() -> Surrogate:
    """Fitted once: what it has learnt does not change when it is asked."""
    return methods["boosting"]([other_shape()])


class TestBoosting(SurrogateContract):
    def make(self) -> Surrogate:
        return boosting()


class TestColdTrees(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["cold_trees"]([])


class TestColdGaussianProcess(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["cold_gp"]([])


@pytest.mark.parametrize("name", list(methods))
def test_every_method_can_be_fitted_on_nothing(name: str) -> None:
    forecasts = methods[name]([]).forecast(query_of(example_table()))
    assert np.isfinite(forecasts.mean).all()


def test_first_keeps_the_order_given_also_when_it_is_told_the_truth() -> None:
    table = example_table()
    forecasts = methods["first"]([]).forecast(query_of(table, 4))
    order = [i for i in forecasts.order() if i >= 4]
    assert order == sorted(order)


def test_random_depends_on_the_seed_and_on_the_problem() -> None:
    random = methods["random"]([])
    here, there = query_of(example_table()), query_of(other_shape())
    orders = [
        tuple(s.forecast(q).order())
        for s, q in ((random, here), (with_seed(random, 1), here), (random, there))
    ]
    assert len(set(orders)) == 3
    assert tuple(with_seed(random, 0).forecast(here).order()) == orders[0]


def test_median_config_averages_the_slowdowns_at_other_shapes() -> None:
    known = [other_shape(1), other_shape(2, 2048)]
    query = query_of(example_table())
    forecasts = MedianConfigBaseline(known).forecast(query)
    rows = [t.by_candidate() for t in known]
    best = [min(m.ms for m in r.values() if m.ok) for r in rows]
    slowdowns = [
        np.mean([math.log2(r[c].ms / b) for r, b in zip(rows, best, strict=True)])
        for c in query.candidates
        if rows[0][c].ok
    ]
    np.testing.assert_allclose(forecasts.mean[: len(slowdowns)], slowdowns)


def test_nearest_copies_the_nearest_shape_and_never_the_problem_itself() -> None:
    table, near, far = example_table(seed=0), other_shape(1, 8192), other_shape(2, 65536)
    reversed_times = [
        replace(m, median_ms=1.0 / m.ms, p20_ms=None, p80_ms=None) for m in far.measurements if m.ok
    ]
    forecasts = NearestProblemBaseline([table, Table(far.problem, reversed_times), near]).forecast(
        query_of(table)
    )
    copied = [math.log2(m.ms) for m in near.measurements if m.ok]
    np.testing.assert_allclose(forecasts.mean[: len(copied)], copied)
    failed = [i for i, m in enumerate(near.measurements) if not m.ok]
    assert (forecasts.p_fail[failed] > 0.5).all()
    alone = NearestProblemBaseline([table]).forecast(query_of(table))
    assert (alone.mean == alone.mean[0]).all()


def test_roofline_states_a_level_and_no_order() -> None:
    """4096^3: 2 * 4096^3 FLOPs at 989 TFLOPS are 0.139 ms; the bytes take less."""
    (table,) = [t for t in load(shipped_tables()) if t.problem.extra["label"] == "matmul/4096x4096x4096"]
    forecasts = RooflineBaseline().forecast(query_of(table))
    assert (forecasts.mean == forecasts.mean[0]).all()
    assert 2 ** forecasts.mean[0] == pytest.approx(2 * 4096**3 / 989e9, rel=0.01)


def test_boosting_learns_what_configs_have_in_common() -> None:
    query = query_of(example_table(seed=5))
    truth = np.array([math.log2(m.ms) for m in example_table(seed=5).measurements if m.ok])
    learnt = methods["boosting"]([other_shape(seed, 512 * seed) for seed in range(1, 9)]).forecast(query)
    assert spearman(learnt.mean[: len(truth)], truth) > 0.8


@pytest.mark.parametrize("name", ["cold_trees", "cold_gp"])
def test_cold_surrogates_learn_from_the_run(name: str) -> None:
    sizes = (16, 32, 64, 128, 256, 512)
    table = example_table(sizes=sizes, warps=(1, 2, 4, 8))
    rows = [m for m in table.measurements if m.ok]
    query = replace(query_of(table), measured=rows[::2])
    forecasts = methods[name]([]).forecast(query)
    unseen = [i for i, m in enumerate(table.measurements) if m.ok and m not in rows[::2]]
    truth = np.array([math.log2(table.measurements[i].ms) for i in unseen])
    assert spearman(forecasts.mean[unseen], truth) > 0.6


def test_raw_features_meet_by_name() -> None:
    a, b, c = (
        Candidate(Config.of(k, num_warps=8)) for k in ({"BM": 64}, {"BM": 64, "GROUP": 8}, {"BM": "auto"})
    )
    features = raw_features([a, b, c])
    assert features[0, 0] == 3.0  # log2 of the warps
    shared = np.isfinite(features[0]) & np.isfinite(features[1])
    np.testing.assert_array_equal(features[0, shared], features[1, shared])
    assert np.isfinite(features[1]).sum() == np.isfinite(features[0]).sum() + 1
    assert 6.0 in features[0, 4:]
    assert 6.0 not in features[2, 4:]


def test_a_failure_is_not_forecast_to_run() -> None:
    table = example_table()
    failed = Measurement(table.problem.id, table.measurements[0].candidate, Outcome.COMPILE_ERROR)
    for name in methods:
        forecasts = methods[name]([]).forecast(replace(query_of(table), measured=[failed]))
        assert forecasts.p_fail[0] == 1.0, name


def test_unknown_methods_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown method magic: choose from learned, random, .*analytic"):
        methods_by_name(["random", "magic"])
    assert list(methods_by_name(["formula", "random", "formula"])) == ["formula", "random"]


def test_without_scikit_learn_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    for name in ("boosting", "cold_trees"):
        with pytest.raises(MissingLearningLibrary, match=r"forecast-autotune\[eval\]"):
            methods[name]([])
