"""The fuzzing of records: some hundred cases find no fault, cases are functions of their number, faults are found."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hardening import fuzz_records
from benchmarks.lib.hardening.damaged_records import CaseFaults, RecordFuzzer
from forecast_autotune.store import Store

OPTIONS = argparse.Namespace(seed=7, deadline=120.0, memory=1024.0)


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> RecordFuzzer:
    """One for all faults, which are of seed 0."""
    return RecordFuzzer(tmp_path_factory.mktemp("fuzzer"), 0)


@pytest.mark.slow
def test_three_hundred_cases_find_no_fault() -> None:
    cases = list(fuzz_records.run_cases(OPTIONS, list(range(300))))
    assert [case["number"] for case in cases] == list(range(300))
    assert [case for case in cases if case["faults"]] == []
    summary = fuzz_records.summary_of(cases)
    assert summary["faulty"] == 0
    assert len(summary["damage"]) > 15, "nearly every kind of damage is among them"
    assert min(summary["kinds"].values()) > 0


def test_a_case_is_a_function_of_its_number(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = RecordFuzzer(tmp_path / "a", 3), RecordFuzzer(tmp_path / "b", 3)
    two.run(0)
    for number in range(1, 6):
        assert one.run(number) == two.run(number)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug")


@pytest.mark.parametrize(("method", "fault"), [("tables", "traceback"), ("measurements", "traceback")])
def test_a_fault_is_found(
    fuzzer: RecordFuzzer, monkeypatch: pytest.MonkeyPatch, method: str, fault: str
) -> None:
    monkeypatch.setattr(Store, method, broken)
    assert any(f["fault"] == fault for number in range(5) for f in fuzzer.run(number).faults)


def test_lost_rows_are_found(fuzzer: RecordFuzzer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Store.measurements
    monkeypatch.setattr(Store, "measurements", lambda *given: whole(*given)[1:])
    monkeypatch.setattr(Store, "tables", lambda *_: iter(()))
    assert any(f["fault"] == "rows lost" for number in range(5) for f in fuzzer.run(number).faults)


def test_a_child_that_dies_costs_one_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys\n"
        "for n in map(int, sys.argv[sys.argv.index('--child') + 1].split(',')):\n"
        "    if n == 2: sys.exit(9)\n"
        "    print(json.dumps({'number': n, 'faults': []}), flush=True)\n"
    )
    monkeypatch.setattr(fuzz_records, "module_command", lambda _: [sys.executable, str(child)])
    cases = list(fuzz_records.run_cases(OPTIONS, [1, 2, 3]))
    assert [case["number"] for case in cases] == [1, 2, 3]
    assert [f["fault"] for case in cases for f in case["faults"]] == ["died"]
    assert fuzz_records.summary_of(cases)["faults"]["died"] == 1


def test_a_command_that_says_nothing_of_its_failure_is_a_fault(
    fuzzer: RecordFuzzer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks.lib.hardening import damaged_records

    monkeypatch.setattr(damaged_records, "main", lambda _: 1)
    case = CaseFaults(0)
    fuzzer._command(case, tmp_path / "store", ["show"])
    assert [f["fault"] for f in case.faults] == ["wrong status"]
