"""A process that keeps a lane's device open: beside it, CUDA starts sooner.

On four H200s of one host four processes that started CUDA at once took 1.45 s each with nobody beside them
and 0.88 s beside a holder per device; one alone took 0.47 and 0.37 s. Its context does nothing, so a device
never switches to it.

One is enough for all lanes of a device, whose driver makes one context after the other: it is a child of the process
that their servers are forked from, and has its context by the time that this one has imported torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path
from typing import NoReturn

from forecast_harness.sandbox.containment import confine, linux

_COMPUTE_MODE, _SHARED_MODE = 20, 0
"""`CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`, and its value `CU_COMPUTEMODE_DEFAULT`."""
_MOST_DESCRIPTORS = 1 << 16


def start_holder(device: str, scratch: str) -> None:
    """Have a child of this process, of one thread so far, keep a device open until this one ends.

    It is the first in sight; where others can be hidden, no driver has to look at them. `scratch`: a folder of this
    process.
    """
    parent = os.getpid()
    if os.fork():
        return
    try:
        os.closerange(3, _MOST_DESCRIPTORS)  # sockets whose end others wait for are not kept open here
        hidden = Path(scratch, "dev")
        hidden.mkdir()
        confine.hide_nodes(confine.other_devices(device), str(hidden))
        linux.set_dumpable(False)
        _hold_device(parent)
    finally:
        os._exit(1)


def _hold_device(parent: int) -> NoReturn:
    """Without a driver, wait all the same."""
    linux.die_with_parent(parent)
    with contextlib.suppress(OSError, AttributeError):
        _open_device(ctypes.CDLL("libcuda.so.1"))
    while True:
        signal.pause()


def _open_device(driver: ctypes.CDLL) -> None:
    mode = ctypes.c_int(-1)
    if driver.cuInit(0) or driver.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, 0):
        return
    if mode.value == _SHARED_MODE:  # else it serves one process alone, and that is the candidate
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
