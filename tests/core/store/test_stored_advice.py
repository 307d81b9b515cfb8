"""Advice in a store: one file per source, replaced whole, travelling with tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.records.table import Table, read_tables, write_tables
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.testing import example_table

TEXT = "def cost(config, args, device, launch):\n    return 1 + config.BLOCK\n"
ADVICE = Advice(
    "example", "0" * 64, TEXT, "somebody", at="2026-01-31T00:00:00+00:00", provenance="written blind"
)


def test_a_round_trip(tmp_path: Path) -> None:
    assert Advice.from_json(json.loads(json.dumps(ADVICE.to_json()))) == ADVICE
    for store in (Store(tmp_path), Store(None)):
        assert store.advice("0" * 64) is None
        store.put_advice(ADVICE)
        assert store.advice("0" * 64) == ADVICE
        assert store.advice("1" * 64) is None
        store.put_advice(replace(ADVICE, text=TEXT + "\n"))
        assert store.advice_of("EXAM") == [replace(ADVICE, text=TEXT + "\n")]
        assert store.advice_of("other") == []
        assert store.clear_advice("other") == 0
        assert store.clear_advice() == 1
        assert store.advice("0" * 64) is None
    Store(tmp_path).put_advice(ADVICE)
    assert Store(tmp_path).advice_of() == [ADVICE], "another process finds it"


def test_unknown_fields_survive(tmp_path: Path) -> None:
    data = ADVICE.to_json() | {"stars": 5}
    store = Store(tmp_path)
    store.put_advice(Advice.from_json(data))
    result = Store(tmp_path).advice("0" * 64)
    assert result is not None
    assert result.to_json()["stars"] == 5


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"type": "variant"}', "\x00", '{"type":"advice","schema":1}']
)
def test_a_damaged_file_is_noted_and_skipped(content: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.put_advice(ADVICE)
    (path,) = (tmp_path / "advice").glob("*.json")
    path.write_text(content)
    with pytest.warns(StoreWarning, match="ignored, no advice"):
        assert Store(tmp_path).advice("0" * 64) is None


def test_a_file_under_another_name_is_noted_and_skipped(tmp_path: Path) -> None:
    Store(tmp_path).put_advice(ADVICE)
    (path,) = (tmp_path / "advice").glob("*.json")
    path.rename(path.with_name("1" * 64 + ".json"))
    with pytest.warns(StoreWarning, match="not filed under its own source"):
        assert Store(tmp_path).advice_of() == []


def test_a_source_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.put_advice(replace(ADVICE, source_sha256="../../outside"))
    assert not (tmp_path / "outside.json").exists()
    assert all((tmp_path / "store") in p.parents for p in tmp_path.rglob("*.json"))
    assert Store(tmp_path / "store").advice("../../outside") is not None


def test_a_disk_that_refuses_costs_a_note(tmp_path: Path) -> None:
    (tmp_path / "advice").write_text("in the way")
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match="it stays in memory only"):
        store.put_advice(ADVICE)
    assert store.advice("0" * 64) == ADVICE


def travelled(table: Table, path: Path) -> Table:
    write_tables(path, [table])
    (result,) = read_tables(path)
    return result


def test_it_travels_with_tables(tmp_path: Path) -> None:
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    here.import_tables([example_table()])
    here.put_advice(ADVICE)
    (table,) = here.tables()
    there.import_tables([travelled(table, tmp_path / "table.jsonl")])
    assert there.advice("0" * 64) == ADVICE
    own = replace(ADVICE, model="another")
    there.put_advice(own)
    there.import_tables([table])
    assert there.advice("0" * 64) == own, "what is there already stays"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"type": "advice"}, "was not imported"),
        (5, "was not imported"),
        (replace(ADVICE, text="import os").to_json(), "a module holds helpers"),
        (replace(ADVICE, others=("import os",)).to_json(), "a module holds helpers"),
        (replace(ADVICE, others=(TEXT,) * 9).to_json(), "8 cost functions at most"),
        (replace(ADVICE, source_sha256="1" * 64).to_json(), "it is on another source"),
    ],
)
def test_what_is_no_advice_on_the_kernel_is_not_imported(given: object, why: str, tmp_path: Path) -> None:
    table = example_table()
    table.problem = replace(table.problem, extra={"advice": given})
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match=why):
        assert store.import_tables([table]) == len(table.measurements)
    assert store.advice_of() == []
