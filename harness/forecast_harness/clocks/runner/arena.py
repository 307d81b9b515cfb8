"""One piece of device memory in which every buffer lies between canaries, somewhere else each time."""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from forecast_harness.clocks.runner.driver import (
    ATTRIBUTE_VIRTUAL_MEMORY,
    OUT_OF_MEMORY,
    CudaDriver,
    DriverError,
)
from forecast_harness.clocks.runner.kernels import RunnerKernels

PAGE_BYTES = 2 << 20
"""Of the device's memory: sizes are multiples of it."""
_MOST_BLOCKS = 8
_MOST_KEPT_BYTES = 4 << 30
"""Of all blocks together; the one in use may be larger."""


@dataclass(frozen=True, eq=False)
class PhysicalBlock:
    """Memory that has no address while it is not mapped."""

    handle: int
    size: int


class MappedMemory:
    """What is in use has an address; nothing else of it has.

    To map memory that is kept takes a tenth of what allocating and freeing do. Where the device cannot map memory, it
    is allocated and freed. Kept memory is released once any call of the driver wants memory that is not there.
    """

    def __init__(
        self, driver: CudaDriver, most_blocks: int = _MOST_BLOCKS, most_bytes: int = _MOST_KEPT_BYTES
    ) -> None:
        self._driver, self._most_blocks, self._most_bytes = driver, most_blocks, most_bytes
        self._kept: list[PhysicalBlock] = []
        """None of it mapped; the least recently used first."""
        self._used: PhysicalBlock | None = None
        self._maps = _can_map(driver)
        self.address, self.size = 0, 0
        driver.on_want_of_memory = self._release_kept

    def reserve(self, size: int) -> None:
        """Have memory of as many pages as `size` needs, or of one more, with any contents.

        Unless what is in use is such memory, waits for the device, and ends the use. Raises `DriverError` where there
        is too little memory.
        """
        rounded = -(-size // PAGE_BYTES) * PAGE_BYTES
        if _suits(self.size, rounded):
            return
        self._end_use()
        if self._maps:
            try:
                self._used = self._block(rounded)
                self.address, self.size = (
                    self._driver.map(self._used.handle, self._used.size),
                    self._used.size,
                )
                return
            except DriverError as error:
                if error.sticky or error.code == OUT_OF_MEMORY:
                    raise
            self._maps = False
            self._end_use()
            self._release_kept()
        self.address = self._driver.allocate(rounded)
        self.size = rounded

    def _end_use(self) -> None:
        address, size, used = self.address, self.size, self._used
        if address and used is None:
            self._driver.free(address)
        elif address:
            self._driver.synchronize()  # a launch that failed may have left work behind; unmapping waits for none
            self._driver.unmap(address, size)
        self.address, self.size, self._used = 0, 0, None
        if used is not None:
            self._kept.append(used)

    def _block(self, size: int) -> PhysicalBlock:
        """One that is kept, or a new one."""
        if found := [one for one in self._kept if _suits(one.size, size)]:
            # The larger one, for the smaller one to be released some time: shifts need now this, now that.
            chosen = max(found, key=lambda one: one.size)
            self._kept.remove(chosen)
            return chosen
        while self._kept and (
            len(self._kept) >= self._most_blocks
            or size + sum(one.size for one in self._kept) > self._most_bytes
        ):
            self._release_oldest()
        return PhysicalBlock(self._driver.create_physical(size), size)

    def _release_oldest(self) -> None:
        self._driver.release_physical(self._kept.pop(0).handle)

    def _release_kept(self) -> bool:
        """Whether there was anything to release."""
        had = bool(self._kept)
        while self._kept:
            self._release_oldest()
        return had


def _suits(size: int, rounded: int) -> bool:
    return rounded <= size <= rounded + PAGE_BYTES


def _can_map(driver: CudaDriver) -> bool:
    try:
        return (
            bool(driver.attribute(ATTRIBUTE_VIRTUAL_MEMORY))
            and PAGE_BYTES % driver.physical_granularity() == 0
        )
    except DriverError:  # an old driver does not know the attribute
        return False


_ALIGNMENT = 256
GAP_BYTES = 4096
"""Least bytes of canaries between buffers."""
_MOST_SHIFT = 64
"""Alignments by which a buffer's place varies, for its addresses to tell nothing."""
_NOISE_BYTES = 64 << 10
"""Most bytes of a gap that the host sends. What lies farther from a buffer, the rest of a page, repeats a word."""
_WORD = 4


@dataclass(frozen=True)
class Placed:
    """Where a buffer lies, for one placement."""

    address: int
    size: int


@dataclass
class _Gap:
    """Canaries between two buffers: noise, and behind it one word again and again."""

    address: int
    noise: bytes
    word: int
    words: int

    @property
    def size(self) -> int:
        """In bytes."""
        return len(self.noise) + _WORD * self.words

    @property
    def data(self) -> bytes:
        """All of it."""
        return self.noise + self.word.to_bytes(_WORD, "little") * self.words


class CanaryArena:
    """Places buffers. Every byte of it is a buffer's or a canary."""

    def __init__(self, driver: CudaDriver, kernels: RunnerKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._memory = MappedMemory(driver)
        self._gaps: list[_Gap] = []
        self._chance = random.SystemRandom()
        self._key, self._digest = self._chance.getrandbits(64), 0
        self._noise = secrets.token_bytes(4 * _NOISE_BYTES)
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
                self._gaps.append(self._gap(at, begin))
            if name:
                at = begin + sizes[name]
        self._driver.synchronize()
        for gap in self._gaps:
            self._driver.upload(gap.address, gap.noise)
            if gap.words:
                self._driver.fill(gap.address + len(gap.noise), gap.word, _WORD, gap.words)
        self.queue_watch()
        self._digest = self._kernels.gaps_digest()
        return self.places

    def queue_watch(self) -> None:
        """Queue looking at all canaries, behind the launch that they are to tell of; `are_broken` says what was seen.

        Of all together, on the device: bytes of a whole page, after every launch, take long to move.
        """
        self._kernels.queue_gaps([(gap.address, gap.size) for gap in self._gaps], self._key)

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
            found = self._driver.download(gap.address, gap.size)
            broken += sum(a != b for a, b in zip(found, gap.data, strict=True))
        return broken or 1

    def _gap(self, begin: int, end: int) -> _Gap:
        """Canaries that nobody can foretell: a piece of noise from some place on, and a random word.

        `end` is a buffer's beginning or a page's, a multiple of a word.
        """
        repeated = min(end, _aligned(begin + _NOISE_BYTES))
        size = repeated - begin
        first = self._chance.randrange(len(self._noise) - size)
        noise = self._noise[first : first + size]
        return _Gap(begin, noise, self._chance.getrandbits(8 * _WORD), (end - repeated) // _WORD)

    def wipe(self, names: Collection[str], value: int) -> None:
        """Queue setting every byte of these buffers."""
        for name in names:
            placed = self.places[name]
            self._driver.fill(placed.address, value, 1, placed.size)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
