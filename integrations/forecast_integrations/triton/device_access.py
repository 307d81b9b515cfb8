"""When the device may be timed on: by one decision of this process at a time, and never inside a capture."""

from __future__ import annotations

import os
import threading
from typing import Any

LOCK = threading.RLock()
"""One decision at a time per process: two would share the device and spoil each other's times. Being
one lock for all tuners, and re-entrant, it cannot deadlock when a hook calls another tuned kernel."""


def _renew_lock() -> None:
    """A fork has the lock as it was: held, perhaps, by a thread that is not there."""
    lock: Any = LOCK
    if not lock._is_owned():
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew_lock)

_local = threading.local()


def decision_depth() -> int:
    """How many decisions this thread is inside of: hooks may call tuned kernels."""
    return int(getattr(_local, "depth", 0))


def enter_decision() -> None:
    """Begin a decision on this thread."""
    _local.depth = decision_depth() + 1


def leave_decision() -> None:
    """End the latest one."""
    _local.depth = decision_depth() - 1


def capturing_graph() -> bool:
    """Whether the current stream is recording a CUDA graph."""
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
