"""Several sources of one kernel: what was measured of one says less of the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import HOOK_VARIANT_PREFIX, Candidate
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.calibration import measurements_per_source
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.testing import TableMeasurer
from forecast_autotune.tuning.loop import TuningTask, tune
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
    table, store, settings = rewritten(base, 1.1, GAIN, 1.0), Store(None), Settings(mode=Mode.TUNE)
    names = list(table.by_candidate())
    bases = [c for c in names if c.is_base_variant]
    problem = replace(table.problem, ttir={})

    def decided(candidates: list[Candidate]) -> Candidate:
        task = TuningTask(problem, candidates, table.grids(), trace=lambda _: table.problem.ttir)
        measurer = TableMeasurer(table)
        return tune(
            task, lambda: measurer, store=store, surrogate=DefaultSurrogate(), settings=settings
        ).chosen

    assert decided(bases).is_base_variant
    assert decided(names).variant == "rewrite-1"
