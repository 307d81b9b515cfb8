"""Opens something that takes seconds to open before it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

from forecast_harness.sandbox.lane_pools import Closable

T = TypeVar("T", bound=Closable)
_GIVE_UP_AGAIN_S = 0.2


class EarlyOpener(Generic[T]):
    """Opens one at once, in the background, and waits for it when it is called; each later call opens another.

    Its thread lives until `close`: processes may end with the thread that began them.
    """

    def __init__(self, make: Callable[[], T], give_up: Callable[[], None] = lambda: None) -> None:
        """`give_up` has what `make` is at fail soon; it may be called several times, also between two of its steps."""
        self._make, self._give_up = make, give_up
        self._opening = ThreadPoolExecutor(1, "early-opener")
        self._first: Future[T] = self._opening.submit(make)
        self._lock = threading.Lock()
        self._is_taken = False

    def __call__(self) -> T:
        """The next one. Raises what opening it raises."""
        with self._lock:
            is_first, self._is_taken = not self._is_taken, True
        return self._first.result() if is_first else self._make()

    def close(self) -> None:
        """End what is being opened, whoever waits for it, and close what nobody has asked for."""
        if not self._first.cancel():
            while wait([self._first], 0.0).not_done:
                self._give_up()
                wait([self._first], _GIVE_UP_AGAIN_S)
            with self._lock:
                is_ours, self._is_taken = not self._is_taken, True
            if is_ours and self._first.exception() is None:
                self._first.result().close()
        self._opening.shutdown()
