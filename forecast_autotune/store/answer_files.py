"""Folders in which answers of language models are kept: bounded, and no trouble with one costs an answer."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forecast_autotune.file_access import space_remedy
from forecast_autotune.records.json_fields import decode_json
from forecast_autotune.store.files import write_atomically

WRITES_PER_SWEEP = 64
"""Files written between two looks at how much is kept."""
_KEPT_SHARE = 0.75
"""The share of the limit that is left once files were removed."""


class AnswerFiles:
    """JSON files below a directory, which is made when first written to."""

    def __init__(self, directory: Path, what: str, *, limit_bytes: int, most_file_bytes: int) -> None:
        """`what` is kept, for a warning. Files written to longest ago go first; one that is larger is not ours."""
        self.directory = directory
        self._what, self._limit, self._most_file = what, limit_bytes, most_file_bytes
        self._write_count = 0
        self._warned = False

    def read(self, path: Path) -> Any:
        """The contents of a file. Raises `OSError` and `ValueError`, also for one that nests too deeply."""
        if path.stat().st_size > self._most_file:
            raise ValueError(f"{path} is too large")
        try:
            return decode_json(path.read_text(encoding="utf-8"))
        except RecursionError as error:
            raise ValueError(f"{path} nests too deeply") from error

    def write(self, path: Path, data: Mapping[str, Any]) -> None:
        """Put `data` in the place of what a file held."""
        try:
            # Models write lone surrogates now and then; escaped they are plain ASCII.
            write_atomically(path, json.dumps(data, allow_nan=False).encode("ascii"))
            self._write_count += 1
            if self._write_count % WRITES_PER_SWEEP == 1:
                self._sweep()
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"{self._what} cannot be kept below {self.directory} ({error}): {space_remedy(error)}",
                    UserWarning,
                    stacklevel=4,
                )

    def _sweep(self) -> None:
        entries = []
        for path in self.directory.glob("*.json"):
            with contextlib.suppress(OSError):  # another process sweeps, too
                state = path.stat()
                entries.append((state.st_mtime, state.st_size, path))
        size = sum(entry[1] for entry in entries)
        if size <= self._limit:
            return
        for _, nbytes, path in sorted(entries):
            with contextlib.suppress(OSError):
                path.unlink()
                size -= nbytes
            if size <= _KEPT_SHARE * self._limit:
                return
