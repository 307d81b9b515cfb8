"""Questions that are answered beside other work: in a thread, awaited while it pays, never raising."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """One piece of work under way; see `begin`."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.abandoned = False
        """Nobody waits for it any more: it took too long."""
        self.answer: T | None = None
        self.error: Exception | None = None
        self._done = threading.Event()

    @classmethod
    def start(cls, work: Callable[[], T]) -> BackgroundTask[T]:
        """Start the work. What it raises is kept, not raised: a model must never take a decision down.

        The thread is a daemon: a model that hangs must not keep the process from ending.
        """
        ticket = cls()

        def run() -> None:
            try:
                ticket.answer = work()
            except Exception as error:
                ticket.error = error
            finally:
                ticket._done.set()

        threading.Thread(target=run, name="forecast-llm", daemon=True).start()
        return ticket

    @property
    def age_s(self) -> float:
        """Seconds since it was begun."""
        return time.perf_counter() - self.started

    def done(self, wait_s: float = 0.0) -> bool:
        """Whether it has ended, after waiting for it at most so many seconds."""
        return self._done.wait(max(0.0, wait_s))
