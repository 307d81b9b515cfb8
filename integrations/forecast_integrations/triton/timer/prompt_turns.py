"""Turns at the interpreter while launches are queued: the device must not run out of work between two of them.

A thread that has released the interpreter's lock, as any call of the driver does, gets it back from a busy thread after
the switch interval only: five milliseconds, unless told otherwise, where flushes keep a device busy for 80 us.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PROMPT_S = 2e-5
_lock = threading.Lock()
_users = 0
_usual_s = 0.0
"""The interval outside of all such turns."""


@contextmanager
def prompt_turns() -> Iterator[None]:
    """Busy threads of this process give way within some 20 us. Several threads may ask for it at once."""
    global _users, _usual_s
    with _lock:
        if not _users:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(_usual_s, _PROMPT_S))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                sys.setswitchinterval(_usual_s)
