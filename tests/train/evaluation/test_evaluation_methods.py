"""The baselines are honest surrogates: they obey the contract, and know what they claim to know."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.records import Problem
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.protocol import Surrogate
from forecast_autotune.testing import SurrogateContract, example_table, query_of
from forecast_train.evaluation.methods import (
    MedianConfigBaseline,
    NearestProblemBaseline,
    methods,
    methods_by_name,
)


def other_shape(seed: int = 1, size: int = 8192) -> Table:
    """The example kernel at another shape: another id, the same function."""
    table = example_table(seed=seed)
    p = table.problem
    arguments = (replace(p.arguments[0], shape=(size, size)), replace(p.arguments[1], value=size))
    result = Problem.of(p.kernel, arguments, p.device, key=(str(size),))
    return Table(result, [replace(m, problem=result.id) for m in table.measurements])


class TestRandom(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["random"]([])


class TestFormula(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["formula"]([])


class TestMedianConfig(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["median_config"]([other_shape()])


class TestNearest(SurrogateContract):
    def make(self) -> Surrogate:
        return methods["nearest"]([other_shape()])


def test_first_keeps_the_order_given_also_when_it_is_told_the_truth() -> None:
    table = example_table()
    forecasts = methods["first"]([]).forecast(query_of(table, 4))
    order = [i for i in forecasts.order() if i >= 4]
    assert order == sorted(order)


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


def test_unknown_methods_are_named() -> None:
    with pytest.raises(ValueError, match=r"unknown method magic: choose from learned, random, .*analytic"):
        methods_by_name(["random", "magic"])
    assert list(methods_by_name(["formula", "random", "formula"])) == ["formula", "random"]
