"""A store that was filled by decisions keeps what a refit needs: no TTIR text, no kernel, no GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.features import traced_texts
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.records.table import Table, read_tables, write_tables
from forecast_autotune.settings import Mode, Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.prior import formula_prior
from forecast_autotune.testing import TableMeasurer
from forecast_autotune.tuning.loop import TuningTask, tune
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.splits import kernel_of
from forecast_train.surrogate.fit import FitSettings, fit_model

QUICK = FitSettings(trees=4, rounds=30, rate=0.2, jobs=1)


def first_of_each_kernel() -> list[Table]:
    results: dict[str, Table] = {}
    for table in load(shipped_tables()):
        results.setdefault(kernel_of(table.problem), table)
    return list(results.values())


TABLES = first_of_each_kernel()


def decide(table: Table, store: Store, **options: Any) -> Any:
    """One live decision: the kernel is traced as it goes, its problem's record has no IR."""
    texts = table.problem.ttir
    problem = replace(table.problem, ttir={})
    rows = table.by_candidate()

    def trace(candidates: Any) -> dict[str, str]:
        names = map(assignment_of, candidates)
        return {name: texts[name] for name in names if name in texts}

    task = TuningTask(problem, tuple(rows), grids=table.grids(), trace=trace)
    settings = Settings(**{"max_measurements": 12, "audit": 0.0, **options})
    measurer = TableMeasurer(Table(problem, table.measurements), workers=2)
    return tune(task, lambda: measurer, store=store, surrogate=AnalyticSurrogate(), settings=settings)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("store")
    for table in TABLES:
        decide(table, Store(root))
    return root


def test_facts_read_back_are_those_of_the_text(store: Path) -> None:
    tables = {t.problem.id: t for t in Store(store).tables()}
    assert len(tables) == len(TABLES)
    for table in TABLES:
        mine = tables[table.problem.id]
        assert not mine.problem.ttir
        assert len(mine.by_candidate()) < len(table.by_candidate())
        candidates, grids = list(mine.by_candidate()), mine.grids()
        by_text = formula_prior(replace(mine.problem, extra={}), candidates, grids, table.problem.ttir)
        by_facts = formula_prior(mine.problem, candidates, grids, {})
        assert by_text.informed
        assert by_facts.exact.all()
        np.testing.assert_array_equal(by_text.mean, by_facts.mean)
        np.testing.assert_array_equal(by_text.p_fail, by_facts.p_fail)


def test_a_refit_from_facts_is_the_refit_from_texts(store: Path) -> None:
    ours = sorted(Store(store).tables(), key=lambda t: t.problem.id)
    texts = {t.problem.id: t.problem.ttir for t in TABLES}
    theirs = [Table(replace(t.problem, ttir=texts[t.problem.id], extra={}), t.measurements) for t in ours]
    one, other = (fit_model(tables, recipe=QUICK) for tables in (ours, theirs))
    np.testing.assert_array_equal(one.residual.threshold, other.residual.threshold)
    np.testing.assert_array_equal(one.residual.value, other.residual.value)
    assert one.about == other.about


@pytest.mark.parametrize(
    "spoil",
    [
        lambda f: {**f, "version": "0-older"},
        lambda f: {**f, "units": [[a, g, {**v, "unheard_of": 1.0}] for a, g, v in f["units"]]},
        lambda f: {**f, "units": [[a, g, {**v, "load_bytes": "many"}] for a, g, v in f["units"]]},
        lambda f: {**f, "units": [[a, g] for a, g, _ in f["units"]]},
        lambda f: {**f, "units": "text"},
        lambda f: {},
    ],
)
def test_facts_of_another_version_and_damaged_ones_count_as_none(store: Path, spoil: Any) -> None:
    table = next(iter(Store(store).tables()))
    spoilt = replace(
        table.problem, extra={traced_texts.FACTS: spoil(table.problem.extra[traced_texts.FACTS])}
    )
    assert traced_texts.facts_by_unit(table.problem)
    assert not traced_texts.facts_by_unit(spoilt)
    assert not formula_prior(spoilt, list(table.by_candidate()), table.grids(), {}).informed


def test_facts_add_up_over_decisions_and_go_with_the_store(tmp_path: Path) -> None:
    table = max(TABLES, key=lambda t: len(t.problem.ttir))
    store = Store(tmp_path)
    decide(table, store, max_measurements=3)
    few = traced_texts.facts_by_unit(next(iter(store.tables())).problem)
    decide(table, store, max_measurements=10, risk=0.0, tolerance=0.001)
    more = traced_texts.facts_by_unit(next(iter(store.tables())).problem)
    assert few.items() < more.items()
    assert traced_texts.facts_by_unit(next(iter(Store(tmp_path).tables())).problem) == more
    store.clear()
    assert list(tmp_path.rglob("facts/*.json")) == []
    assert store.facts(table.problem) is None


def test_facts_survive_export_and_import(store: Path, tmp_path: Path) -> None:
    write_tables(tmp_path / "t.jsonl.gz", Store(store).tables())
    other = Store(tmp_path / "other")
    other.import_tables(read_tables(tmp_path / "t.jsonl.gz"))
    mine = {t.problem.id: traced_texts.facts_by_unit(t.problem) for t in Store(store).tables()}
    assert {t.problem.id: traced_texts.facts_by_unit(t.problem) for t in other.tables()} == mine


def test_a_harvest_keeps_its_texts_and_no_facts(tmp_path: Path) -> None:
    table = min(TABLES, key=lambda t: len(t.measurements))
    store = Store(tmp_path)
    decide(table, store, mode=Mode.EXHAUSTIVE, max_measurements=None)
    result = next(iter(store.tables()))
    assert result.problem.ttir
    assert traced_texts.FACTS not in result.problem.extra


def test_a_stored_decision_and_a_store_that_keeps_no_facts_write_none(tmp_path: Path) -> None:
    table = TABLES[0]
    store = Store(tmp_path)
    decide(table, store)
    (path,) = tmp_path.rglob("facts/*.json")
    path.unlink()
    decide(table, store)
    assert not path.exists()


def test_a_full_disk_or_a_damaged_file_costs_no_decision(tmp_path: Path) -> None:
    table = TABLES[0]
    store = Store(tmp_path)
    decision = decide(table, store)
    (path,) = tmp_path.rglob("facts/*.json")
    path.write_text("{half")
    with pytest.warns(UserWarning, match="no facts"):
        assert store.facts(table.problem) is None
    again = decide(table, Store(tmp_path), max_measurements=14, risk=0.0)
    assert again.measured > 0
    assert traced_texts.facts_by_unit(next(iter(Store(tmp_path).tables())).problem)
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="cannot"):
        last = decide(table, Store(tmp_path), max_measurements=16, risk=0.0, tolerance=0.001)
    assert last.chosen in table.by_candidate()
    assert decision.measured > 0


def test_what_nobody_has_read_in_time_is_left_out() -> None:
    table = TABLES[0]
    rows = list(table.by_candidate())
    traced_texts.cached_facts.cache_clear()
    result = traced_texts.collect_facts(table.problem, rows, table.grids(), table.problem.ttir, within_s=-1.0)
    assert result == {"version": traced_texts.VERSION, "units": []}
    whole = traced_texts.collect_facts(table.problem, rows, table.grids(), table.problem.ttir, within_s=60.0)
    assert len(whole["units"]) > 0
    assert json.loads(json.dumps(whole)) == json.loads(json.dumps(traced_texts.merge_facts(None, whole)))
    size = len(json.dumps(whole)) / len(whole["units"])
    assert size < 1500
