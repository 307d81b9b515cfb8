"""Everything a store holds, as tables: shown, cleared, exported, and imported from other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forecast_autotune.commands import main
from forecast_autotune.records import Candidate, Config, Measurement, Outcome, Problem
from forecast_autotune.records.table import Table, read_tables, write_tables
from forecast_autotune.store import Store
from forecast_autotune.store.formats import read_file
from tests.core.store.stored import A100, H200, decided, measured, problem

# --- everything: tables, clear, import ---


def filled(store: Store) -> dict[str, Problem]:
    problems = {
        "mh": problem(),
        "ma": problem(device=A100),
        "sh": problem(kernel="softmax_fwd"),
    }
    for p in problems.values():
        store.add(p, measured(p, 16))
        store.add(p, measured(p, 32))
        store.put_decision(p, decided(p))
    return problems


FILTERS = [
    ({}, {"mh", "ma", "sh"}),
    ({"kernel": "SOFT"}, {"sh"}),
    ({"device": "h200"}, {"mh", "sh"}),
    ({"device": "nvidia-a100"}, {"ma"}),
    ({"device": "NVIDIA A100"}, {"ma"}),
    ({"kernel": "mat", "device": "H200"}, {"mh"}),
    ({"kernel": "conv"}, set()),
]


@pytest.mark.parametrize(("filters", "expected"), FILTERS)
def test_filters_select_tables_decisions_and_what_is_cleared(
    store: Store, filters: dict[str, str], expected: set[str]
) -> None:
    problems = filled(store)
    chosen = {problems[name].id for name in expected}
    assert {t.problem.id for t in store.tables(**filters)} == chosen
    assert {p.id for p, _ in store.decisions(**filters)} == chosen
    assert store.clear(**filters) == 2 * len(chosen)
    left = {p.id for p in problems.values()} - chosen
    for reader in (store, Store(store.root)) if store.root else (store,):
        assert {t.problem.id for t in reader.tables()} == left
        assert {p.id for p, _ in reader.decisions()} == left
        assert {p.id for p in problems.values() if reader.decision(p)} == left
    assert store.issued_warnings == []


def test_import_adds_only_what_is_missing(store: Store, tmp_path: Path) -> None:
    p = problem()
    early, late = "2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00"
    store.add(p, measured(p, 16, 1.0, at=early))
    table = Table(
        p,
        [
            measured(p, 16, 1.0, at=early),  # held
            measured(p, 16, 1.0, at=late),
            measured(p, 16, 2.0, at=early),
            measured(p, 32, None, at=early),
            measured(p, 32, None, at=early),  # twice in the import itself
        ],
    )
    assert store.import_tables([table]) == 3
    assert store.import_tables([table]) == 0
    assert len(store.measurements(p)) == 4
    write_tables(tmp_path / "shared.jsonl.gz", store.tables())
    other = Store(tmp_path / "other")
    assert other.import_tables(read_tables(tmp_path / "shared.jsonl.gz")) == 4
    assert other.measurements(p) == store.measurements(p)


def test_configs_that_python_calls_equal_but_json_does_not_are_both_imported(store: Store) -> None:
    p = problem()
    pair = [Measurement(p.id, Candidate(Config.of({"FLAG": v})), Outcome.OK, 1.0) for v in (True, 1)]
    assert store.import_tables([Table(p, pair)]) == 2


# --- Triton's cache ---


def triton_entry(kwargs: dict[str, object], times: object) -> list[object]:
    config = {"kwargs": kwargs, "num_warps": 8, "num_ctas": 1, "num_stages": 3, "maxnreg": None}
    return [{**config, "pre_hook": None, "ir_override": None}, times]


def test_tritons_cache_becomes_prior_knowledge(tmp_path: Path) -> None:
    inf = float("inf")
    for folder, key in (("ABC", [4096, "torch.float16"]), ("DEF", [128, "torch.float16"])):
        (tmp_path / folder).mkdir()
        timings = [
            triton_entry({"BLOCK": 128}, [0.2, 0.19, 0.21]),
            triton_entry({"BLOCK": 512}, [inf, inf, inf]),
            triton_entry({"BLOCK": 64}, 0.25),
        ]
        text = json.dumps({"key": key, "configs_timings": timings})
        assert "Infinity" in text
        (tmp_path / folder / "matmul.autotune.json").write_text(text)
    (tmp_path / "ABC" / "matmul.json").write_text("not ours")
    tables = [t for path in sorted(tmp_path.rglob("*.autotune.json")) for t in read_file(path, H200)]
    assert [t.problem.kernel.name for t in tables] == ["matmul", "matmul"]
    table = tables[0]
    assert table.problem.key == ("4096", "torch.float16")
    assert table.problem.device == H200
    assert (table.problem.kernel.source_sha256, table.problem.toolchain) == ("", ())
    fast, failed, one = table.measurements
    assert (fast.median_ms, fast.p20_ms, fast.p80_ms, fast.protocol) == (0.2, 0.19, 0.21, "triton-cache")
    assert fast.candidate.config == Config.of({"BLOCK": 128}, num_warps=8)
    assert failed.outcome is Outcome.OUT_OF_RESOURCES
    assert failed.extra["message"] == "inf in triton's cache"
    assert (one.median_ms, one.p20_ms) == (0.25, None)

    store = Store(tmp_path / "cache")
    assert store.import_tables(tables) == 6
    assert store.import_tables(tables) == 0
    request = problem(4096)
    assert store.measurements(request) == []
    assert store.decision(request) is None
    assert [r.problem.key[0] for r in store.relatives(request)] == ["4096", "128"]
    assert Store(tmp_path / "cache").relatives(request) == store.relatives(request)


BROKEN = [
    "",
    "{}",
    "[]",
    '{"key":1,"configs_timings":[]}',
    '{"key":[],"configs_timings":[3]}',
    '{"key":[],"configs_timings":[[{},[]]]}',
    '{"key":[],"configs_timings":[[{},["x"]]]}',
    '{"key":[],"configs_timings":[[{},[NaN,1,1]]]}',
    '{"key":[],"configs_timings":[[{"num_warps":[]},[1,1,1]]]}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_malformed_cache_file_is_named_and_the_rest_taken(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.autotune.json").write_text(text)
    words = ["--device-name", "NVIDIA H200", "--store", str(tmp_path / "store")]
    assert main(["import", str(tmp_path / "bad.autotune.json"), *words]) == 2
    assert "bad.autotune.json" in capsys.readouterr().err
    good = json.dumps({"key": [], "configs_timings": [triton_entry({}, [1.0, 1.0, 1.0])]})
    (tmp_path / "good.autotune.json").write_text(good)
    files = [str(path) for path in sorted(tmp_path.glob("*.json"))]
    assert main(["import", *files, *words]) == 2
    assert "bad.autotune.json" in capsys.readouterr().err
    assert [t.problem.kernel.name for t in Store(tmp_path / "store").tables()] == ["good"]
