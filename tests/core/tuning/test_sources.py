"""Several sources of one kernel: what was measured of one says less of the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.policy import REFUSED
from forecast_autotune.records import HOOK_VARIANT_PREFIX, Candidate, Measurement, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.calibration import measurements_per_source
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.testing import TableMeasurer
from forecast_autotune.tuning.loop import TuningTask, expect_failing_sources, tune, uninformative_forecasts
from forecast_autotune.tuning.replays.replay import load, shipped_tables

MATMUL = "matmul"
GAIN = 0.8


@pytest.fixture(scope="module")
def base() -> Table:
    """A recorded problem with IR."""
    return max(
        (t for t in load(shipped_tables()) if MATMUL in t.problem.kernel.name),
        key=lambda t: len(t.measurements),
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


def decided(table: Table, candidates: list[Candidate], store: Store) -> Candidate:
    """What is chosen among these, by a store."""
    problem = replace(table.problem, ttir={})
    task = TuningTask(problem, candidates, table.grids(), trace=lambda _: table.problem.ttir)
    measurer, settings = TableMeasurer(table), Settings(mode=Mode.TUNE)
    return tune(task, lambda: measurer, store=store, surrogate=DefaultSurrogate(), settings=settings).chosen


def test_hooks_make_no_source_of_their_own() -> None:
    config = next(iter(load(shipped_tables())[0].by_candidate())).config
    listed = CandidateList.of(
        [Candidate(config, name) for name in ("base", f"{HOOK_VARIANT_PREFIX}1", "one", "other", "one")]
    )
    assert listed.sources == 3
    assert CandidateList.of(listed[:2]).sources == 1


def test_measurements_count_by_source(base: Table) -> None:
    assert measurements_per_source(9, list(base.by_candidate())) == 9
    assert measurements_per_source(9, list(rewritten(base, 1.0, 1.0).by_candidate())) == 3


def test_a_faster_source_is_found_after_the_base_was_decided(base: Table) -> None:
    """As a decorated kernel that gets variants later: its store knows the base well, and nothing of them."""
    table, store = rewritten(base, 1.1, GAIN, 1.0), Store(None)
    names = list(table.by_candidate())
    assert decided(table, [c for c in names if c.is_base_variant], store).is_base_variant
    assert decided(table, names, store).variant == "rewrite-1"


def failing(table: Table, source: str, outcome: Outcome) -> Table:
    """The table, in which no config of a source runs."""
    rows = [
        replace(m, outcome=outcome, median_ms=None, p20_ms=None, p80_ms=None)
        if m.candidate.variant == source
        else m
        for m in table.measurements
    ]
    return Table(table.problem, rows)


@pytest.mark.parametrize("outcome", [Outcome.COMPILE_ERROR, Outcome.RUNTIME_ERROR, Outcome.INCORRECT])
def test_sources_that_never_run_are_soon_left_alone(base: Table, outcome: Outcome) -> None:
    table, names = rewritten(base, 0.5, 0.5, 0.5), [f"rewrite-{n}" for n in range(3)]
    for name in names:
        table = failing(table, name, outcome)
    store = Store(None)
    assert decided(table, list(table.by_candidate()), store).is_base_variant
    tried = [m.candidate.variant for m in store.measurements(table.problem)]
    assert all(0 < tried.count(name) < tried.count("base") for name in names)


def outcomes(table: Table, source: str, *found: Outcome) -> list[Measurement]:
    """The first measurements of a source, with these outcomes."""
    own = [m for m in table.measurements if m.candidate.variant == source and m.ok]
    return [
        m if outcome is Outcome.OK else replace(m, outcome=outcome, median_ms=None, p20_ms=None, p80_ms=None)
        for m, outcome in zip(own, found, strict=False)
    ]


def test_failures_of_a_source_tell_of_its_other_configs(base: Table) -> None:
    table = rewritten(base, 1.0, 1.0)
    listed = list(table.by_candidate())
    asked = uninformative_forecasts(listed, "")
    wrong, good, large = Outcome.COMPILE_ERROR, Outcome.OK, Outcome.OUT_OF_RESOURCES

    def expected(source: str, *found: Outcome) -> dict[str, float]:
        """Highest P(failure) of what was not tried, by source."""
        seen = outcomes(table, source, *found)
        odds = expect_failing_sources(asked, seen).p_fail
        tried = {m.candidate for m in seen}
        assert np.array_equal(odds[[c in tried for c in listed]], [0.05] * len(seen))
        return {
            name: max(p for c, p in zip(listed, odds, strict=True) if c.variant == name and c not in tried)
            for name in ("base", "rewrite-0", "rewrite-1")
        }

    alone = expected("rewrite-0", *[wrong] * 6)
    assert alone["rewrite-0"] >= REFUSED
    assert (alone["base"], alone["rewrite-1"]) == (0.05, 0.05)
    assert 0.5 < expected("rewrite-0", wrong)["rewrite-0"] < REFUSED
    assert expected("rewrite-0", wrong, *[good] * 5)["rewrite-0"] < 0.25
    assert expected("rewrite-0", *[large] * 6)["rewrite-0"] == 0.05  # which depends on the config
    assert expected("base", *[wrong] * 6)["base"] == 0.05  # there is nothing else to try
