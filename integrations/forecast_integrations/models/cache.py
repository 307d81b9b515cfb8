"""Answers kept on disk by what was asked: the same question to the same model is asked once.

One JSON file per prefix, with a row per suffix. Nothing is executed by reading one, a damaged one counts as
absent, and only rows that were answered are written: an error, or a candidate that got no answer, is asked
again next time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError, Usage
from forecast_autotune.llm.bins import AnswerLabel
from forecast_autotune.records import digest
from forecast_autotune.store.answer_files import AnswerFiles

Array = npt.NDArray[np.float64]
CachedRows = dict[str, tuple[list[float], float]]
"""Probabilities and mass by the suffix's hash."""

SCHEMA = 1
MAX_CACHE_BYTES = 64 * 2**20
"""Most bytes of kept answers; those not written to for longest go first."""
MAX_FILE_BYTES = 8 * 2**20
"""A file beyond this is not ours."""


class CachingBackend(Backend):
    """A backend whose answers are kept below a directory. Safe to share between threads and processes.

    Args:
        inner: who is asked what is not known.
        directory: created when first written to; trouble with it is warned of once, and costs no answer.
        salt: what an answer depends on beside the identity of `inner`: the server's address.
        limit_bytes: most bytes kept below the directory.
    """

    def __init__(
        self, inner: Backend, directory: Path, *, salt: str = "", limit_bytes: int = MAX_CACHE_BYTES
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self._salt = salt
        self._files = AnswerFiles(
            directory, f"answers of {self.name}", limit_bytes=limit_bytes, most_file_bytes=MAX_FILE_BYTES
        )
        self._mutex = threading.Lock()

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """See `Backend`. Where a part is known and asking for the rest fails, the part is the answer."""
        path = self._path(prefix, labels)
        known = self._read(path, len(labels))
        keys = [digest(suffix) for suffix in suffixes]
        unknown = [index for index, key in enumerate(keys) if key not in known]
        usage = Usage()
        trouble: tuple[str, ...] = ()
        if unknown:
            try:
                answer = self.inner.forecast(
                    prefix, [suffixes[i] for i in unknown], labels, timeout_s=timeout_s
                )
            except LLMError as error:
                if len(unknown) == len(keys):
                    raise
                trouble = (str(error),)
            else:
                usage, trouble = answer.usage, answer.trouble
                fresh = _cacheable_rows(answer, [keys[i] for i in unknown])
                known |= fresh
                if fresh:
                    self._write(path, fresh, len(labels))
        return _response(known, keys, len(labels), usage, trouble)

    def identity(self) -> str:
        """See `Backend`."""
        return self.inner.identity()

    def ready(self) -> bool:
        """See `Backend`."""
        return self.inner.ready()

    def prepare(self) -> None:
        """See `Backend`."""
        self.inner.prepare()

    def close(self) -> None:
        """See `Backend`. Kept answers stay."""
        self.inner.close()

    def _path(self, prefix: str, labels: Sequence[AnswerLabel]) -> Path:
        meanings = [[label.token, label.meaning] for label in labels]
        return self._files.directory / f"{digest(SCHEMA, self.identity(), self._salt, meanings, prefix)}.json"

    def _read(self, path: Path, labels: int) -> CachedRows:
        """Rows of a file; none if it is absent, damaged, or not of this kind."""
        try:
            data = self._files.read(path)
            if data["schema"] != SCHEMA:
                return {}
            return {
                str(key): one for key, value in data["rows"].items() if (one := _parse_row(value, labels))
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
            return {}

    def _write(self, path: Path, fresh: CachedRows, labels: int) -> None:
        with self._mutex:
            # Another thread or process may have added rows; a row lost in between is only asked again.
            everything = self._read(path, labels) | fresh
            self._files.write(path, {"schema": SCHEMA, "model": self.name, "rows": everything})


_NO_USAGE = Usage()


def _response(
    known: CachedRows,
    keys: Sequence[str],
    labels: int,
    usage: Usage = _NO_USAGE,
    trouble: tuple[str, ...] = (),
) -> BackendResponse:
    """Rows in the order of the keys, zeros where one is not known."""
    probabilities, mass = np.zeros((len(keys), labels)), np.zeros(len(keys))
    for index, key in enumerate(keys):
        if key in known:
            probabilities[index], mass[index] = known[key]
    return BackendResponse(probabilities, mass, usage, trouble)


def _cacheable_rows(answer: BackendResponse, keys: Sequence[str]) -> CachedRows:
    """Rows of an answer that may be kept: distributions, with a mass."""
    sums = np.abs(answer.probabilities.sum(axis=1) - 1.0) < 1e-6
    fine = sums & (answer.probabilities >= 0).all(axis=1) & np.isfinite(answer.mass)
    return {
        key: ([float(p) for p in answer.probabilities[i]], float(answer.mass[i]))
        for i, key in enumerate(keys)
        if fine[i]
    }


def _parse_row(value: Any, labels: int) -> tuple[list[float], float] | None:
    probabilities, mass = [float(p) for p in value[0]], float(value[1])
    fine = len(probabilities) == labels and all(p >= 0.0 for p in probabilities) and math.isfinite(mass)
    return (probabilities, mass) if fine and abs(math.fsum(probabilities) - 1.0) < 1e-6 else None
