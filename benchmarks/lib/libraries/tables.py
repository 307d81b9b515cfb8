"""Tables of a harvest of library kernels, without a line of their source or IR: facts and times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.libraries.contexts import read_rows
from forecast_autotune.features.stored_facts import collect_facts
from forecast_autotune.records import Candidate, Measurement
from forecast_autotune.records.problem import FACTS
from forecast_autotune.records.table import Table, read_tables, write_tables

LONGEST_READING_S = 20.0
"""For the IR of one problem; what is not read by then has no facts."""
TEXT_SIZES = "text_sizes"
"""Of a problem line: lines and characters of its IR by assignment, which compile seconds go by."""
_KEPT_OF_EXTRA = ("shared", "registers", "spills", "ptx", "forecast")


def text_free(table: Table) -> Table:
    """The table with facts in the place of IR, and without source, IR and messages, which may quote either."""
    rows = table.by_candidate()
    grids = {c: m.grid for c, m in rows.items() if m.grid is not None}
    problem = table.problem
    extra = dict(problem.extra)
    if problem.ttir:
        extra[FACTS] = collect_facts(problem, list(rows), grids, problem.ttir, within_s=LONGEST_READING_S)
        extra[TEXT_SIZES] = {name: [len(t.splitlines()), len(t)] for name, t in problem.ttir.items()}
    kernel = replace(problem.kernel, source="", extra={})
    return replace(
        table,
        problem=replace(problem, kernel=kernel, ttir={}, extra=extra),
        measurements=[_without_text(m) for m in one_row_per_candidate(table)],
    )


def one_row_per_candidate(table: Table) -> list[Measurement]:
    """The row that counts of each candidate (timed side by side, if it was), with what compiling it said.

    A time taken side by side is of a binary that was compiled before: its seconds and sizes are in an earlier row.
    """
    compiled: dict[Candidate, Measurement] = {}
    for m in table.measurements:
        if m.compile_s is not None:
            compiled.setdefault(m.candidate, m)
    rows = []
    for candidate, m in table.by_candidate().items():
        first = compiled.get(candidate, m)
        rows.append(replace(m, compile_s=first.compile_s, extra={**first.extra, **m.extra}))
    return rows


def _without_text(m: Measurement) -> Measurement:
    extra: dict[str, Any] = {k: v for k, v in m.extra.items() if k in _KEPT_OF_EXTRA}
    if "message" in m.extra:
        extra["error"] = str(m.extra["message"]).partition(":")[0][:60]
    return replace(m, extra=extra)


def write_text_free(tables: Sequence[Table], out: Path, processes: int) -> int:
    """Write tables to a file without any text of the kernels; returns the number of measurements."""
    with ProcessPoolExecutor(max(1, processes)) as pool:
        return write_tables(out, list(pool.map(text_free, tables)))


def pack_tables(folders: Sequence[Path], out: Path) -> int:
    """Join the tables that harvests left in folders, a row per candidate; returns the number of measurements.

    A problem's label is the workload that met it. Of a problem that was harvested twice, and of
    its decision, that of the last folder counts. Raises `ValueError` where a problem holds source or IR.
    """
    packed: dict[str, Table] = {}
    for folder in folders:
        workloads = {
            str(row.get("problem")): json.loads(row["id"])[0] for row in read_rows(folder / "harvest.jsonl")
        }
        for table in read_tables(folder / "harvest_table.jsonl.gz"):
            problem = table.problem
            if problem.kernel.source or problem.ttir:
                raise ValueError(
                    f"{folder}: problem {problem.id} ({problem.kernel.name}) holds source or IR, which must not be "
                    "packed: give a folder whose harvest_table.jsonl.gz the stage harvest wrote"
                )
            if problem.id in workloads:
                labelled = replace(problem, extra={**problem.extra, "label": workloads[problem.id]})
                packed[problem.id] = Table(labelled, one_row_per_candidate(table))
    return write_tables(out, list(packed.values()))
