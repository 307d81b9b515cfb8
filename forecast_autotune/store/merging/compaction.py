"""`gc`: what a store can do without. No row is lost by it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forecast_autotune.errors import NewerRecordError, RecordError, StoreError
from forecast_autotune.file_access import MAX_RECORD_BYTES, read_regular
from forecast_autotune.store.files import KernelName, write_atomically
from forecast_autotune.store.log import MAX_LOG_BYTES, is_mark, mark_line, own_logs
from forecast_autotune.store.merging.row_stores import StoreFolder, decision_in, locked
from forecast_autotune.store.merging.rows import DECISION, PROBLEM, KernelRows, Row

PART_AGE_S = 86400.0
"""A write that began so long ago and was never finished is never finished."""


@dataclass
class CompactionCounts:
    """What was removed."""

    lines: int = 0
    """Of logs: repeated ones, and those that are no records."""
    decisions: int = 0
    """Files that hold no decision, or another problem's."""
    parts: int = 0
    """Files that killed writers left."""
    bytes: int = 0
    newer: int = 0
    """Lines that only a newer release can read: kept as they are."""

    def to_json(self) -> dict[str, int]:
        """As JSON has it."""
        return dict(vars(self))


def compact(store: StoreFolder, now: float | None = None) -> CompactionCounts:
    """Remove repeated and damaged lines of this host's logs, damaged decisions, and what killed writers left.

    Logs of other hosts are theirs: their locks may not be seen from here. What newer releases wrote is kept. Doing
    it again removes nothing, and the rows before and after are the same. Raises `StoreError` if a file cannot be
    written.
    """
    counts = CompactionCounts()
    for kernel in store.kernels():
        try:
            for log in own_logs(store.folder(kernel)):
                _compact_log(log, kernel, counts)
            _remove_damaged_decisions(store.folder(kernel) / "decisions", counts)
            _remove_parts(store.folder(kernel), time.time() if now is None else now, counts)
        except OSError as error:
            raise StoreError(f"cannot tidy {store.folder(kernel)}: {error}") from error
    return counts


def _compact_log(log: Path, kernel: KernelName, counts: CompactionCounts) -> None:
    with locked(log):
        before = read_regular(log, MAX_LOG_BYTES)
        lines = [raw for raw in before.split(b"\n") if raw.strip()]
        kept, newer = _counted_rows(lines, kernel)
        counts.newer += len(newer)
        removed = len(lines) - len(kept) - len(newer) - sum(map(is_mark, lines[:1]))
        if removed <= 0:
            return
        # Problems first: a measurement whose problem follows it would be no trouble, but be safe.
        kept.sort(key=lambda row: row.kind != PROBLEM)
        after = mark_line("compacted") + b"".join(
            [*(row.line for row in kept), *(raw + b"\n" for raw in newer)]
        )
        write_atomically(log, after)
        counts.lines += removed
        counts.bytes += max(0, len(before) - len(after))


def _counted_rows(lines: Iterable[bytes], kernel: KernelName) -> tuple[list[Row], list[bytes]]:
    """The rows that readers count, in their order, and the lines of newer releases or unknown types, each once."""
    rows, kept, newer = KernelRows(), list[Row](), dict[bytes, None]()
    for raw in lines:
        if len(raw) > MAX_RECORD_BYTES or is_mark(raw):
            continue
        try:
            row = Row.read(raw)
        except NewerRecordError:
            row = None
        except RecordError:
            continue
        if row is None:
            newer[raw] = None
        # A fuller record of a problem replaces one that was read before it.
        elif row.kind != DECISION and row.kernel in (None, kernel) and rows.add(row):
            kept.append(row)
    return [row for row in kept if row.kind != PROBLEM or rows.problems[row.problem] is row], list(newer)


def _remove_damaged_decisions(folder: Path, counts: CompactionCounts) -> None:
    for path in folder.glob("[!.]*.json"):
        try:
            decision_in(path)
        except (NewerRecordError, OSError):
            continue
        except RecordError:
            counts.bytes += path.stat().st_size
            counts.decisions += 1
            path.unlink()


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
