"""What ranks need of a job's key-value store, and a store of that kind in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from forecast_autotune.errors import ForecastAutotuneError


class JobStoreLostError(ForecastAutotuneError):
    """The job's store does not answer, or not in time: from here on a rank is on its own."""


class KeyValueStore(Protocol):
    """Texts by key, shared by the processes of a job. None of its methods waits for another process."""

    def get(self, key: str) -> str | None:
        """What the key holds; None where it holds nothing."""
        ...

    def set(self, key: str, value: str) -> None:
        """Write, whatever the key holds."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Write `desired` if the key holds `expected`, or nothing where that is ""; returns what it holds then."""
        ...


class JobStore(KeyValueStore, Protocol):
    """A key-value store that also tells others that this process lives. Raises `JobStoreLostError` only."""

    def beating(self, key: str) -> AbstractContextManager[None]:
        """While entered, what `key` holds changes every `JobLimits.beat_s` seconds if this process lives."""
        ...


class MemoryKeyValueStore:
    """A key-value store of one process, for tests and simulations."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._mutex = threading.Lock()

    def get(self, key: str) -> str | None:
        """What the key holds; None where it holds nothing."""
        with self._mutex:
            return self._values.get(key)

    def set(self, key: str, value: str) -> None:
        """Write, whatever the key holds."""
        with self._mutex:
            self._values[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Write `desired` if the key holds `expected`, or nothing where that is ""; returns what it holds then."""
        with self._mutex:
            if self._values.get(key, "") == expected:
                self._values[key] = desired
            return self._values.get(key, expected)

    @contextmanager
    def beating(self, key: str) -> Iterator[None]:
        """Nobody watches a process that has the store to itself."""
        yield
