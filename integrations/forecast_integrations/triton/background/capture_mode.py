"""Calls of the driver that do no harm to a CUDA graph that another thread of the process records meanwhile.

By default a thread that takes memory, loads a module or asks for an event ends the capture of every other thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


@contextmanager
def harmless_to_captures() -> Iterator[None]:
    """Let this thread's calls leave the captures of other threads alone; nothing where there is no CUDA."""
    exchange = _mode_exchange()
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    done = exchange(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if done:
            exchange(ctypes.byref(mode))


@cache
def _mode_exchange() -> Callable[[object], int] | None:
    """`cuThreadExchangeStreamCaptureMode`, which puts this thread's mode and gives the one before."""
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    try:
        found: Callable[[object], int] = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return found
