"""A setting of the interpreter that is changed for as long as anybody asks for it, in whatever thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedSetting(Generic[T]):
    """Changed when its first user comes, and put back when the last one is done; one object for a setting.

    What the program sets meanwhile stays. A process that is forked meanwhile has the usual value: the thread that
    would put it back is not in it.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], object], change: Callable[[T], T]) -> None:
        """`change` makes the value for the users of the usual one."""
        self._read, self._write, self._change = read, write, change
        self._lock, self._users = threading.Lock(), 0
        self._usual = self._changed = read()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._restore_in_child)

    @contextmanager
    def changed(self) -> Iterator[None]:
        """The setting is changed inside, and the usual one after the last user."""
        with self._lock:
            if not self._users:
                self._usual = self._read()
                self._write(self._change(self._usual))
                self._changed = self._read()  # it may have been rounded
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._restore()

    def _restore(self) -> None:
        if self._read() == self._changed:
            self._write(self._usual)

    def _restore_in_child(self) -> None:
        if self._users:
            self._restore()
        self._lock, self._users = threading.Lock(), 0
