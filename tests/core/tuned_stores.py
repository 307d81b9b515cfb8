"""Stores in which the real tuner has decided something."""

from __future__ import annotations

from pathlib import Path

from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.testing import TableMeasurer, example_table
from forecast_autotune.tuning.loop import TuningTask, tune


def tune_example(root: Path) -> Table:
    """Tune the example problem into a store; its table."""
    table = example_table()
    tune(
        TuningTask(table.problem, list(table.by_candidate())),
        lambda: TableMeasurer(table, workers=2),
        store=Store(root),
        surrogate=AnalyticSurrogate(),
        settings=Settings(),
    )
    return table
