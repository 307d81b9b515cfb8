"""Requests that wait for a compile worker: which goes first, and which of them one worker takes together."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R")
A = TypeVar("A")


@dataclass(eq=False)
class WaitingRequest(Generic[R, A]):
    """A request, and where its answer goes."""

    request: R
    key: object = None
    """What requests have in common that may be taken together; None: it is taken alone."""
    began: float = 0.0
    """The earliest goes first, and of equals the one that came first."""
    answer: Future[A] = field(default_factory=Future)


class WaitingRequests(Generic[R, A]):
    """A queue: what was begun first is served first, and with it others of its key. Any thread may ask.

    If all that is under way went on at the same pace, all of it would end late.
    """

    def __init__(self, most: int) -> None:
        """`most`: that are taken together."""
        self._most = most
        self._lock = threading.Lock()
        self._waiting: list[WaitingRequest[R, A]] = []

    def add(self, waiting: WaitingRequest[R, A]) -> None:
        """One more."""
        with self._lock:
            self._waiting.append(waiting)

    def take(self, workers: int) -> list[WaitingRequest[R, A]]:
        """The first that was not cancelled, with some of its key: the more of them, the longer the queue is for so many
        `workers`, none where each of the others could have a worker of its own. Their futures run from here on.

        Empty where nothing waits.
        """
        with self._lock:
            taken: list[WaitingRequest[R, A]] = []
            while self._waiting and not taken:
                first = min(self._waiting, key=lambda w: w.began)
                self._waiting.remove(first)
                if first.answer.set_running_or_notify_cancel():
                    taken.append(first)
            if not taken or taken[0].key is None:
                return taken
            waiting = [w for w in self._waiting if not w.answer.cancelled()]
            most = min(self._most, 1 + len(waiting) // workers)
            alike = [w for w in waiting if w.key == taken[0].key]
            for one in alike[: most - 1]:
                self._waiting.remove(one)
                if one.answer.set_running_or_notify_cancel():
                    taken.append(one)
            return taken

    def cancel(self) -> None:
        """Cancel all that wait."""
        with self._lock:
            cancelled, self._waiting = self._waiting, []
        for one in cancelled:
            if one.answer.cancel():
                one.answer.set_running_or_notify_cancel()  # or `concurrent.futures.wait` would go on waiting
