"""Several sources of one kernel: what is known of one leaves the others open."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.features.encode import Encoder
from forecast_autotune.features.listing import Listed
from forecast_autotune.records import HOOKED, Candidate
from forecast_autotune.replay import load, shipped
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.analytic import Analytic
from forecast_autotune.surrogates.base import Query
from forecast_autotune.surrogates.calibration import per_source
from forecast_autotune.surrogates.covariance import UNTRAINED
from forecast_autotune.surrogates.default import Default
from forecast_autotune.table import Table
from forecast_autotune.testing import TableMeasurer
from forecast_autotune.tuner import Task, tune

MATMUL = "matmul"
GAIN = 0.8


@pytest.fixture(scope="module")
def base() -> Table:
    """A recorded problem with IR."""
    return max(
        (t for t in load(shipped()) if MATMUL in t.problem.kernel.name), key=lambda t: len(t.measurements)
    )


def rewritten(base: Table, *gains: float) -> Table:
    """The base and other sources beside it, whose times are those of the base times a gain each."""
    rows = list(base.measurements)
    for number, gain in enumerate(gains):
        rows += [
            replace(
                m,
                candidate=Candidate(m.candidate.config, f"rewrite-{number}"),
                median_ms=None if m.median_ms is None else gain * m.median_ms,
                p20_ms=None,
                p80_ms=None,
            )
            for m in base.measurements
        ]
    return Table(base.problem, rows)


def asked(table: Table, known: int) -> Query:
    """About all candidates, after so many measurements of the base."""
    ran = [m for m in table.measurements if m.ok and m.candidate.of_base]
    return Query(
        table.problem, list(table.by_candidate()), table.grids(), ran[:known], (), table.problem.ttir
    )


def of_others(query: Query) -> np.ndarray:
    """Which candidates are of other sources."""
    return np.array([not c.of_base for c in query.candidates])


def test_hooks_make_no_source_of_their_own() -> None:
    config = next(iter(load(shipped())[0].by_candidate())).config
    listed = Listed.of([Candidate(config, name) for name in ("base", f"{HOOKED}1", "one", "other", "one")])
    assert listed.sources == 3
    np.testing.assert_array_equal(Encoder.of(listed).others(listed), [[0, 0], [0, 0], [1, 0], [0, 1], [1, 0]])
    alone = Listed.of(listed[:1])
    assert alone.sources == 1
    assert Encoder.of(alone).others(alone).shape == (1, 0)


def test_measurements_count_by_source(base: Table) -> None:
    assert per_source(9, list(base.by_candidate())) == 9
    assert per_source(9, list(rewritten(base, 1.0, 1.0).by_candidate())) == 3


def test_what_is_measured_of_the_base_leaves_another_source_open(base: Table) -> None:
    query = asked(rewritten(base, 1.0), 12)
    forecasts, other = Analytic().forecast(query), of_others(query)
    more = forecasts.sd[other] ** 2 - forecasts.sd[~other] ** 2  # of the same configs
    assert more.min() > 0.8 * UNTRAINED.source**2


def test_a_source_that_was_tried_once_is_known_by_its_level(base: Table) -> None:
    table = rewritten(base, GAIN)
    query = asked(table, 12)
    tried = next(m for m in table.measurements if m.ok and not m.candidate.of_base)
    again = replace(query, measured=[*query.measured, tried])
    before, after, other = Analytic().forecast(query), Analytic().forecast(again), of_others(query)
    assert np.median((after.mean - before.mean)[other]) < 0.5 * np.log2(GAIN)
    assert np.median(after.sd[other]) < np.median(before.sd[other])
    assert np.abs((after.mean - before.mean)[~other]).max() < 0.5 * abs(np.log2(GAIN))


def test_a_list_of_one_source_has_the_forecasts_it_would_have_without_others(base: Table) -> None:
    query = asked(base, 5)
    plain = Analytic(replace(UNTRAINED, source=0.0)).forecast(query)
    np.testing.assert_array_equal(Analytic().forecast(query).mean, plain.mean)


def test_a_faster_source_is_found_after_the_base_was_decided(base: Table) -> None:
    """As a decorated kernel that gets variants later: its store knows the base well, and nothing of them."""
    table, store, settings = rewritten(base, 1.1, GAIN, 1.0), Store(None), Settings(mode=Mode.TUNE)
    names = list(table.by_candidate())
    bases = [c for c in names if c.of_base]
    problem = replace(table.problem, ttir={})

    def decided(candidates: list[Candidate]) -> Candidate:
        task = Task(problem, candidates, table.grids(), trace=lambda _: table.problem.ttir)
        measurer = TableMeasurer(table)
        return tune(task, lambda: measurer, store=store, surrogate=Default(), settings=settings).chosen

    assert decided(bases).of_base
    assert decided(names).variant == "rewrite-1"
