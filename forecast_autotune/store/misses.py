"""Notes of a program for a later `warm`, a file of JSON lines each: keys met where nothing could be measured, say."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from forecast_autotune.errors import NewerRecordError, RecordError, StoreError
from forecast_autotune.file_access import MAX_RECORD_BYTES, read_regular
from forecast_autotune.records import Candidate, Problem
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.compilation import Compilation
from forecast_autotune.records.json_fields import MALFORMED, SCHEMA, read_list, read_text
from forecast_autotune.records.problem import OPTIONS
from forecast_autotune.store.files import (
    StoreNotes,
    acquire_lock,
    append,
    decode,
    encode,
    make_store_folder,
    release_lock,
    write_atomically,
)

MAX_RECORDS = 4096
MAX_GRIDS = 512
"""The most grids of one miss: a kernel's grid depends on few of its meta-parameters."""

Grids = tuple[tuple[Mapping[str, Any], tuple[int, ...]], ...]
"""Launch grids by meta-parameters."""


def _read_grids(value: object) -> Grids:
    results = []
    for pair in read_list(value, ""):
        parameters, grid = read_list(pair, "[...]")
        if not isinstance(parameters, Mapping):
            raise RecordError(" must hold pairs of an object and a list")
        numbers = read_list(grid, "[...]")
        if not 1 <= len(numbers) <= 3 or not all(type(n) is int and n > 0 for n in numbers):
            raise RecordError(f" must hold grids of one to three positive integers, not {grid!r:.60}")
        results.append((dict(parameters), tuple(numbers)))
    return tuple(results)


@dataclass(frozen=True)
class Miss(Record, tag="miss", schema=SCHEMA, lenient=True):
    """A problem of a launch without a decision, with the data to make a call of its kernel again."""

    problem: Problem
    """Without source and IR."""
    mode: str = field(metadata=json_option(read=read_text))
    """The mode of the program that met it."""
    candidates: int
    grids: Grids = field(
        default=(),
        metadata=json_option(read=_read_grids, write=lambda grids: [[dict(p), list(g)] for p, g in grids]),
    )
    """Empty where the problem has one grid for all."""
    at: str = ""

    @property
    def id(self) -> str:
        """The problem's."""
        return self.problem.id

    @classmethod
    def of(
        cls,
        problem: Problem,
        mode: str,
        candidates: int,
        grids: Mapping[Candidate, tuple[int, ...]],
        at: str,
    ) -> Miss:
        """The record of a problem met in this mode with so many candidates."""
        launches: dict[str, tuple[Mapping[str, Any], tuple[int, ...]]] = {}
        for candidate, grid in grids.items():
            parameters = dict(candidate.config.kwargs)
            if len(launches) < MAX_GRIDS:
                launches.setdefault(json.dumps(parameters, sort_keys=True), (parameters, tuple(grid)))
        kernel = replace(problem.kernel, source="")
        options = {name: value for name, value in problem.extra.items() if name == OPTIONS}
        bare = replace(problem, kernel=kernel, ttir={}, extra=options)
        return cls(bare, mode, candidates, () if problem.grid else tuple(launches.values()), at)


R = TypeVar("R", bound=Miss | Compilation)


class RecordFile(Generic[R]):
    """The misses, or compilations, of one store. Nothing that goes wrong with the file is raised to a program.

    Args:
        root: the store's folder; None keeps them in memory.
        notes: is told of what is wrong.
        name: the file's name.
        read: makes a record of its JSON. Raises `RecordError`.
    """

    def __init__(self, root: Path | None, notes: StoreNotes, name: str, read: Callable[[Any], R]) -> None:
        self.path = None if root is None else root / name
        self._notes, self._name, self._reader = notes, name, read
        self._mutex = threading.Lock()
        self._records: dict[str, R] = {}
        self._newer: list[bytes] = []
        """Lines of newer releases in the file when it was last read."""
        self._state: tuple[int, int, int] | None = None
        """The file's state when `_records` was all that it holds: inode, bytes, nanoseconds of its last change."""

    def forget(self) -> None:
        """Drop data that can be read again; a forked child calls this, as the fork may have interrupted a change."""
        self._mutex = threading.Lock()
        self._state = None

    def add(self, record: R) -> bool:
        """Store a record that is new; whether it was stored."""
        with self._mutex:
            if record.id in self._records:
                return False
            if self.path is None:
                return self._keep(record)
            lock = None
            try:
                make_store_folder(self.path.parent, self.path.parent)
                lock = acquire_lock(self.path.with_name(self._name + ".lock"), 1.0, 0.002)
                self._records = self._load()
                if record.id in self._records or not self._keep(record):
                    return False
                append(self.path, encode(record.to_json()), exclusive=lock is not None)
                # Without a lock, others may have appended meanwhile.
                self._state = None if lock is None else self._file_state()
                return True
            except (OSError, RecordError) as error:
                self._notes.add(f"{self.path}: a record is not kept: {error}", topic=str(self.path))
                return False
            finally:
                release_lock(lock)

    def _keep(self, record: R) -> bool:
        if len(self._records) >= MAX_RECORDS:
            self._notes.add(
                f"{self.path or 'memory'} holds {MAX_RECORDS} records, no more are kept: `forecast-autotune warm` "
                "works them off",
                topic=self._name,
            )
            return False
        self._records[record.id] = record
        return True

    def all(self) -> list[R]:
        """Every recorded record, oldest first. Lines that are none are noted and left out."""
        with self._mutex:
            if self.path is not None:
                try:
                    self._records = self._load()
                except OSError as error:
                    self._notes.add(f"{self.path}: cannot be read: {error}", topic=str(self.path))
            return list(self._records.values())

    def remove(self, ids: Iterable[str]) -> None:
        """Forget misses that were tuned. Raises `StoreError` if the file cannot be written."""
        out = set(ids)
        with self._mutex:
            if self.path is None:
                self._records = {name: record for name, record in self._records.items() if name not in out}
                return
            lock = None
            try:
                make_store_folder(self.path.parent, self.path.parent)
                lock = acquire_lock(self.path.with_name(self._name + ".lock"), 10.0, 0.002)
                records = {name: record for name, record in self._load().items() if name not in out}
                lines = [encode(record.to_json()) for record in records.values()]
                write_atomically(self.path, b"".join([*lines, *self._newer]))
                self._records, self._state = records, None
            except OSError as error:
                raise StoreError(f"cannot write {self.path}: {error}") from error
            finally:
                release_lock(lock)

    def _load(self) -> dict[str, R]:
        """The misses on file, which is read if it has changed. Raises `OSError`."""
        assert self.path is not None
        try:
            state = self._file_state()  # before it is read: what is added meanwhile is read the next time
            if state == self._state:
                return dict(self._records)
            data = read_regular(self.path, MAX_RECORD_BYTES)
        except FileNotFoundError:
            self._state, self._newer = None, []
            return {}
        self._state, self._newer = state, []
        results: dict[str, R] = {}
        for number, raw in enumerate(data.split(b"\n"), 1):
            if not raw.strip():
                continue
            try:
                record = self._reader(decode(raw))
            except MALFORMED as error:
                if isinstance(error, NewerRecordError):
                    self._newer.append(raw + b"\n")
                message = f"{self.path}:{number}: skipped a line that is no record ({error})"
                self._notes.add(message[:300], topic=str(self.path))
            else:
                results.setdefault(record.id, record)
        return results

    def _file_state(self) -> tuple[int, int, int]:
        assert self.path is not None
        state = self.path.stat()
        return state.st_ino, state.st_size, state.st_mtime_ns
