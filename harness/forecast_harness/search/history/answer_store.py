"""Answers that were paid for, one file each, written before anything else is done with them.

A kill between an answer and its line in the log loses nothing: the resumed search finds the file. The file
appears whole, by a rename, as soon as the answer is there: what is only in a process's memory dies with it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, StoreError
from forecast_autotune.records.json_fields import decode_json
from forecast_autotune.store.files import flush_to_disk, write_atomically
from forecast_harness.search.history.events import Event, from_json
from forecast_harness.search.history.log import decode, encode

ANSWERS_FOLDER = "answers"


class AnswerStore:
    """The answers below a search's folder, by the key of what was asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / ANSWERS_FOLDER
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self._folder} cannot be made: {error}; name a folder that can be") from error

    def store(self, key: str, answer: Event) -> None:
        """Write an answer down, on the disk when this returns.

        Raises `RecordError` for values that JSON cannot hold or that break a rule of the event, `StoreError`
        where the disk refuses.
        """
        path = self._path(key)
        raw = encode(answer)
        try:
            # Named first, flushed and checked then: from the rename on no kill can lose it.
            write_atomically(path, raw)
            flush_to_disk(path)
        except OSError as error:
            raise StoreError(
                f"{path} cannot be written ({error}), so its answer would be paid for again: free space or "
                "make the folder writable, then start the search again"
            ) from error
        try:
            decode(raw)
        except RecordError:
            path.unlink(missing_ok=True)
            raise

    def load(self, key: str) -> Event | None:
        """The answer, if there is one. What a power cut left unreadable counts as none."""
        try:
            data: Any = decode_json(self._path(key).read_text(encoding="utf-8"))
            return from_json(data)
        except (FileNotFoundError, ValueError, TypeError, RecursionError):
            return None

    def _path(self, key: str) -> Path:
        if os.sep in key or key.startswith("."):
            raise RecordError(f"{key!r} cannot name a file: an id made by `decide` can")
        return self._folder / f"{key}.json"
