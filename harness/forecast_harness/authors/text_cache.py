"""Texts of language models kept on disk by what was asked: a question that was paid for is not asked again.

One JSON file per question and model. The question holds the request's id, so that another request for the
same parent gets texts of its own. An error is never kept; fewer texts than were asked for are, and only the
others are asked for the next time.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forecast_autotune.records import digest
from forecast_autotune.records.json_fields import decode_json, read_integer, read_number
from forecast_autotune.store.files import write_atomically
from forecast_harness.records import SearchCost

SCHEMA = 1
MAX_CACHE_BYTES = 256 * 2**20
"""Most bytes of kept texts; those written longest ago go first."""
MAX_FILE_BYTES = 32 * 2**20
_EVICT_EVERY = 64


@dataclass(frozen=True)
class GeneratedTexts:
    """What a model wrote, and what that cost when it was asked."""

    texts: tuple[str, ...] = field(default=(), repr=False)
    spent: SearchCost = SearchCost()


class TextCache:
    """Texts below a directory, which is made when first written to. Trouble with it costs no text."""

    def __init__(self, directory: Path, model: str, *, limit_bytes: int = MAX_CACHE_BYTES) -> None:
        self._directory = directory
        self._model = model
        self._limit = limit_bytes
        self._written = 0
        self._warned = False

    def read(self, *question: str) -> GeneratedTexts:
        """What is kept for a question; nothing where a file is missing, damaged or of another kind."""
        path = self._path(question)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                return GeneratedTexts()
            data = decode_json(path.read_text(encoding="utf-8"))
            if data["schema"] != SCHEMA or not all(isinstance(t, str) for t in data["texts"]):
                return GeneratedTexts()
            tokens, money = read_integer(data["tokens"], "tokens"), read_number(data["money"], "money") or 0.0
            return GeneratedTexts(tuple(data["texts"]), SearchCost(tokens=tokens, money=money))
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return GeneratedTexts()

    def write(self, found: GeneratedTexts, *question: str) -> None:
        """Keep texts for a question, in place of what was kept for it."""
        told = {"tokens": found.spent.tokens, "money": found.spent.money}
        data = {"schema": SCHEMA, "model": self._model, "texts": list(found.texts), **told}
        try:
            # Models write lone surrogates now and then; escaped they are plain ASCII.
            write_atomically(self._path(question), json.dumps(data, allow_nan=False).encode("ascii"))
            self._written += 1
            if self._written % _EVICT_EVERY == 1:
                self._evict()
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"texts of {self._model} cannot be kept below {self._directory} ({error}): free space "
                    "there, or point FORECAST_AUTOTUNE_CACHE_DIR at a writable directory",
                    UserWarning,
                    stacklevel=3,
                )

    def _path(self, question: Sequence[str]) -> Path:
        return self._directory / f"{digest(SCHEMA, self._model, list(question))}.json"

    def _evict(self) -> None:
        found = []
        for path in self._directory.glob("*.json"):
            with contextlib.suppress(OSError):  # another process sweeps, too
                state = path.stat()
                found.append((state.st_mtime, state.st_size, path))
        size = sum(entry[1] for entry in found)
        for _, freed, path in sorted(found):
            if size <= self._limit:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                size -= freed
