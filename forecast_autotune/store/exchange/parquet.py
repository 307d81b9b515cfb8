"""Export of tables for other tools. JSON Lines are written by `table.write_tables`."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.errors import StoreError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.records.bounded_json import without_halves

if TYPE_CHECKING:
    from forecast_autotune.records import Problem
    from forecast_autotune.records.table import Table

_COLUMNS = {
    "kernel": "string",
    "language": "string",
    "source_sha256": "string",
    "device": "string",
    "backend": "string",
    "arch": "string",
    "problem": "string",
    "key": "string",
    "arguments": "string",
    "toolchain": "string",
    "variant": "string",
    "config": "string",
    "kwargs": "string",
    "num_warps": "int64",
    "num_stages": "int64",
    "num_ctas": "int64",
    "maxnreg": "int64",
    "grid": "string",
    "outcome": "string",
    "median_ms": "float64",
    "p20_ms": "float64",
    "p80_ms": "float64",
    "repeats": "int64",
    "compile_s": "float64",
    "protocol": "string",
    "at": "string",
    "extra": "string",
}
"""Columns and their types; strings of structured values are JSON."""

_ROWS_AT_ONCE = 50_000


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _problem_columns(problem: Problem) -> dict[str, Any]:
    return {
        "kernel": problem.kernel.name,
        "language": problem.kernel.language,
        "source_sha256": problem.kernel.source_sha256,
        "device": problem.device.name,
        "backend": problem.device.backend,
        "arch": problem.device.arch,
        "problem": problem.id,
        "key": _json(list(problem.key)),
        "arguments": _json([a.to_json() for a in problem.arguments]),
        "toolchain": _json(dict(problem.toolchain)),
    }


def measurement_rows(tables: Iterable[Table]) -> Iterator[dict[str, Any]]:
    """One flat row per measurement, with its problem's columns repeated."""
    for table in tables:
        shared = _problem_columns(table.problem)
        for m in table.measurements:
            config, grid = m.candidate.config, m.grid or table.problem.grid
            row = {
                **shared,
                "variant": m.candidate.variant,
                "config": _json(config.to_json()),
                "kwargs": _json(dict(config.kwargs)),
                "num_warps": config.num_warps,
                "num_stages": config.num_stages,
                "num_ctas": config.num_ctas,
                "maxnreg": config.maxnreg,
                "grid": None if grid is None else _json(list(grid)),
                "outcome": str(m.outcome),
                "median_ms": m.median_ms,
                "p20_ms": m.p20_ms,
                "p80_ms": m.p80_ms,
                "repeats": m.repeats,
                "compile_s": m.compile_s,
                "protocol": m.protocol,
                "at": m.at,
                "extra": _json(dict(m.extra)),
            }
            yield {k: without_halves(v) if isinstance(v, str) else v for k, v in row.items()}


def write_parquet(path: Path, tables: Iterable[Table]) -> int:
    """Write one row per measurement (`measurement_rows`), as `write_tables` does; returns the number of rows.

    Raises `StoreError` when pyarrow is not installed, and `OSError` when the file cannot be written.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise StoreError(
            f"writing {path.name} needs pyarrow ({error}): pip install 'forecast-autotune[parquet]', "
            "or write .jsonl.gz instead"
        ) from error
    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in _COLUMNS.items()])
    count, flat = 0, measurement_rows(tables)
    # A device or a pipe cannot be asked where it stands, as the format's writer does.
    with open_named_output(path) as stream, tempfile.TemporaryFile() as whole:
        with pyarrow.parquet.ParquetWriter(whole, schema) as writer:
            while batch := list(islice(flat, _ROWS_AT_ONCE)):
                writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
                count += len(batch)
        whole.seek(0)
        shutil.copyfileobj(whole, stream)
    return count
