"""FlagGems' databases of times."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records import (
    LAUNCH_OPTIONS,
    Candidate,
    Config,
    Device,
    Kernel,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.records.json_fields import MALFORMED
from forecast_autotune.store.formats.protocol import IMPORTED_FROM, Format, Reading, Row, device_from_name

FLAGGEMS_PROTOCOL = "flaggems"
"""Timing protocol of imported measurements: the benchmark function of FlagGems' tuner."""
MOST_ROWS = 1_000_000
"""A database has no more rows than this, all tables together."""
_MAGIC = "SQLite format 3\x00"
_TABLE = re.compile(r"(?P<kernel>.+)_(?P<source>[0-9a-f]{32,64})_benchmark-[0-9a-f]{32}")
_FILE = re.compile(r"TunedConfig_(?P<device>.+)_triton_(?P<major>\d+)_(?P<minor>\d+)")
_VENDOR = re.compile(r"[a-z]+")
"""On all devices but NVIDIA's a file is named by the vendor, in small letters."""
_TIMES = ("p50", "p20", "p80")


def _read(reading: Reading) -> Iterator[Row]:
    """Read a database, one problem per kernel, source and key.

    Raises `RecordError`, naming the file, for a database that is damaged or is none of FlagGems', and where no
    device is named. A row that breaks a rule is refused.
    """
    path = reading.path
    match_name = _FILE.search(path.stem)
    where = reading.device
    if where is None:
        if match_name is None or _VENDOR.fullmatch(match_name["device"]):
            vendor = f"gives the vendor {match_name['device']!r}, not the device" if match_name else ""
            fault = vendor or "does not say which device it is of"
            raise RecordError(f"{path}: its name {fault}: pass --device-name")
        where = device_from_name(match_name["device"].replace("_", " "))
    release = f"{match_name['major']}.{match_name['minor']}" if match_name else ""
    try:
        address = f"{path.resolve().as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True)) as database:
            database.text_factory = lambda raw: raw.decode("utf-8", "replace")
            if (check := database.execute("PRAGMA quick_check(1)").fetchone()) != ("ok",):
                raise RecordError(f"{path}: damaged, so none of it is taken ({check[0]:.100})")
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
            results = [m for (name,) in tables if (m := _TABLE.fullmatch(str(name)))]
            if not results:
                raise RecordError(f"{path}: a database without FlagGems' tables of times")
            budget = MOST_ROWS
            for match in results:
                for row in _rows(database, match[0], budget):
                    budget -= 1
                    try:
                        yield _row(match, row, where, release)
                    except MALFORMED as error:
                        reading.refuse_row(f"{match['kernel']}: {error}")
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: no readable database ({error})") from error


def _rows(database: sqlite3.Connection, name: str, most: int) -> Iterator[dict[str, Any]]:
    table = '"' + name.replace('"', '""') + '"'
    # SQLite has no booleans; the declared type alone tells them from numbers.
    flags = {
        str(c[1]) for c in database.execute(f"PRAGMA table_info({table})") if str(c[2]).upper() == "BOOLEAN"
    }
    cursor = database.execute(f"SELECT * FROM {table} LIMIT ?", (most,))
    columns = [str(column[0]) for column in cursor.description]
    for row in cursor:
        yield {c: bool(v) if c in flags and v in (0, 1) else v for c, v in zip(columns, row, strict=True)}


def _row(match: re.Match[str], row: dict[str, Any], device: Device, release: str) -> Row:
    if missing := [name for name in _TIMES if not isinstance(row.get(name), float | int)]:
        raise RecordError(f"{missing[0]} must be a number of milliseconds, not {row.get(missing[0])!r:.40}")
    median, fast, slow = (float(row.pop(name)) for name in _TIMES)
    key_columns = sorted((int(name[4:]), name) for name in row if re.fullmatch(r"key_\d+", name))
    key = [str(row.pop(name)) for _, name in key_columns]
    launch = {name: row.pop(name) for name in LAUNCH_OPTIONS if row.get(name) is not None}
    kwargs = {name: value for name, value in row.items() if name not in LAUNCH_OPTIONS and value is not None}
    if odd := [name for name, value in kwargs.items() if isinstance(value, bytes)]:
        raise RecordError(f"{odd[0]} must be a number or a word, not bytes")
    problem = Problem.of(
        Kernel(match["kernel"], "triton", "", ""),
        (),
        device,
        key=key,
        toolchain={"triton": release} if release else {},
        identity=[FLAGGEMS_PROTOCOL, match["source"], *key],
        extra={IMPORTED_FROM: FLAGGEMS_PROTOCOL},
    )
    candidate = Candidate(Config.from_json({"kwargs": kwargs, **launch}))
    if median == float("inf"):  # a failing config has three infinities
        return problem, Measurement(problem.id, candidate, Outcome.RUNTIME_ERROR, protocol=FLAGGEMS_PROTOCOL)
    return problem, Measurement(
        problem.id, candidate, Outcome.OK, median, fast, slow, protocol=FLAGGEMS_PROTOCOL
    )


def _is_theirs(path: Path, head: str) -> bool:
    return head.startswith(_MAGIC)


FORMAT = Format(
    FLAGGEMS_PROTOCOL, "FlagGems", "`TunedConfig_<device>_triton_<release>.db`",
    _is_theirs, _read,
    "5.0.2", ("median, p20, p80", "one kind", "in the name, NVIDIA's alone", "key", "no"), "the choice",
)  # fmt: skip
