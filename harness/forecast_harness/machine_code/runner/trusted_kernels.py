"""The runner's own kernels, in PTX: a known addition, a pause, some that watch or compare buffers, and one that
overwrites shared memory."""

from __future__ import annotations

import ctypes
import math
import random
import struct
from collections.abc import Sequence

from forecast_harness.machine_code.runner.driver import (
    ATTRIBUTE_MULTIPROCESSORS,
    ATTRIBUTE_SHARED_OPT_IN,
    CudaDriver,
)
from forecast_harness.machine_code.runner.error_kernels import (
    COMPARED_TYPES,
    element_size,
    error_kernel_name,
    error_kernel_text,
)

_HEADER = ".version 7.0\n.target sm_80\n.address_size 64\n"
_ADD = """
.visible .entry trusted_add(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 n)
{
  .reg .pred %p; .reg .b32 %r<8>; .reg .b64 %d<8>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  ld.param.u32 %r5, [n];
  setp.ge.u32 %p, %r4, %r5;
  @%p bra done;
  ld.param.u64 %d1, [a]; ld.param.u64 %d2, [b]; ld.param.u64 %d3, [c];
  cvta.to.global.u64 %d1, %d1; cvta.to.global.u64 %d2, %d2; cvta.to.global.u64 %d3, %d3;
  mul.wide.u32 %d4, %r4, 4;
  add.u64 %d1, %d1, %d4; add.u64 %d2, %d2, %d4; add.u64 %d3, %d3, %d4;
  ld.global.u32 %r6, [%d1]; ld.global.u32 %r7, [%d2];
  add.u32 %r6, %r6, %r7;
  st.global.u32 [%d3], %r6;
done:
  ret;
}
"""
_PAUSE = """
.visible .entry trusted_pause(.param .u64 cycles)
{
  .reg .pred %p; .reg .b64 %d<5>;
  ld.param.u64 %d1, [cycles];
  mov.u64 %d2, %clock64;
wait:
  mov.u64 %d3, %clock64;
  sub.u64 %d4, %d3, %d2;
  setp.lt.u64 %p, %d4, %d1;
  @%p bra wait;
  ret;
}
"""
_OVERWRITE = """
.extern .shared .align 16 .b8 room[];
.visible .entry trusted_overwrite(.param .u32 bytes, .param .u32 value)
{
  .reg .pred %p; .reg .b32 %r<8>;
  ld.param.u32 %r1, [bytes]; ld.param.u32 %r2, [value];
  mov.u32 %r3, %tid.x; shl.b32 %r3, %r3, 2;
  mov.u32 %r4, %ntid.x; shl.b32 %r4, %r4, 2;
  mov.u32 %r5, room;
again:
  setp.ge.u32 %p, %r3, %r1;
  @%p bra done;
  add.u32 %r6, %r5, %r3;
  st.volatile.shared.u32 [%r6], %r2;
  add.u32 %r3, %r3, %r4;
  bra again;
done:
  ret;
}
"""
_EACH_UNIT = """
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mov.u32 %r4, %nctaid.x;
  mul.wide.u32 %d1, %r1, %r2; cvt.u64.u32 %d2, %r3; add.u64 %d1, %d1, %d2;
  mul.wide.u32 %d2, %r2, %r4;
  mov.u64 %d3, 0;
"""
"""Of a kernel over bytes or words: %d1 is a thread's first, %d2 the step to its next, %d3 what it has summed."""
_WORD = 8
"""Bytes of a word: kernels over words take an eighth of the time, and addresses and sizes that are multiples of it."""


def _suffix(unit: int) -> str:
    return "_words" if unit == _WORD else ""


def _load(unit: int, base: str, index: str, into: str) -> str:
    """Of one byte or word; %d11 is lost."""
    if unit == _WORD:
        return f"shl.b64 %d11, {index}, 3; add.u64 %d11, {base}, %d11; ld.global.u64 {into}, [%d11];"
    return f"add.u64 %d11, {base}, {index}; ld.global.u8 %r5, [%d11]; cvt.u64.u32 {into}, %r5;"


