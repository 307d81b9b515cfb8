"""Lines that a process prints, with their times."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable


class TimedLines:
    """The lines of a process' stream, each with the seconds at which it came.

    A thread of its own reads them, so that the process never waits for whoever listens.
    """

    def __init__(self, stream: Iterable[str] | None) -> None:
        """Seconds count from here: make one right after the process is started."""
        self._began = time.perf_counter()
        self._lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, args=(stream or (),))
        self._reader.start()

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    def all(self) -> list[tuple[float, str]]:
        """Every line, once the process has closed its end."""
        self._reader.join()
        return self._lines

    def _read(self, stream: Iterable[str]) -> None:
        for line in stream:
            self._lines.append((self.seconds, line.rstrip()))
