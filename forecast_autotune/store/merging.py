"""Stores as sets of rows: a folder's rows, union and differences of stores, and what `gc` removes.

Stores are read whole, and added to under the locks that tuners use. No row is lost by `gc`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forecast_autotune.errors import NewerRecordError, RecordError, StoreError
from forecast_autotune.file_access import MAX_RECORD_BYTES, read_regular
from forecast_autotune.records import Decision
from forecast_autotune.store.files import (
    VERSION,
    KernelName,
    StoreNotes,
    acquire_lock,
    append,
    check_folders,
    is_newer,
    list_files,
    list_folders,
    make_store_folder,
    newer_layout_text,
    problem_file,
    release_lock,
    write_atomically,
)
from forecast_autotune.store.log import MAX_LOG_BYTES, is_mark, mark_line, own_log, own_logs
from forecast_autotune.store.rows import DECISION, PROBLEM, KernelRows, Row

LOCK_TIMEOUT_S = 10.0
"""Longest wait for a process that writes."""

GC_REMEDY = "`store gc` removes it"

Complain = Callable[[str], None]
"""Callback for each line that is no row, with a message of one line."""


class RowSource(Protocol):
    """A place that rows can be read from."""

    @property
    def name(self) -> str:
        """Its name for people: a path or an address, without passwords."""
        ...

    def kernels(self) -> list[KernelName]:
        """The kernels that have rows, in order."""
        ...

    def rows(self, kernel: KernelName) -> KernelRows:
        """All rows of a kernel whose problem is known."""
        ...


class RowTarget(RowSource, Protocol):
    """A place that rows can be added to."""

    def add(self, kernel: KernelName, rows: KernelRows) -> int:
        """Add what is not there; returns how many rows changed it. Raises `StoreError` if it cannot."""
        ...


class StoreFolder:
    """The rows of a store on disk, of all hosts that wrote to it.

    Raises `StoreError` where its folders are something else.
    """

    def __init__(self, root: Path, complain: Complain | None = None) -> None:
        check_folders(root)
        self.root = root
        self._complain: Complain = complain or (lambda text: None)
        if message := newer_layout_text(root):
            self._complain(message)
        self._notes = StoreNotes()

    @property
    def name(self) -> str:
        """Its path."""
        return str(self.root)

    def kernels(self) -> list[KernelName]:
        """Device classes and kernels that have a folder, in order."""
        devices = list_folders(self.root / VERSION, self._notes)
        return [(device.name, p.name) for device in devices for p in list_folders(device, self._notes)]

    def folder(self, kernel: KernelName) -> Path:
        """Where a kernel's rows are."""
        return self.root / VERSION / kernel[0] / kernel[1]

    def rows(self, kernel: KernelName) -> KernelRows:
        """All rows of a kernel whose problem is known; the others are complained of."""
        result, strangers = self._rows(kernel).with_problems()
        if strangers:
            self._complain(
                f"{self.folder(kernel)}: {strangers} rows of problems that it does not describe: merge the store "
                "that they come from, or `clear` the kernel"
            )
        return result

    def add(self, kernel: KernelName, rows: KernelRows) -> int:
        """Append what is not there to this host's log; returns how many rows changed the store.

        A decision of a newer release stays, which is complained of. Raises `StoreError` if it cannot be written.
        """
        folder = self.folder(kernel)
        log = own_log(folder)
        try:
            make_store_folder(folder, self.root)
            with locked(log):
                fresh = rows.missing_from(self._rows(kernel))
                for portion in _portions([row.line for row in fresh if row.kind != DECISION]):
                    # The one before may have filled its log, as may another process while this one waited.
                    place = own_log(folder)
                    with contextlib.nullcontext() if place == log else locked(place):
                        append(place, portion, exclusive=True)
                refusals = 0
                for row in (row for row in fresh if row.kind == DECISION):
                    path = folder / "decisions" / f"{problem_file(row.problem)}.json"
                    if is_newer(path):
                        self._complain(f"{path}: kept, a newer release wrote it: upgrade forecast-autotune")
                        refusals += 1
                    else:
                        write_atomically(path, row.line)
        except OSError as error:
            raise StoreError(f"cannot write to {folder}: {error}") from error
        return len(fresh) - refusals

    def _rows(self, kernel: KernelName) -> KernelRows:
        folder, result = self.folder(kernel), KernelRows()
        for path in list_files(folder, "log-*.jsonl", self._notes):
            for row in rows_of_log(path, self._complain):
                self._take(result, row, kernel, path)
        for path in list_files(folder / "decisions", "[!.]*.json", self._notes):
            with contextlib.suppress(FileNotFoundError):
                decision = self._read_decision(path)
                if decision is not None:
                    self._take(result, decision, kernel, path)
        return result

    def _take(self, rows: KernelRows, row: Row, kernel: KernelName, path: Path) -> None:
        if row.kernel not in (None, kernel):
            self._complain(f"{path}: a problem of {row.kernel} is filed under {kernel}: {_remedy(path)}")
            return
        rows.add(row)

    def _read_decision(self, path: Path) -> Row | None:
        try:
            return decision_in(path)
        except FileNotFoundError:
            raise
        except NewerRecordError as error:
            self._complain(f"{path}: {error}"[:300])
        except OSError as error:
            self._complain(f"{path}: {error}"[:300] + ": make it a file that can be read, or remove it")
        except RecordError as error:
            self._complain(f"{path}: {error}"[:300] + f": {GC_REMEDY}")
        return None