def _compare_text(unit: int) -> str:
    """Counts units of one buffer that are not those of another, rotated by `turn` units."""
    return f"""
.visible .entry trusted_compare{_suffix(unit)}(.param .u64 a, .param .u64 b, .param .u64 size, .param .u64 turn,
  .param .u64 out)
{{
  .reg .pred %p; .reg .b32 %r<6>; .reg .b64 %d<13>;
  {_EACH_UNIT}
  ld.param.u64 %d4, [a]; ld.param.u64 %d5, [b]; ld.param.u64 %d6, [size]; ld.param.u64 %d7, [turn];
  ld.param.u64 %d8, [out];
  cvta.to.global.u64 %d4, %d4; cvta.to.global.u64 %d5, %d5; cvta.to.global.u64 %d8, %d8;
again:
  setp.ge.u64 %p, %d1, %d6;
  @%p bra done;
  {_load(unit, "%d4", "%d1", "%d9")}
  add.u64 %d10, %d1, %d7;
  setp.ge.u64 %p, %d10, %d6;
  @%p sub.u64 %d10, %d10, %d6;
  {_load(unit, "%d5", "%d10", "%d12")}
  setp.ne.u64 %p, %d9, %d12;
  @%p add.u64 %d3, %d3, 1;
  add.u64 %d1, %d1, %d2;
  bra again;
done:
  setp.eq.u64 %p, %d3, 0;
  @%p bra end;
  red.global.add.u64 [%d8], %d3;
end:
  ret;
}}
"""


_MIX = """
  shr.u64 %d10, %d9, 30; xor.b64 %d9, %d9, %d10; mul.lo.u64 %d9, %d9, 0xBF58476D1CE4E5B9;
  shr.u64 %d10, %d9, 27; xor.b64 %d9, %d9, %d10; mul.lo.u64 %d9, %d9, 0x94D049BB133111EB;
  shr.u64 %d10, %d9, 31; xor.b64 %d9, %d9, %d10;
"""
"""Of %d9, as splitmix64 does (Steele, Lea and Flood, 2014); %d10 is lost."""


def _digest_text(unit: int) -> str:
    """Sums what each unit and its place are mixed to."""
    return f"""
.visible .entry trusted_digest{_suffix(unit)}(.param .u64 a, .param .u64 size, .param .u64 key, .param .u64 out)
{{
  .reg .pred %p; .reg .b32 %r<6>; .reg .b64 %d<12>;
  {_EACH_UNIT}
  ld.param.u64 %d4, [a]; ld.param.u64 %d5, [size]; ld.param.u64 %d6, [key]; ld.param.u64 %d7, [out];
  cvta.to.global.u64 %d4, %d4; cvta.to.global.u64 %d7, %d7;
again:
  setp.ge.u64 %p, %d1, %d5;
  @%p bra done;
  {_load(unit, "%d4", "%d1", "%d8")}
  mad.lo.u64 %d9, %d1, 0x9E3779B97F4A7C15, %d6; xor.b64 %d9, %d9, %d8;
  {_MIX}
  add.u64 %d3, %d3, %d9;
  add.u64 %d1, %d1, %d2;
  bra again;
done:
  red.global.add.u64 [%d7], %d3;
  ret;
}}
"""


# One key alone could be told from one word whose contents are known.
_MASK = f"""
.visible .entry trusted_mask(.param .u64 a, .param .u64 count, .param .u64 key, .param .u64 other)
{{
  .reg .pred %p; .reg .b32 %r<6>; .reg .b64 %d<13>;
  {_EACH_UNIT}
  ld.param.u64 %d4, [a]; ld.param.u64 %d5, [count]; ld.param.u64 %d6, [key]; ld.param.u64 %d7, [other];
  cvta.to.global.u64 %d4, %d4;
again:
  setp.ge.u64 %p, %d1, %d5;
  @%p bra done;
  mad.lo.u64 %d9, %d1, 0x9E3779B97F4A7C15, %d6;
  {_MIX}
  add.u64 %d9, %d9, %d7;
  {_MIX}
  shl.b64 %d11, %d1, 3; add.u64 %d11, %d4, %d11;
  ld.global.u64 %d12, [%d11]; xor.b64 %d12, %d12, %d9; st.global.u64 [%d11], %d12;
  add.u64 %d1, %d1, %d2;
  bra again;
done:
  ret;
}}
"""
"""Masks words with noise of two keys; a second time, the words are as before."""

_CANARY_ELEMENTS = 4096
_OVERWRITE_THREADS = 1024
_UNIT_THREADS, _UNIT_BLOCKS = 512, 4
"""Of kernels over bytes or words: threads of a block, and most blocks of a multiprocessor."""
_MOST_SUMS = 64
"""That are waited for together."""
_ERROR_WORDS = 3
"""That a comparison of elements raises."""
_LEAST_SCALE = 1e-30
"""Of values that are all zero."""
_PAGE_BYTES = 2 << 20
"""Of the device's memory: what an allocation leaves of its last page would be anybody's."""


