"""One piece of device memory in which every buffer lies between canaries, somewhere else each time."""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernels import RunnerKernels

PAGE_BYTES = 2 << 20
"""Bytes of a page of the device's memory: sizes are multiples of it."""
_ALIGNMENT = 256
GAP_BYTES = 4096
"""Least bytes of canaries between buffers."""
_MOST_SHIFT = 64
"""Alignments by which a buffer's place varies, for its addresses to tell nothing."""
_NOISE_BYTES = 64 << 10
"""Most bytes of a gap that the host sends. The rest of a page, farther from a buffer, repeats a word."""
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
        self.address, self.size = 0, 0
        """Address and bytes of the whole arena; any contents."""
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
        # The bytes beyond the buffers are canaries, all of which are read: the memory is no larger than it needs to be.
        self._reserve(offset + GAP_BYTES)
        begins, size = self.address, self.size
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

    def _reserve(self, size: int) -> None:
        """Have memory of as many pages as `size` needs, or of one more, for shifts need now this, now that.

        Nothing else can be addressed: other memory is given back, which waits for the device.
        """
        rounded = -(-size // PAGE_BYTES) * PAGE_BYTES
        if rounded <= self.size <= rounded + PAGE_BYTES:
            return
        if self.address:
            before, self.address, self.size = self.address, 0, 0
            self._driver.free(before)
        self.address, self.size = self._driver.allocate(rounded), rounded

    def queue_watch(self) -> None:
        """Queue looking at all canaries, behind the launch that they are to tell of; `are_broken` says what was seen.

        One digest of all is made on the device: bytes of a whole page, after every launch, take long to move.
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
            result = self._driver.download(gap.address, gap.size)
            broken += sum(a != b for a, b in zip(result, gap.data, strict=True))
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
