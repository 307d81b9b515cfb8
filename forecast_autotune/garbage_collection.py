"""Collections of garbage while a decision is made: rare, as each holds up the program that waits for it.

A program that has loaded torch holds some 300,000 objects, which a full collection visits: 0.1 to 0.2 s. Python makes
one whenever enough new objects have survived, as those of a kernel's IR do. Nearly all garbage goes by reference
counts.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_RARE = (50_000, 20, 1_000)
"""Thresholds as `gc.set_threshold` takes them: new objects between young collections, of which there are 700 by
default, and young and middle ones between those that visit all objects."""
_lock = threading.Lock()
_users = 0
_usual = _RARE


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect seldom, and never everything. Several threads may ask for it at once.

    What a program has set itself is left alone: collections that are rarer or switched off, and thresholds that it
    sets meanwhile.
    """
    global _users, _usual
    with _lock:
        if not _users:
            _usual = gc.get_threshold()
            if 0 < _usual[0] < _RARE[0]:
                gc.set_threshold(*_RARE)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and gc.get_threshold() == _RARE:
                gc.set_threshold(*_usual)


def _restore_in_child() -> None:
    """A process that is forked meanwhile collects as usual: the thread that would restore it is not in it."""
    global _lock, _users
    if _users and gc.get_threshold() == _RARE:
        gc.set_threshold(*_usual)
    _lock, _users = threading.Lock(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_in_child)
