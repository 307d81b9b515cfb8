"""Numbers from the system that nobody can foretell, asked for in blocks: a launch takes a dozen of them."""

from __future__ import annotations

import os
import random

_BLOCK_BYTES = 4096


class SystemChance(random.SystemRandom):
    """A `SystemRandom` that asks the system once for many numbers. Use from one thread."""

    def __init__(self) -> None:
        super().__init__()
        self._block, self._next = b"", 0

    def getrandbits(self, k: int) -> int:
        """A number of `k` bits; each byte of a block is used once. Raises `ValueError` for fewer than none."""
        size = (k + 7) // 8
        if k < 0 or size > _BLOCK_BYTES:
            return super().getrandbits(k)
        if self._next + size > len(self._block):
            self._block, self._next = os.urandom(_BLOCK_BYTES), 0
        found = self._block[self._next : self._next + size]
        self._next += size
        return int.from_bytes(found, "little") >> (8 * size - k)
