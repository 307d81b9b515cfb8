"""Whose turn it is to use a device: that of the job that began first, so that jobs end one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceTurns:
    """A lock for threads; one that holds it may take it again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int]] = []
        self._holder = 0
        self._depth = 0

    @contextmanager
    def turn(self, began: float) -> Iterator[None]:
        """Hold it; `began`: when this thread's job began, the earlier the sooner."""
        me = threading.get_ident()
        with self._changed:
            if self._holder != me:
                place = began, me
                self._waiting.append(place)
                self._changed.wait_for(lambda: not self._holder and min(self._waiting) == place)
                self._waiting.remove(place)
                self._holder = me
            self._depth += 1
        try:
            yield
        finally:
            with self._changed:
                self._depth -= 1
                if not self._depth:
                    self._holder = 0
                    self._changed.notify_all()
