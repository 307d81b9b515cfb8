"""Threads that compile candidates, best first, for a measurer that takes what is done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forecast_autotune.records import Candidate


@dataclass(frozen=True)
class Compiled:
    """What became of one compilation."""

    candidate: Candidate
    result: Any = None
    error: Exception | None = None
    seconds: float = 0.0


class CompilingThreads:
    """Compiles every candidate at most once. A compilation that has begun is never given up: threads cannot be."""

    def __init__(self, build: Callable[[Candidate], Any], workers: int) -> None:
        self._build, self._workers = build, max(1, workers)
        self._changed = threading.Condition()
        self._queue: list[Candidate] = []
        self._begun: dict[Candidate, float] = {}
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False
        self.done: dict[Candidate, Compiled] = {}

    def schedule(self, candidates: Sequence[Candidate]) -> None:
        """Compile these next, in this order, in place of whatever has not begun."""
        with self._changed:
            self._queue = [
                c for c in dict.fromkeys(candidates) if c not in self.done and c not in self._begun
            ]
            for _ in range(min(len(self._queue) - self._idle, self._workers - len(self._threads))):
                self._threads.append(threading.Thread(target=self._work, name="compile", daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()

    def running(self) -> Mapping[Candidate, float]:
        """What compiles now, with its seconds so far."""
        with self._changed:
            now = time.perf_counter()
            return {c: now - begin for c, begin in self._begun.items()}

    def wait(self, enough: Callable[[Collection[Candidate]], bool], within_s: float | None = None) -> bool:
        """Wait until `enough(what is not done yet)`, at most so many seconds; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: enough({*self._queue, *self._begun}), within_s)

    def close(self) -> None:
        """Drop what has not begun, and wait for what has."""
        with self._changed:
            self._queue, self._closed = [], True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._queue or self._closed)
                self._idle -= 1
                if not self._queue:
                    return
                candidate = self._queue.pop(0)
                begin = self._begun[candidate] = time.perf_counter()
            result, error = None, None
            try:
                result = self._build(candidate)
            except Exception as raised:
                error = raised
            with self._changed:
                del self._begun[candidate]
                self.done[candidate] = Compiled(candidate, result, error, time.perf_counter() - begin)
                self._changed.notify_all()
