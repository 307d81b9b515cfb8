"""Import of FlagGems' databases of times: `TunedConfig_<device>_triton_<release>.db`, SQLite files.

FlagGems keeps a table for each kernel and kind of key, named `<kernel>_<hash of its source>_benchmark-<hash of the
columns>`: a row per key and config with its 50, 20 and 80 % quantiles in milliseconds. Neither arguments nor
source are there; what comes in is prior knowledge of a kernel, and never answers for a problem of its own.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Config, Device, Kernel, Measurement, Outcome, Problem
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.records.named_lines import Refuse, bounded_refusals, refuse_row
from forecast_autotune.records.table import Table, table_of_problem
from forecast_autotune.store.exchange.kernel_tuner import device_from_name

PROTOCOL = "flaggems"
"""Timing protocol of imported measurements: the benchmark function of FlagGems' tuner."""
MOST_ROWS = 1_000_000
"""A database has no more rows than this, all tables together."""
_MAGIC = b"SQLite format 3\x00"
_TABLE = re.compile(r"(?P<kernel>.+)_(?P<source>[0-9a-f]{32,64})_benchmark-[0-9a-f]{32}")
_FILE = re.compile(r"TunedConfig_(?P<device>.+)_triton_(?P<major>\d+)_(?P<minor>\d+)")
_TIMES = ("p50", "p20", "p80")
_LAUNCH = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def is_flaggems_cache(path: Path) -> bool:
    """Whether a file is an SQLite database; False if unreadable."""
    if not path.is_file():
        return False  # what is read from a pipe is gone for whoever reads it next
    try:
        with path.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def import_flaggems(path: Path, device: Device | None = None, *, refuse: Refuse | None = None) -> list[Table]:
    """Read a database, one table per kernel, source and key; `device` overrides the one that its name gives.

    Raises `RecordError`, naming the file, for a database that is damaged or is none of FlagGems', and where no
    device is named. A row that breaks a rule is one as well: it is raised or, with `refuse`, handed to that.
    """
    named = _FILE.search(path.stem)
    where = device or (device_from_name(named["device"].replace("_", " ")) if named else None)
    if where is None:
        raise RecordError(f"{path}: its name does not say which device it is of: pass --device-name")
    release = f"{named['major']}.{named['minor']}" if named else ""
    refuse = bounded_refusals(path, refuse)
    tables: dict[str, Table] = {}
    try:
        address = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            results = [m for name in _table_names(database) if (m := _TABLE.fullmatch(name))]
            if not results:
                raise RecordError(f"{path}: a database without FlagGems' tables of times")
            left = MOST_ROWS
            for match in results:
                for row in _rows(database, match[0], left):
                    left -= 1
                    try:
                        _read_row(tables, match, row, where, release)
                    except MALFORMED as error:
                        refuse_row(RecordError(f"{path}: {match['kernel']}: {error}"), refuse)
    except sqlite3.Error as error:
        raise RecordError(f"{path}: no readable database ({error})") from error
    return list(tables.values())


def _table_names(database: sqlite3.Connection) -> list[str]:
    listed = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    return [str(name) for (name,) in listed]


def _rows(database: sqlite3.Connection, name: str, most: int) -> Iterator[dict[str, Any]]:
    quoted = '"' + name.replace('"', '""') + '"'
    cursor = database.execute(f"SELECT * FROM {quoted} LIMIT ?", (most,))
    columns = [str(column[0]) for column in cursor.description]
    for row in cursor:
        yield dict(zip(columns, row, strict=True))


def _read_row(
    tables: dict[str, Table], match: re.Match[str], row: dict[str, Any], device: Device, release: str
) -> None:
    if missing := [name for name in _TIMES if not isinstance(row.get(name), float | int)]:
        raise RecordError(f"{missing[0]} must be a number of milliseconds, not {row.get(missing[0])!r:.40}")
    median, fast, slow = (float(row.pop(name)) for name in _TIMES)
    numbered = sorted((int(name[4:]), name) for name in row if re.fullmatch(r"key_\d+", name))
    key = [str(row.pop(name)) for _, name in numbered]
    launch = {name: row.pop(name) for name in _LAUNCH if row.get(name) is not None}
    kwargs = {name: value for name, value in row.items() if name not in _LAUNCH and value is not None}
    kernel = Kernel(match["kernel"], "triton", "", "")
    versions = {"triton": release} if release else {}
    problem = Problem.of(
        kernel, (), device, key=key, toolchain=versions, identity=[PROTOCOL, match["source"], *key]
    )
    problem = replace(problem, extra={"imported_from": PROTOCOL})
    candidate = Candidate(Config.from_json({"kwargs": kwargs, **launch}))
    # A failing config has three infinities.
    failed = median == float("inf")
    measurement = (
        Measurement(problem.id, candidate, Outcome.RUNTIME_ERROR, protocol=PROTOCOL)
        if failed
        else Measurement(problem.id, candidate, Outcome.OK, median, fast, slow, protocol=PROTOCOL)
    )
    table_of_problem(tables, problem).measurements.append(measurement)
