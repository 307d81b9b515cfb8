"""Samples of a thread's wall time: its stack, looked at again and again from another thread.

Waiting is seen as well as work, and nothing of it is slowed down as by a tracing profiler.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from types import FrameType

PACKAGES = ("torch/_dynamo", "torch/_functorch", "torch/_inductor", "forecast_integrations", "triton/")
"""Parts of paths of files whose functions are named; what they call of others counts as theirs."""
DEPTH = 5
"""Innermost of these functions that name a place."""


class StackSamples:
    """Samples of the thread that enters the context, until it leaves it."""

    def __init__(self, every_s: float = 0.01) -> None:
        self.every_s = every_s
        self.seconds: Counter[str] = Counter()
        """By place, innermost function last."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StackSamples:
        watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, args=(watched,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        assert self._thread is not None
        self._thread.join()

    def top(self, count: int = 40) -> list[tuple[str, float]]:
        """The places where most time passed, with their seconds."""
        return [(place, round(seconds, 3)) for place, seconds in self.seconds.most_common(count)]

    def _watch(self, watched: int) -> None:
        before = time.perf_counter()
        while not self._ended.wait(self.every_s):
            frame = sys._current_frames().get(watched)
            now = time.perf_counter()
            if frame is not None:
                self.seconds[place_of(frame)] += now - before
            before = now


def place_of(frame: FrameType | None) -> str:
    """The innermost functions of the named packages, innermost last; `elsewhere` where there are none."""
    names: list[str] = []
    while frame is not None and len(names) < DEPTH:
        path = frame.f_code.co_filename.replace("\\", "/")
        if any(part in path for part in PACKAGES):
            names.append(f"{path.rpartition('/')[2].removesuffix('.py')}.{frame.f_code.co_name}")
        frame = frame.f_back
    return " > ".join(reversed(names)) or "elsewhere"
