"""What tests of processes and threads wait for, patiently: how fast the machine is decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def eventually(holds: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether something becomes true within so many seconds; returns as soon as it is."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def wait_until(holds: Callable[[], object], what: str = "it", seconds: float = 60.0) -> None:
    """Return as soon as something is true. Raises `TimeoutError` where it does not become so in time."""
    if not eventually(holds, seconds):
        raise TimeoutError(f"{what} did not come within {seconds:g} s")


def parent_of(pid: int) -> int:
    """The process that this one was forked from. Linux alone tells."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    """Whether a process has not ended; a zombie has. Linux alone tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
