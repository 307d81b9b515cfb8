"""Turns at the interpreter while launches are queued: the device must not run out of work between two of them.

A thread that has released the interpreter's lock, as any call of the driver does, gets it back from a busy thread after
the switch interval only: five milliseconds, unless told otherwise, where flushes keep a device busy for 80 us.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from forecast_autotune.shared_setting import SharedSetting

_PROMPT_S = 2e-5
_INTERVAL = SharedSetting(
    sys.getswitchinterval, sys.setswitchinterval, lambda usual_s: min(usual_s, _PROMPT_S)
)


def prompt_turns() -> AbstractContextManager[None]:
    """Busy threads of this process give way within some 20 us. Several threads may ask for it at once."""
    return _INTERVAL.changed()
