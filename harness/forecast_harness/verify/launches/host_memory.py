"""What the cell asks of the host's allocator."""

from __future__ import annotations

import ctypes
from contextlib import suppress

MAPPED_BYTES = 32 << 20
"""Bytes from which on a host's allocator always asks the system, which hands out zeros."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed, up to the size from which on it cannot.

    Else it decides by what was freed before whether an output of megabytes lies in warm memory or has to be
    asked for page by page, which takes longer than to compute it: two equal solutions would differ by chance.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
