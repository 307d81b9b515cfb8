"""The runner's own kernels: a known addition, a pause, some that watch, compare or renew buffers, and one that
overwrites shared memory."""

from __future__ import annotations

import ctypes
import math
import random
import struct
from collections.abc import Sequence

from forecast_harness.clocks.runner.driver import (
    ATTRIBUTE_MULTIPROCESSORS,
    ATTRIBUTE_SHARED_OPT_IN,
    CudaDriver,
)
from forecast_harness.clocks.runner.kernel_texts import (
    ADD,
    COMPARED_TYPES,
    GAPS,
    HEADER,
    MASK,
    MOST_GAPS,
    OVERWRITE,
    PAUSE,
    RENEW,
    SECTOR_WORDS,
    WORD,
    compare_text,
    digest_text,
    element_size,
    error_kernel_name,
    error_kernel_text,
    suffix,
)

_CANARY_ELEMENTS = 4096
_OVERWRITE_THREADS = 1024
_UNIT_THREADS, _UNIT_BLOCKS = 512, 4
"""Sizes of kernels over bytes or words: threads of a block, and most blocks of a multiprocessor."""
_MOST_SUMS = 64
"""Sums that are waited for together."""
_ERROR_WORDS = 3
"""Words that a comparison of elements raises."""
_LEAST_SCALE = 1e-30
"""Scale of values that are all zero."""
_PAGE_BYTES = 2 << 20
"""Bytes of a page of the device's memory: the rest of an allocation's last page would be anybody's."""


