"""Which nodes are verified in full, and when: one at a time, the fastest first, and none that cannot lead.

Full verification takes seconds in a sandbox, and only the fastest node of a search is ever called the fastest. A
node that seems faster than what it was timed beside, and is no faster than one that was verified meanwhile, is
left unverified.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class VerificationTurns:
    """Nodes that wait for one lane. Scores are log2(time / time of the search's first seed)."""

    def __init__(self, least_gain: float) -> None:
        """`least_gain`: log2 of the time ratio by which a node has to be ahead of the best verified one."""
        self._least_gain = least_gain
        self._changed = threading.Condition()
        self._waiting: list[float] = []
        self._is_taken = self._has_ended = False
        self._best = math.inf

    @contextmanager
    def take(self, score: float, rival_score: float) -> Iterator[bool]:
        """Wait for a turn; whether there is one: False once a verified node is as fast, or after `end`.

        `rival_score`: of the node that it was timed beside, which is verified.
        """
        with self._changed:
            self._best = min(self._best, rival_score)
            self._waiting.append(score)
            self._changed.wait_for(lambda: self._is_void(score) or self._is_next(score))
            self._waiting.remove(score)
            is_mine = not self._is_void(score)
            self._is_taken = self._is_taken or is_mine
            self._changed.notify_all()
        try:
            yield is_mine
        finally:
            if is_mine:
                with self._changed:
                    self._is_taken = False
                    self._changed.notify_all()

    def note_verified(self, score: float) -> None:
        """Tell that a node with this score is right."""
        with self._changed:
            self._best = min(self._best, score)
            self._changed.notify_all()

    def end(self) -> None:
        """Give no more turns."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _is_void(self, score: float) -> bool:
        return self._has_ended or score >= self._best + self._least_gain

    def _is_next(self, score: float) -> bool:
        return not self._is_taken and score <= min(self._waiting)
