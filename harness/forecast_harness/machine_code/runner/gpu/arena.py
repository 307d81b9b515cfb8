"""One piece of device memory in which every buffer lies between canaries, somewhere else each time."""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from forecast_harness.machine_code.runner.gpu.driver import CudaDriver
from forecast_harness.machine_code.runner.gpu.mapped_memory import PAGE_BYTES, MappedMemory
from forecast_harness.machine_code.runner.gpu.trusted_kernels import TrustedKernels

_ALIGNMENT = 256
GAP_BYTES = 4096
"""Least bytes of canaries between buffers."""
_MOST_SHIFT = 64
"""Alignments by which a buffer's place varies, for its addresses to tell nothing."""


@dataclass(frozen=True)
class Placed:
    """Where a buffer lies, for one placement."""

    address: int
    size: int


@dataclass
class _Gap:
    """Canaries between two buffers."""

    address: int
    data: bytes


class CanaryArena:
    """Places buffers. Every byte of it is a buffer's or a canary."""

    def __init__(self, driver: CudaDriver, kernels: TrustedKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._memory = MappedMemory(driver)
        self._gaps: list[_Gap] = []
        self._chance = random.SystemRandom()
        self._key, self._digest = self._chance.getrandbits(64), 0
        self._noise = secrets.token_bytes(2 * PAGE_BYTES)
        self.places: dict[str, Placed] = {}

    def place(self, sizes: Mapping[str, int]) -> dict[str, Placed]:
        """Lay out these buffers, in a new order and at new addresses, and write canaries around them.

        Nothing of an earlier placement is left. Raises `DriverError` where the device has too little memory.
        """
        names = list(sizes)
        self._chance.shuffle(names)
        offset = GAP_BYTES + _ALIGNMENT * self._chance.randrange(_MOST_SHIFT)
        offsets: dict[str, int] = {}
        for name in names:
            offsets[name] = offset
            shift = GAP_BYTES + _ALIGNMENT * self._chance.randrange(_MOST_SHIFT)
            offset = _aligned(offset + sizes[name] + shift)
        # What is beyond the buffers are canaries, all of which are read: the memory is no larger than it needs to be.
        self._memory.reserve(offset + GAP_BYTES)
        begins, size = self._memory.address, self._memory.size
        self._driver.fill(begins, 0, 1, size)
        self.places = {n: Placed(begins + offsets[n], sizes[n]) for n in names}
        self._gaps, at = [], begins
        for name in [*names, ""]:
            begin = self.places[name].address if name else begins + size
            if begin > at:
                self._gaps.append(_Gap(at, self._canaries(begin - at)))
            if name:
                at = begin + sizes[name]
        self._driver.synchronize()
        for gap in self._gaps:
            self._driver.upload(gap.address, gap.data)
        self.queue_watch()
        self._digest = self._kernels.gaps_digest()
        return self.places

    def queue_watch(self) -> None:
        """Queue looking at all canaries, behind the launch that they are to tell of; `are_broken` says what was seen.

        Of all together, on the device: bytes of a whole page, after every launch, take long to move.
        """
        self._kernels.queue_gaps([(gap.address, len(gap.data)) for gap in self._gaps], self._key)

    def are_broken(self) -> bool:
        """Whether canaries were changed when they were looked at last. Waits for the device."""
        return self._kernels.gaps_digest() != self._digest

    def broken_canaries(self) -> int:
        """Bytes beside buffers that are not as they were written."""
        self.queue_watch()
        if not self.are_broken():
            return 0
        broken = 0
        for gap in self._gaps:
            found = self._driver.download(gap.address, len(gap.data))
            broken += sum(a != b for a, b in zip(found, gap.data, strict=True))
        return broken or 1

    def _canaries(self, size: int) -> bytes:
        """Bytes that nobody can foretell: a piece of noise from some place on, as often as it takes."""
        first = self._chance.randrange(PAGE_BYTES)
        found = self._noise[first : first + size]
        while len(found) < size:
            found += self._noise[: size - len(found)]
        return found

    def wipe(self, names: Collection[str], value: int) -> None:
        """Queue setting every byte of these buffers."""
        for name in names:
            placed = self.places[name]
            self._driver.fill(placed.address, value, 1, placed.size)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