def decision_in(path: Path) -> Row:
    """The decision in a file. Raises `RecordError` where there is none, or another problem's, and `OSError`."""
    row = Row.read(read_regular(path))
    if row is None or row.kind != DECISION or path.stem != problem_file(row.problem):
        raise RecordError("it is not the decision that it is named after")
    return row


def _portions(lines: Iterable[bytes]) -> Iterator[bytes]:
    """These lines in portions, each of which leaves a log that was not full within the limit of readers."""
    portion: list[bytes] = []
    size = 0
    for line in lines:
        if portion and size + len(line) > MAX_LOG_BYTES // 4:
            yield b"".join(portion)
            portion, size = [], 0
        portion.append(line)
        size += len(line)
    if portion:
        yield b"".join(portion)


def rows_of_log(path: Path, complain: Complain) -> Iterator[Row]:
    """The rows of a file of JSON lines, in its order; other lines are reported one by one."""
    try:
        data = read_regular(path, MAX_LOG_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        complain(f"{path}: {error}: make it a file that can be read, or remove it")
        return
    for number, raw in _bounded_lines(data, path, complain):
        try:
            row = Row.read(raw)
        except NewerRecordError as error:
            complain(f"{path}:{number}: {error}"[:300])
        except RecordError as error:
            complain(f"{path}:{number}: {error}"[:300] + f": {_remedy(path)}")
        else:
            if row is not None:
                yield row


def _remedy(log: Path) -> str:
    """The command that removes the bad lines of a log."""
    return GC_REMEDY if log in own_logs(log.parent) else f"{GC_REMEDY} on the host that wrote it"


def _bounded_lines(data: bytes, path: Path, complain: Complain) -> list[tuple[int, bytes]]:
    results = []
    for number, raw in enumerate(data.split(b"\n"), 1):
        if len(raw) > MAX_RECORD_BYTES:
            complain(f"{path}:{number}: a line of more than {MAX_RECORD_BYTES} bytes: {_remedy(path)}")
        elif raw.strip():
            results.append((number, raw))
    return results


@contextlib.contextmanager
def locked(log: Path) -> Iterator[None]:
    """Hold the right to write to a log.

    Raises `StoreError` where somebody keeps it for `LOCK_TIMEOUT_S`; where there are no locks at all, goes on.
    """
    try:
        lock = acquire_lock(log.with_name(log.name + ".lock"), LOCK_TIMEOUT_S, 0.002)
    except TimeoutError:
        raise StoreError(
            f"{log}: another process has been writing for {LOCK_TIMEOUT_S:.0f} s: try later"
        ) from None
    try:
        yield
    finally:
        release_lock(lock)


@dataclass
class MergeCounts:
    """The rows that a merge read and added."""

    kernels: int = 0
    rows: int = 0
    added: int = 0


@dataclass(frozen=True)
class KernelDifference:
    """The rows of a kernel that one of two stores has and the other has not."""

    kernel: KernelName
    only_first: int
    """Measurements."""
    only_second: int
    decided_otherwise: tuple[str, ...]
    """Problems that both have decided, differently: winners that tie are no conflict."""
    decided_by_first: int
    """Problems that only the first has decided."""
    decided_by_second: int


def merge(sources: Iterable[RowSource], into: RowTarget) -> MergeCounts:
    """Add all rows of the sources to a store. Merging again, or in another order, changes nothing.

    Raises `StoreError` if a source cannot be read or the store not be written; rows added by then stay.
    """
    counts = MergeCounts()
    for source in sources:
        for kernel in source.kernels():
            rows = source.rows(kernel)
            counts.kernels += 1
            counts.rows += len(rows)
            if len(rows):
                counts.added += into.add(kernel, rows)
    return counts


def differences(first: RowSource, second: RowSource) -> Iterator[KernelDifference]:
    """How two stores differ in measurements and decisions, for each kernel in which they do, in order."""
    first_kernels, second_kernels = set(first.kernels()), set(second.kernels())
    for kernel in sorted(first_kernels | second_kernels):
        a = first.rows(kernel) if kernel in first_kernels else KernelRows()
        b = second.rows(kernel) if kernel in second_kernels else KernelRows()
        both = a.decisions.keys() & b.decisions.keys()
        difference = KernelDifference(
            kernel,
            len(a.measurements.keys() - b.measurements.keys()),
            len(b.measurements.keys() - a.measurements.keys()),
            tuple(sorted(i for i in both if _differ(a.decisions[i], b.decisions[i]))),
            len(a.decisions.keys() - both),
            len(b.decisions.keys() - both),
        )
        if any((difference.only_first, difference.only_second, difference.decided_otherwise)) or both != (
            a.decisions.keys() | b.decisions.keys()
        ):
            yield difference


def _differ(a: Row, b: Row) -> bool:
    if a.digest == b.digest:
        return False
    return not Decision.from_json(a.data).agrees_with(Decision.from_json(b.data))


PART_AGE_S = 86400.0
"""A write that began so long ago and was never finished is never finished."""


@dataclass
class CompactionCounts:
    """The lines, files and bytes that were removed."""

    lines: int = 0
    """Repeated lines of logs, and those that are no records."""
    decisions: int = 0
    """Files that hold no decision, or another problem's."""
    parts: int = 0
    """Files that killed writers left."""
    bytes: int = 0
    newer: int = 0
    """Lines that only a newer release can read: kept as they are."""


def compact(store: StoreFolder, now: float | None = None) -> CompactionCounts:
    """Remove repeated and damaged lines of this host's logs, damaged decisions, and what killed writers left.

    Logs of other hosts are theirs: their locks may not be seen from here. Entries of newer releases are kept. Doing
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
        rows, newer = _counted_rows(lines, kernel)
        counts.newer += len(newer)
        excess = len(lines) - len(rows) - len(newer) - sum(map(is_mark, lines[:1]))
        if excess <= 0:
            return
        # Problems first: a measurement whose problem follows it would be no trouble, but be safe.
        rows.sort(key=lambda row: row.kind != PROBLEM)
        after = mark_line("compacted") + b"".join(
            [*(row.line for row in rows), *(raw + b"\n" for raw in newer)]
        )
        write_atomically(log, after)
        counts.lines += excess
        counts.bytes += max(0, len(before) - len(after))


def _counted_rows(lines: Iterable[bytes], kernel: KernelName) -> tuple[list[Row], list[bytes]]:
    """The rows that readers count, in their order, and the lines of newer releases or unknown types, each once."""
    rows, results, newer = KernelRows(), list[Row](), dict[bytes, None]()
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
            results.append(row)
    return [row for row in results if row.kind != PROBLEM or rows.problems[row.problem] is row], list(newer)


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
