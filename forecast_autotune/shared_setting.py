"""A setting of the interpreter that is changed for as long as anybody asks for it; and rare collections of garbage."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedSetting(Generic[T]):
    """Changed when its first user comes, and put back when the last one is done; one object for a setting.

    Values that the program sets meanwhile stay. A process that is forked meanwhile has the usual value: the thread that
    would put it back is not in it.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], object], change: Callable[[T], T]) -> None:
        """`change` makes the value for the users of the usual one."""
        self._read, self._write, self._change = read, write, change
        self._lock, self._users = threading.Lock(), 0
        self._usual = self._own_value = read()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._restore_in_child)

    @contextmanager
    def changed(self) -> Iterator[None]:
        """The setting is changed inside, and the usual one after the last user."""
        with self._lock:
            if not self._users:
                self._usual = self._read()
                self._write(self._change(self._usual))
                self._own_value = self._read()  # it may have been rounded
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()

    def _restore(self) -> None:
        if self._read() == self._own_value:
            self._write(self._usual)

    def _restore_in_child(self) -> None:
        if self._users:
            self._restore()
        self._lock, self._users = threading.Lock(), 0


_RARE = (50_000, 20, 1_000)
"""Thresholds as `gc.set_threshold` takes them: new objects between young collections, of which there are 700 by
default, and young and middle ones between those that visit all objects."""


def _rarer(usual: tuple[int, int, int]) -> tuple[int, int, int]:
    return _RARE if 0 < usual[0] < _RARE[0] else usual


_THRESHOLDS = SharedSetting(gc.get_threshold, lambda them: gc.set_threshold(*them), _rarer)


def rare_collections() -> AbstractContextManager[None]:
    """Collect seldom, and never everything. Several threads may ask for it at once.

    Values that a program has set are left alone: collections that are rarer or switched off, and thresholds that it
    sets meanwhile.
    """
    return _THRESHOLDS.changed()
