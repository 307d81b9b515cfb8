"""Whose code runs just now: told by the runner in shared memory, read by who watches it."""

from __future__ import annotations

import mmap
import os
import struct

NOBODY = -1
"""While no contestant's code runs."""
_FORMAT = struct.Struct("<iI")


class RunMarks:
    """A contestant's number, and a serial number that is another one for every launch."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of a memory file as `create_marks` makes it."""
        self._memory = mmap.mmap(descriptor, _FORMAT.size)
        self._serial = 0

    def set(self, contestant: int) -> None:
        """Say whose code runs from here on."""
        self._serial = (self._serial + 1) % (1 << 32)
        self._memory[:] = _FORMAT.pack(contestant, self._serial)

    def read(self) -> tuple[int, int]:
        """(contestant, serial number)."""
        contestant, serial = _FORMAT.unpack(self._memory[:])
        return contestant, serial

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()


def create_marks() -> int:
    """The descriptor of a new memory file for marks."""
    found = os.memfd_create("run-marks")
    os.ftruncate(found, _FORMAT.size)
    return found
