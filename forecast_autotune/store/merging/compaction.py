"""`gc`: what a store can do without. No row is lost by it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from forecast_autotune.errors import StoreError
from forecast_autotune.file_access import read_regular
from forecast_autotune.store.files import KernelName, write_atomically
from forecast_autotune.store.log import MAX_LOG_BYTES, is_mark, mark_line, own_logs
from forecast_autotune.store.merging.row_stores import StoreFolder, locked, rows_in
from forecast_autotune.store.merging.rows import DECISION, KernelRows, Row

PART_AGE_S = 86400.0
"""A write that began so long ago and was never finished is never finished."""


@dataclass
class CompactionCounts:
    """What was removed."""

    lines: int = 0
    """Of logs: repeated ones, and those that are no records."""
    parts: int = 0
    """Files that killed writers left."""
    bytes: int = 0

    def to_json(self) -> dict[str, int]:
        """As JSON has it."""
        return dict(vars(self))


def compact(store: StoreFolder, now: float | None = None) -> CompactionCounts:
    """Remove repeated and damaged lines of this host's logs, and what killed writers left.

    Logs of other hosts are theirs: their locks may not be seen from here. Doing it again removes nothing, and
    the rows before and after are the same. Raises `StoreError` if a file cannot be written.
    """
    counts = CompactionCounts()
    for kernel in store.kernels():
        try:
            for log in own_logs(store.folder(kernel)):
                _compact_log(log, kernel, counts)
            _remove_parts(store.folder(kernel), time.time() if now is None else now, counts)
        except OSError as error:
            raise StoreError(f"cannot tidy {store.folder(kernel)}: {error}") from error
    return counts


def _compact_log(log: Path, kernel: KernelName, counts: CompactionCounts) -> None:
    with locked(log):
        before = read_regular(log, MAX_LOG_BYTES)
        rows, kept = KernelRows(), list[Row]()
        for row in rows_in(before, log, lambda text: None):
            # A fuller record of a problem replaces one that was read before it.
            if row.kind != DECISION and row.kernel in (None, kernel) and rows.add(row):
                kept.append(row)
        kept = [row for row in kept if row.kind != "problem" or rows.problems[row.problem] is row]
        lines = [raw for raw in before.split(b"\n") if raw.strip()]
        removed = len(lines) - len(kept) - sum(map(is_mark, lines[:1]))
        if removed <= 0:
            return
        # Problems first: a measurement whose problem follows it would be no trouble, but be safe.
        kept.sort(key=lambda row: row.kind != "problem")
        after = mark_line("compacted") + b"".join(row.line for row in kept)
        write_atomically(log, after)
        counts.lines += removed
        counts.bytes += max(0, len(before) - len(after))


def _remove_parts(folder: Path, now: float, counts: CompactionCounts) -> None:
    for path in folder.rglob(".*.part"):
        try:
            stat = path.stat()
            if now - stat.st_mtime > PART_AGE_S:
                path.unlink()
                counts.parts += 1
                counts.bytes += stat.st_size
        except FileNotFoundError:
            continue
