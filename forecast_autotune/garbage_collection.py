"""Collections of garbage while a decision or a search is made: rare, as each holds up the program that waits for it.

A program that has loaded torch holds some 300,000 objects, which a full collection visits: 0.1 to 0.2 s. Python makes
one whenever enough new objects have survived, as those of a kernel's IR do. Nearly all garbage goes by reference
counts.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager

from forecast_autotune.shared_setting import SharedSetting

_RARE = (50_000, 20, 1_000)
"""Thresholds as `gc.set_threshold` takes them: new objects between young collections, of which there are 700 by
default, and young and middle ones between those that visit all objects."""


def _rarer(usual: tuple[int, int, int]) -> tuple[int, int, int]:
    return _RARE if 0 < usual[0] < _RARE[0] else usual


_THRESHOLDS = SharedSetting(gc.get_threshold, lambda them: gc.set_threshold(*them), _rarer)


def rare_collections() -> AbstractContextManager[None]:
    """Collect seldom, and never everything. Several threads may ask for it at once.

    What a program has set itself is left alone: collections that are rarer or switched off, and thresholds that it
    sets meanwhile.
    """
    return _THRESHOLDS.changed()
