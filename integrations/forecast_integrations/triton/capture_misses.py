"""Keys that are met undecided inside a CUDA-graph capture: refused or, where a user allows it, launched untimed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forecast_autotune.records import Decision, Problem
from forecast_autotune.settings import Mode, Settings
from forecast_integrations.triton.device_access import capturing_graph

_mutex = threading.Lock()
_open: list[list[CaptureMiss]] = []
"""The lists of the blocks that are entered, by whichever thread: a backward pass launches on threads of its own."""


@dataclass(frozen=True)
class CaptureMiss:
    """A key that was met inside a capture and launched with a config that nobody has timed there."""

    kernel: str
    key: tuple[str, ...]
    decision: Decision
    """What was launched, and on what evidence."""


@contextmanager
def allow_capture_misses() -> Iterator[list[CaptureMiss]]:
    """Within this block, a key that is met inside a CUDA-graph capture undecided is launched, not refused.

    It gets the best config that is stored for it, else the best forecast (from the kernel's other problems, if any
    are stored), and is recorded among the store's misses for `warm`. What was so launched is in the list that the
    block is given. Outside of a capture the key is tuned as ever: graphs that are recorded after that have its choice.
    """
    found: list[CaptureMiss] = []
    with _mutex:
        _open.append(found)
    try:
        yield found
    finally:
        with _mutex:
            # Not `remove`, which compares: two empty lists are equal.
            del _open[next(i for i, one in enumerate(_open) if one is found)]


def settings_in_capture(settings: Settings) -> Settings:
    """How to decide a key now: nothing is timed while the current stream records a graph."""
    if settings.mode in (Mode.SKIP, Mode.BACKGROUND) or not capturing_graph():
        return settings
    return settings.with_(mode=Mode.SKIP) if _open else settings.with_(mode=Mode.FROZEN, on_miss="error")


def note_capture_miss(problem: Problem, decision: Decision) -> None:
    """Tell the blocks that are entered of a key that was launched undecided."""
    miss = CaptureMiss(problem.kernel.name, problem.key, decision)
    with _mutex:
        for found in _open:
            found.append(miss)