class TrustedKernels:
    """Kernels of our own on one device. Raises `DriverError` where the device does not take them."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

        made = self._made
        self._add, self._pause = made(_ADD, "trusted_add"), made(_PAUSE, "trusted_pause")
        self._overwrite = made(_OVERWRITE, "trusted_overwrite")
        self._compare = {u: made(_compare_text(u), f"trusted_compare{_suffix(u)}") for u in (1, _WORD)}
        self._digest = {u: made(_digest_text(u), f"trusted_digest{_suffix(u)}") for u in (1, _WORD)}
        self._mask = made(_MASK, "trusted_mask")
        self._error: dict[str, ctypes.c_void_p] = {}
        self._shared = driver.attribute(ATTRIBUTE_SHARED_OPT_IN)
        self._blocks = driver.attribute(ATTRIBUTE_MULTIPROCESSORS)
        driver.allow(self._overwrite, self._shared, 1)
        self._memory = driver.allocate(_PAGE_BYTES)
        self._out = self._memory + _PAGE_BYTES - 8 * _MOST_SUMS

    def _made(self, text: str, name: str) -> ctypes.c_void_p:
        driver = self._driver
        return driver.function(driver.load((_HEADER + text).encode() + b"\0"), name)

    def pause(self, cycles: int) -> None:
        """Queue a pause of so many clock cycles."""
        self._driver.launch(self._pause, (1, 1, 1), 1, 0, [ctypes.c_uint64(cycles)])

    def overwrite(self, value: int) -> None:
        """Queue overwriting the shared memory of every multiprocessor and these kernels' own memory.

        What a launch left there is gone.
        """
        self._driver.fill(self._memory, value & 255, 1, _PAGE_BYTES)
        arguments = [ctypes.c_uint32(self._shared), ctypes.c_uint32(value)]
        self._driver.launch(
            self._overwrite, (2 * self._blocks, 1, 1), _OVERWRITE_THREADS, self._shared, arguments
        )

    def differ(self, address: int, other: int, size: int, turn: int) -> bool:
        """Whether a buffer is not another one, rotated by `turn` bytes. Waits for the device."""
        unit = _WORD if not any(n % _WORD for n in (address, other, size, turn)) else 1
        given = [ctypes.c_uint64(n) for n in (address, other, size // unit, turn // unit)]
        return self._sums([(self._compare[unit], size // unit, given)]) != [0]

    def mask(self, address: int, size: int, keys: tuple[int, int]) -> None:
        """Queue masking whole words, which tell nothing without the keys then; a second time, unmasking them."""
        count = size // _WORD
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
        asked: list[tuple[ctypes.c_void_p, int, list[ctypes.c_uint64]]] = []
        owners: list[int] = []
        for number, (address, size) in enumerate(buffers):
            whole = 0 if address % _WORD else size // _WORD
            rest = address + whole * _WORD
            for unit, first, count in ((_WORD, address, whole), (1, rest, size - whole * _WORD)):
                if count:
                    given = [ctypes.c_uint64(n) for n in (first, count, key)]
                    asked.append((self._digest[unit], count, given))
                    owners.append(number)
        found = [0] * len(buffers)
        for number, value in zip(owners, self._sums(asked), strict=True):
            found[number] = (found[number] + value) % (1 << 64)
        return found

    def _sums(self, asked: Sequence[tuple[ctypes.c_void_p, int, list[ctypes.c_uint64]]]) -> list[int]:
        """What kernels add up: each with the units that it goes over, and its arguments."""
        found: list[int] = []
        for first in range(0, len(asked), _MOST_SUMS):
            part = asked[first : first + _MOST_SUMS]
            self._driver.fill(self._out, 0, 4, 2 * len(part))
            for number, (kernel, count, given) in enumerate(part):
                out = ctypes.c_uint64(self._out + 8 * number)
                self._driver.launch(kernel, (self._grid(count), 1, 1), _UNIT_THREADS, 0, [*given, out])
            self._driver.synchronize()
            data = bytes(self._driver.download(self._out, 8 * len(part)))
            found += struct.unpack(f"<{len(part)}Q", data)
        return found

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
        """What is wrong with the kernels that watch a buffer, shown on one whose copy is rotated; '' for nothing."""
        driver, key, at = self._driver, chance.getrandbits(64), address + size
        for late in (0, 1):  # over words, then over bytes
            length = size - _WORD * late
            turn = _WORD * chance.randrange(1, length // _WORD) + late
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
