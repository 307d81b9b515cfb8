"""Advice on disk: one JSON file per kernel source, `advice/<source hash>.json` below the root.

A file is replaced whole, so a kill leaves the old one or the new one. Reading executes nothing: a cost function
is data, and is only ever evaluated by `forecast_autotune.llm.advice`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from forecast_autotune.errors import RecordError
from forecast_autotune.llm.advice.record import Advice
from forecast_autotune.records import Problem
from forecast_autotune.store.files import (
    ADVICE,
    StoreNotes,
    encode,
    list_files,
    make_store_folder,
    problem_file,
    read_record,
    remove_file,
    write_atomically,
)


class AdviceFiles:
    """The advice of a store. `root` None: memory only."""

    def __init__(self, root: Path | None, notes: StoreNotes) -> None:
        self._path = None if root is None else root / ADVICE
        self._notes = notes
        self._in_memory: dict[str, Advice] = {}
        """Advice that is not on disk, by source hash."""

    def of(self, source_sha256: str) -> Advice | None:
        """The advice on one source. A damaged file is noted and skipped."""
        if (result := self._in_memory.get(source_sha256)) is not None or self._path is None:
            return result
        return self._read(self._file(self._path, source_sha256))

    def every(self) -> list[Advice]:
        """All advice, by kernel and source."""
        results = {a.source_sha256: a for a in self._listed()} | self._in_memory
        return sorted(results.values(), key=lambda a: (a.kernel, a.source_sha256))

    def put(self, advice: Advice) -> None:
        """Store advice in place of earlier advice on its source; in memory, with a note, if the disk refuses."""
        payload = encode(advice.to_json())
        if self._path is None:
            self._in_memory[advice.source_sha256] = advice
            return
        path = self._file(self._path, advice.source_sha256)
        try:
            make_store_folder(path.parent, self._path.parent)
            write_atomically(path, payload)
            self._in_memory.pop(advice.source_sha256, None)
        except OSError as error:
            self._in_memory[advice.source_sha256] = advice
            self._notes.add(
                f"advice cannot be written to {path.parent} ({error}); it stays in memory only: free "
                "space there, or point FORECAST_AUTOTUNE_CACHE_DIR at a writable directory",
                topic="unsaved advice",
            )

    def clear(self, some: Iterable[Advice]) -> int:
        """Remove these; returns how many. Raises `StoreError` if a file cannot be removed."""
        count = 0
        for advice in some:
            existed = self._in_memory.pop(advice.source_sha256, None) is not None
            if self._path is not None:
                existed = remove_file(self._file(self._path, advice.source_sha256)) or existed
            count += existed
        return count

    @staticmethod
    def _file(path: Path, source_sha256: str) -> Path:
        return path / f"{problem_file(source_sha256)}.json"

    def _listed(self) -> Iterator[Advice]:
        if self._path is None:
            return
        for path in list_files(self._path, "[!.]*.json", self._notes):
            if (advice := self._read(path)) is not None:
                yield advice

    def _read(self, path: Path) -> Advice | None:
        advice = read_record(path, Advice.from_json, "no advice", self._notes)
        if advice is None:
            return None
        if path != self._file(path.parent, advice.source_sha256):
            self._notes.add(f"{path}: ignored, it is not filed under its own source")
            return None
        return advice


def advice_in(problem: Problem, notes: StoreNotes) -> Advice | None:
    """The advice that a problem's record carries, if it is advice on its kernel; noted where it is not."""
    try:
        advice = Advice.from_json(problem.extra.get(ADVICE))
        advice.functions  # noqa: B018 - raises for a text that is no cost function
    except RecordError as error:
        notes.add(f"advice on {problem.kernel.name} was not imported: {error}"[:300])
        return None
    if advice.source_sha256 != problem.kernel.source_sha256:
        notes.add(f"advice on {problem.kernel.name} was not imported: it is on another source")
        return None
    return advice
