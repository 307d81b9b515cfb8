"""How several lanes, each used by threads of a pool, come to an end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Protocol, TypeVar

_GIVE_UP_AGAIN_S = 0.2


class Closable(Protocol):
    """What has to be closed: a lane, or what has lanes."""

    def close(self) -> None:
        """End it."""


C = TypeVar("C", bound=Closable)


def end_pools(pools: Sequence[Executor], give_up: Callable[[], None]) -> None:
    """Cancel what waits, and wait for what runs, while `give_up` ends the jobs under way."""
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)

    def wait() -> None:
        for pool in pools:
            pool.shutdown()

    ending = threading.Thread(target=wait)
    ending.start()
    while ending.is_alive():  # again, as a lane that was about to begin a job was not told
        give_up()
        ending.join(_GIVE_UP_AGAIN_S)


def close_lanes(lanes: list[C]) -> None:
    """Close all side by side, as each takes a second or two to end; the list is empty then."""
    if lanes:
        with ThreadPoolExecutor(len(lanes), "close-lane") as pool:
            list(pool.map(lambda lane: lane.close(), lanes))
        lanes.clear()
