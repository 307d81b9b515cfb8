"""Memory that a judge and one cell share: anonymous, of a size that nobody can change, mapped once by each."""

from __future__ import annotations

import fcntl
import mmap
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A mapping of what was cut off would kill its reader, and what grew would be counted by no limit."""


class SharedMemory:
    """Bytes in `data` (writable), zeros at first. `fd` is what another process needs to map them."""

    def __init__(self, size: int) -> None:
        """Of so many bytes. Raises `OSError` where the system has none to give."""
        self.fd = os.memfd_create("launch", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.data = map_shared(self.fd, size)
        except OSError:
            os.close(self.fd)
            raise
        self.size = size

    def forget_descriptor(self) -> None:
        """Close `fd`, once whoever shares the memory has mapped it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_shared(fd: int, size: int) -> mmap.mmap:
    """The bytes behind a descriptor that another process made."""
    return mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
