"""Opens something that takes seconds to open before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from forecast_harness.sandbox.lane_pools import Closable

T = TypeVar("T", bound=Closable)


class EarlyOpener(Generic[T]):
    """Opens one at once, in the background, and waits for it when it is called; each later call opens another.

    Its thread lives until `close`: processes may end with the thread that began them.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._opening = ThreadPoolExecutor(1, "early-opener")
        self._first: Future[T] | None = self._opening.submit(make)

    def __call__(self) -> T:
        """The next one. Raises what opening it raises."""
        first, self._first = self._first, None
        return self._make() if first is None else first.result()

    def close(self) -> None:
        """Close the one that nobody has asked for."""
        first, self._first = self._first, None
        if first is not None and not first.cancel() and first.exception() is None:
            first.result().close()
        self._opening.shutdown()
