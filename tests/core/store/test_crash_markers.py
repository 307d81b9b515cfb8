"""Notes about launches: what a dead process leaves behind becomes a failed measurement."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forecast_autotune.records import Outcome
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.testing import example_table

TABLE = example_table()
PROBLEM, CANDIDATE = TABLE.problem, TABLE.measurements[0].candidate
DIE = """
import os, sys
from pathlib import Path
from forecast_autotune.store import Store, StoreWarning
from forecast_autotune.testing import example_table
table = example_table()
with Store(Path(sys.argv[1])).watch(table.problem, table.measurements[0].candidate):
    os._exit(9)
"""


def notes(root: Path) -> list[Path]:
    return list(root.rglob("running-*.json"))


def test_a_launch_that_kills_its_process_is_recorded_once(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIE, str(tmp_path)], check=False)
    assert len(notes(tmp_path)) == 1
    store = Store(tmp_path)
    (result,) = store.recover(PROBLEM)
    assert (result.candidate, result.outcome) == (CANDIDATE, Outcome.RUNTIME_ERROR)
    assert notes(tmp_path) == []
    assert store.recover(PROBLEM) == []
    assert Store(tmp_path).measurements(PROBLEM) == [result]


def test_an_ordinary_way_out_leaves_no_note(tmp_path: Path) -> None:
    with Store(tmp_path).watch(PROBLEM, CANDIDATE):
        assert len(notes(tmp_path)) == 1
    assert notes(tmp_path) == []


def test_a_running_process_is_left_alone(tmp_path: Path) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with Store(tmp_path).watch(PROBLEM, CANDIDATE):
            (note,) = notes(tmp_path)
            note.rename(note.with_name(note.name.replace(f"-{os.getpid()}.", f"-{sleeper.pid}.")))
        assert Store(tmp_path).recover(PROBLEM) == []
        assert len(notes(tmp_path)) == 1
    finally:
        sleeper.communicate(b"\n")


def test_a_note_with_our_own_number_is_from_before_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.watch(PROBLEM, CANDIDATE):
        (note,) = notes(tmp_path)
        text = note.read_text()
    note.write_text(text)
    assert [m.candidate for m in store.recover(PROBLEM)] == [CANDIDATE]


def test_a_torn_note_is_removed_without_a_label(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.watch(PROBLEM, CANDIDATE):
        (note,) = notes(tmp_path)
    note.write_text('{"variant":')
    with pytest.warns(StoreWarning, match="ignored, no candidate"):
        assert store.recover(PROBLEM) == []
    assert notes(tmp_path) == []


def test_clear_forgets_notes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(PROBLEM, TABLE.measurements[0])
    with store.watch(PROBLEM, CANDIDATE):
        (note,) = notes(tmp_path)
        text = note.read_text()
    note.write_text(text)
    store.clear()
    assert notes(tmp_path) == []
