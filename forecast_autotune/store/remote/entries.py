"""What a remote store's entries are called, and what their rows must be."""

from __future__ import annotations

from forecast_autotune.errors import RecordError
from forecast_autotune.store.files import KernelName, problem_file
from forecast_autotune.store.merging.rows import KernelRows, Row

VARIABLE = "FORECAST_AUTOTUNE_REMOTE"
"""Of the environment: the address of the remote store."""

Entry = tuple[str, str, str]
"""Folder of the device class, folder of the kernel, file name of the problem."""


def entry_of(kernel: KernelName, problem_id: str) -> Entry:
    """Where the rows of a problem are."""
    return (*kernel, problem_file(problem_id))


def sound_rows(lines: list[bytes], problem_id: str | None = None) -> KernelRows:
    """The rows in an entry, each checked as a record. Raises `RecordError` for a line that is none.

    With `problem_id`, also for one of another problem.
    """
    found = KernelRows()
    for line in lines:
        row = Row.read(line)
        if row is None or problem_id not in (None, row.problem):
            raise RecordError("a row that does not belong there")
        found.add(row)
    return found