class RunnerKernels:
    """Kernels of our own on one device. Raises `DriverError` where the device does not take them."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

        result = self._made
        self._add, self._pause = result(ADD, "trusted_add"), result(PAUSE, "trusted_pause")
        self._overwrite = result(OVERWRITE, "trusted_overwrite")
        self._compare = {u: result(compare_text(u), f"trusted_compare{suffix(u)}") for u in (1, WORD)}
        self._digest = {u: result(digest_text(u), f"trusted_digest{suffix(u)}") for u in (1, WORD)}
        self._mask, self._gaps = result(MASK, "trusted_mask"), result(GAPS, "trusted_gaps")
        self._renew = result(RENEW, "trusted_renew")
        self._error: dict[str, ctypes.c_void_p] = {}
        self._shared = driver.attribute(ATTRIBUTE_SHARED_OPT_IN)
        self._blocks = driver.attribute(ATTRIBUTE_MULTIPROCESSORS)
        driver.allow(self._overwrite, self._shared, 1)
        self._memory = driver.allocate(_PAGE_BYTES)
        self._out = self._memory + _PAGE_BYTES - 8 * _MOST_SUMS

    def _made(self, text: str, name: str) -> ctypes.c_void_p:
        driver = self._driver
        return driver.function(driver.load((HEADER + text).encode() + b"\0"), name)

    def pause(self, cycles: int) -> None:
        """Queue a pause of so many clock cycles."""
        self._driver.launch(self._pause, (1, 1, 1), 1, 0, [ctypes.c_uint64(cycles)])

    def overwrite(self, value: int) -> None:
        """Queue overwriting the shared memory of every multiprocessor and these kernels' own memory.

        Data that a launch left there is gone.
        """
        self._driver.fill(self._memory, value & 255, 1, _PAGE_BYTES)
        arguments = [ctypes.c_uint32(self._shared), ctypes.c_uint32(value)]
        self._driver.launch(
            self._overwrite, (2 * self._blocks, 1, 1), _OVERWRITE_THREADS, self._shared, arguments
        )

    def read(self, address: int, size: int) -> None:
        """Queue a read of a buffer of whole words: the caches hold it then, and nothing that is yet to be written."""
        given = [ctypes.c_uint64(v) for v in (address, size // WORD, 0, self._out + 8 * (_MOST_SUMS - 1))]
        self._driver.launch(self._digest[WORD], (self._grid(size // WORD), 1, 1), _UNIT_THREADS, 0, given)

    def differ(self, address: int, other: int, size: int, turn: int) -> bool:
        """Whether a buffer is not another one, rotated by `turn` bytes. Waits for the device."""
        unit = WORD if not any(n % WORD for n in (address, other, size, turn)) else 1
        given = [ctypes.c_uint64(n) for n in (address, other, size // unit, turn // unit)]
        return self._sums([(self._compare[unit], size // unit, given)]) != [0]

    def mask(self, address: int, size: int, keys: tuple[int, int]) -> None:
        """Queue masking whole words, which tell nothing without the keys then; a second time, unmasking them."""
        count = size // WORD
        given = [ctypes.c_uint64(n) for n in (address, count, *keys)]
        self._driver.launch(self._mask, (self._grid(count), 1, 1), _UNIT_THREADS, 0, given)

    def relative_error(self, address: int, right: int, size: int, dtype: str) -> float:
        """The largest error of a buffer's elements, relative to the largest finite one of those at `right`.

        Infinite where an element is finite in only one of them, and where bytes differ whose type is not compared.
        Waits for the device.
        """
        if not self.differ(address, right, size, 0):
            return 0.0
        if dtype not in COMPARED_TYPES:
            return math.inf
        if dtype not in self._error:
            self._error[dtype] = self._made(error_kernel_text(dtype), error_kernel_name(dtype))
        count = size // element_size(dtype)
        given = [ctypes.c_uint64(n) for n in (address, right, count, self._out)]
        self._driver.fill(self._out, 0, 4, _ERROR_WORDS)
        self._driver.launch(self._error[dtype], (self._grid(count), 1, 1), _UNIT_THREADS, 0, given)
        self._driver.synchronize()
        words = bytes(self._driver.download(self._out, 4 * _ERROR_WORDS))
        apart, scale = struct.unpack_from("<2f", words)
        (unlike,) = struct.unpack_from("<I", words, 8)
        return math.inf if unlike else apart / max(scale, _LEAST_SCALE)

    def digest(self, address: int, size: int, key: int) -> int:
        """64 bits of a buffer's contents, which tell nothing without the key. Waits for the device."""
        return self.digests([(address, size)], key)[0]

    def digests(self, buffers: Sequence[tuple[int, int]], key: int) -> list[int]:
        """Those of several buffers, each by address and bytes. Waits for the device once."""
        request: list[tuple[ctypes.c_void_p, int, list[ctypes.c_uint64]]] = []
        owners: list[int] = []
        for number, (address, size) in enumerate(buffers):
            whole = 0 if address % WORD else size // WORD
            rest = address + whole * WORD
            for unit, first, count in ((WORD, address, whole), (1, rest, size - whole * WORD)):
                if count:
                    given = [ctypes.c_uint64(n) for n in (first, count, key)]
                    request.append((self._digest[unit], count, given))
                    owners.append(number)
        result = [0] * len(buffers)
        for number, value in zip(owners, self._sums(request), strict=True):
            result[number] = (result[number] + value) % (1 << 64)
        return result

    def queue_gaps(self, gaps: Sequence[tuple[int, int]], key: int) -> None:
        """Queue one digest of these buffers together, each by address and bytes; `gaps_digest` tells it."""
        data = []
        for address, size in gaps:
            bytes_ = bool(address % WORD or size % WORD)
            data.append((address, size | 1 << 63 if bytes_ else size // WORD))
        self._driver.fill(self._out, 0, 4, 2)
        for first in range(0, len(data), MOST_GAPS):
            part = data[first : first + MOST_GAPS]
            table = (ctypes.c_uint64 * (2 * MOST_GAPS))(*(n for one in part for n in one))
            blocks = min(self._grid(max(count & ~(1 << 63) for _, count in part)), self._blocks)
            given = [table, ctypes.c_uint64(key), ctypes.c_uint64(self._out)]
            self._driver.launch(self._gaps, (blocks, len(part), 1), _UNIT_THREADS, 0, given)

    def gaps_digest(self) -> int:
        """The digest that was queued last. Waits for the device; nothing else is asked of these kernels between."""
        return int(struct.unpack("<Q", self._driver.download(self._out, WORD))[0])

    def renew(self, address: int, copied: int, size: int, turn: int, before: int, now: int) -> None:
        """Queue replacing a sixteenth of a buffer of whole words, at places that only the key `now` tells.

        The buffer is a copy of `copied`, but for what was replaced under the key `before`, which is undone; what
        replaces is what lies `turn` bytes further on there, whole words. The key 0 replaces nothing.
        """
        words = size // WORD
        given = [ctypes.c_uint64(n) for n in (address, copied, words, turn // WORD, before, now)]
        grid = self._grid(-(-words // SECTOR_WORDS))
        self._driver.launch(self._renew, (grid, 1, 1), _UNIT_THREADS, 0, given)

    def _sums(self, request: Sequence[tuple[ctypes.c_void_p, int, list[ctypes.c_uint64]]]) -> list[int]:
        """The sums of kernels, each given with the units that it goes over, and its arguments."""
        result: list[int] = []
        for first in range(0, len(request), _MOST_SUMS):
            part = request[first : first + _MOST_SUMS]
            self._driver.fill(self._out, 0, 4, 2 * len(part))
            for number, (kernel, count, given) in enumerate(part):
                out = ctypes.c_uint64(self._out + 8 * number)
                self._driver.launch(kernel, (self._grid(count), 1, 1), _UNIT_THREADS, 0, [*given, out])
            self._driver.synchronize()
            data = bytes(self._driver.download(self._out, 8 * len(part)))
            result += struct.unpack(f"<{len(part)}Q", data)
        return result

    def _grid(self, count: int) -> int:
        """Blocks of a kernel that goes over so many units."""
        return max(1, min(-(-count // _UNIT_THREADS), _UNIT_BLOCKS * self._blocks))

    def check_health(self, seed: int) -> str:
        """Add numbers on the device; '' if the sums are right, else what is wrong."""
        chance = random.Random(seed)
        a, b = ([chance.randrange(1 << 31) for _ in range(_CANARY_ELEMENTS)] for _ in range(2))
        pack = struct.Struct(f"<{_CANARY_ELEMENTS}I")
        size, driver = pack.size, self._driver
        where = [self._memory + n * size for n in range(3)]
        driver.upload(where[0], pack.pack(*a))
        driver.upload(where[1], pack.pack(*b))
        driver.fill(where[2], 0xFF, 1, size)
        arguments = [*(ctypes.c_uint64(w) for w in where), ctypes.c_uint32(_CANARY_ELEMENTS)]
        driver.launch(self._add, (_CANARY_ELEMENTS // 128, 1, 1), 128, 0, arguments)
        driver.synchronize()
        got = pack.unpack(driver.download(where[2], size))
        wrong = sum(g != (x + y) % 2**32 for g, x, y in zip(got, a, b, strict=True))
        if wrong:
            return f"{wrong} of {_CANARY_ELEMENTS} sums are wrong"
        return self._watching_problem(where[0], size, chance)

    def _watching_problem(self, address: int, size: int, chance: random.Random) -> str:
        """The problem of the kernels that watch a buffer, shown on one whose copy is rotated; '' for none."""
        driver, key, at = self._driver, chance.getrandbits(64), address + size
        for late in (0, 1):  # over words, then over bytes
            length = size - WORD * late
            turn = WORD * chance.randrange(1, length // WORD) + late
            driver.copy(at + late, address + turn, length - turn)
            driver.copy(at + late + length - turn, address, turn)
            if self.differ(at + late, address, length, turn):
                return "equal buffers are said to differ"
            before = self.digest(at + late, length, key)
            driver.fill(at + turn, driver.download(at + turn, 1)[0] ^ 1, 1, 1)
            if not self.differ(at + late, address, length, turn):
                return "a changed byte is not seen"
            if self.digest(at + late, length, key) == before:
                return "a changed byte does not change a digest"
        return ""
