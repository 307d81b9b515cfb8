"""What tests of processes and threads wait for, patiently: how fast the machine is decides nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
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


def under_way() -> str:
    """What this process's threads and its descendants are at, for the message of a test that waited in vain."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    told = [
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame)[-8:])}"
        for number, frame in sys._current_frames().items()
    ]
    parents = {int(one.name): _parent_or_none(int(one.name)) for one in Path("/proc").glob("[0-9]*")}
    found = added = {os.getpid()}
    while added:
        added = {pid for pid, parent in parents.items() if parent in found} - found
        found |= added
    for pid in sorted(found - {os.getpid()}):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            waits = Path(f"/proc/{pid}/wchan").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it has ended meanwhile
        ticks = int(state[11]) + int(state[12])
        told.append(f"process {pid} of {state[1]}: {state[0]}, {ticks} ticks, {waits}, {command:.80}")
    return "\n".join(told)


def _parent_or_none(pid: int) -> int | None:
    try:
        return parent_of(pid)
    except OSError:
        return None
