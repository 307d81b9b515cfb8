"""Every format that `import` reads, one file each below one protocol; the first that knows a file reads it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from forecast_autotune.records import Device
from forecast_autotune.records.named_lines import Refuse
from forecast_autotune.records.table import Table, read_rows
from forecast_autotune.store.formats import (
    choices,
    flaggems,
    helion,
    inductor,
    kernel_tuner,
    metaschedule,
    tokamax,
    triton_cache,
)
from forecast_autotune.store.formats.protocol import (
    Format,
    Reading,
    Row,
    device_from_name,
    head_text,
    tables_of,
)


def _read_table(reading: Reading) -> Iterator[Row]:
    """Read a table of ours. Raises `RecordError` for a file that cannot be opened."""
    tables: dict[str, Table] = {}
    for table, measurement in read_rows(reading.path, tables, reading.other, reading.refuse, streamed=True):
        yield table.problem, measurement


SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")
TABLE = Format(
    "table", "this project", "tables of `export`: `.jsonl`, `.jsonl.gz`, `.jsonl.xz`",
    lambda path, head: path.name.endswith(SUFFIXES), _read_table,
    "every release's", ("median, p20, p80", "seven kinds", "yes", "yes", "yes"), "nothing",
)  # fmt: skip
"""The format of files that no other one recognises, too: its errors name the lines."""

FORMATS: tuple[Format, ...] = (
    kernel_tuner.FORMAT,
    helion.LOG,
    helion.TRACE,
    triton_cache.FORMAT,
    triton_cache.QUACK,
    flaggems.FORMAT,
    inductor.CACHE,
    inductor.METRICS,
    tokamax.FORMAT,
    metaschedule.FORMAT,
    choices.FORMAT,
    TABLE,
)


def format_of(path: Path) -> Format | None:
    """The format of a file, by its first bytes; None for no known one."""
    head = head_text(path)
    return next((each for each in FORMATS if each.is_theirs(path, head)), None)


def read_file(
    path: Path,
    device: Device | str | None = None,
    refuse: Refuse | None = None,
    *,
    form: Format | None = None,
) -> list[Table]:
    """The tables of one file of any format; standard input is always ours.

    `device` says where another tool measured. Raises `RecordError` for a file that is damaged or of no known format;
    a row that breaks a rule is one as well: it is raised or, with `refuse`, handed to that.
    """
    where = device_from_name(device) if isinstance(device, str) else device
    form = form or format_of(path) or TABLE
    return tables_of(form.rows(Reading(path, where, refuse)))
