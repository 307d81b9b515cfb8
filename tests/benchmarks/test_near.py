"""Times taken again in turns: what they are compared with, and at which level."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.corpus import retime_near_best
from forecast_autotune.records.table import Table, write_tables
from forecast_autotune.testing import example_table


def table(times: list[float]) -> Table:
    """The first candidates of the example with these times."""
    example = example_table()
    problem = replace(example.problem, extra={**example.problem.extra, "label": "example/1"})
    rows = [m for m in example.measurements if m.ok][: len(times)]
    again = [
        replace(m, median_ms=ms, p20_ms=ms * 0.99, p80_ms=ms * 1.01)
        for m, ms in zip(rows, times, strict=True)
    ]
    return Table(problem, again)


def times(of: Table) -> list[float]:
    return [m.ms for m in of.measurements]


def test_what_is_close_to_the_best_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_tables(path, [table([1.0, 1.05, 1.09, 1.2, 3.0])])
    result = retime_near_best.close_configs([path], 0.1)
    assert [len(close) for close in result.values()] == [3]
    assert retime_near_best.close_configs([path], 0.01) == {}, "one config has no rival"
