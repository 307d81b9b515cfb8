"""Stores for the tests of the core: empty, tuned, on disk and in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.store import Store
from forecast_autotune.testing import example_table
from tests.core.tuning.loop import TABLE, Bench, decide


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the command line keeps its store in this test; no variable from outside is left."""
    for name in [n for n in os.environ if n.startswith("FORECAST_AUTOTUNE")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "150")
    return tmp_path / "store"


@pytest.fixture
def tuned(root: Path) -> Table:
    """A store in which one problem has been tuned by the real tuner."""
    decide(Store(root), Bench(TABLE))
    return TABLE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A table file with the example problem."""
    path = tmp_path / "table.jsonl"
    write_tables(path, [example_table()])
    return path


@pytest.fixture(params=["disk", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of either kind."""
    return Store(tmp_path / "cache" if request.param == "disk" else None)
