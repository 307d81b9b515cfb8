"""What the forecasts benchmark hands to the evaluation."""

from __future__ import annotations

from pathlib import Path

from benchmarks.forecasting import unseen_kernels
from forecast_autotune.records.table import read_tables


def test_nothing_is_written_where_the_shipped_tables_will_do(tmp_path: Path) -> None:
    assert unseen_kernels.gather_tables([], None, tmp_path / "t.jsonl") == []
    assert not list(tmp_path.iterdir())


def test_lists_are_cut_short_and_problems_chosen(tmp_path: Path) -> None:
    (file,) = unseen_kernels.gather_tables([], 3, tmp_path / "t.jsonl", short=12)
    tables = read_tables(Path(file))
    assert 0 < len(tables) <= 3
    assert {len(t.by_candidate()) for t in tables} == {12}
    assert all(any(m.ok for m in t.measurements) for t in tables)
