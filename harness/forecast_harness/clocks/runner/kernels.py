"""The runner's own kernels: a known addition, a pause, some that watch, compare or renew buffers, and one that
overwrites shared memory."""

from __future__ import annotations

import ctypes
import math
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forecast_harness.clocks.runner.driver import (
    ATTRIBUTE_MULTIPROCESSORS,
    ATTRIBUTE_SHARED_OPT_IN,
    CudaDriver,
)

HEADER = ".version 7.0\n.target sm_80\n.address_size 64\n"
ADD = """
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
PAUSE = """
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
OVERWRITE = """
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
"""Head of a kernel over bytes or words: %d1 is a thread's first, %d2 the step to its next, %d3 its sum so far."""
WORD = 8
"""Bytes of a word: kernels over words take an eighth of the time, and addresses and sizes that are multiples of it."""


def suffix(unit: int) -> str:
    """The end of a kernel's name, for those over bytes or over words."""
    return "_words" if unit == WORD else ""


def _load(unit: int, base: str, index: str, into: str) -> str:
    """PTX that loads one byte or word; %d11 is lost."""
    if unit == WORD:
        return f"shl.b64 %d11, {index}, 3; add.u64 %d11, {base}, %d11; ld.global.u64 {into}, [%d11];"
    return f"add.u64 %d11, {base}, {index}; ld.global.u8 %r5, [%d11]; cvt.u64.u32 {into}, %r5;"


def compare_text(unit: int) -> str:
    """Counts units of one buffer that are not those of another, rotated by `turn` units."""
    return f"""
.visible .entry trusted_compare{suffix(unit)}(.param .u64 a, .param .u64 b, .param .u64 size, .param .u64 turn,
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
"""Mixing of %d9, as splitmix64 does (Steele, Lea and Flood, 2014); %d10 is lost."""


def _shuffled_sum(distance: int) -> str:
    halves = " ".join(
        f"shfl.sync.down.b32 {into}, {half}, {distance}, 31, 0xffffffff;"
        for into, half in (("%r3", "%r1"), ("%r4", "%r2"))
    )
    return f"mov.b64 {{%r1, %r2}}, %d3; {halves} mov.b64 %d9, {{%r3, %r4}}; add.u64 %d3, %d3, %d9;"


_HALVED_SUMS = "\n  ".join(_shuffled_sum(distance) for distance in (16, 8, 4, 2, 1))
# All additions to one address follow each other: a thousand blocks take a millisecond for one of each thread.
_ADD_SUMS = f"""bar.warp.sync 0xffffffff;
  {_HALVED_SUMS}
  mov.u32 %r1, %laneid; setp.ne.u32 %p, %r1, 0;
  @%p bra end;
  setp.eq.u64 %p, %d3, 0;
  @%p bra end;
  red.global.add.u64 [%d7], %d3;
end:
  ret;"""
"""Adds the sums %d3 of a warp's threads together, and what they come to, unless it is 0, to the word at %d7."""


def digest_text(unit: int) -> str:
    """Sums what each unit and its place are mixed to."""
    return f"""
.visible .entry trusted_digest{suffix(unit)}(.param .u64 a, .param .u64 size, .param .u64 key, .param .u64 out)
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
  {_ADD_SUMS}
}}
"""


MOST_GAPS = 32
"""Gaps in one launch of the kernel that watches them: they are among its parameters, where nothing can write."""
# A gap is an address and a count of words, or of bytes with the topmost bit set; blocks along y take one each.
GAPS = f"""
.visible .entry trusted_gaps(.param .align 8 .b8 gaps[{16 * MOST_GAPS}], .param .u64 key, .param .u64 out)
{{
  .reg .pred %p, %bytes; .reg .b32 %r<6>; .reg .b64 %d<16>;
  {_EACH_UNIT}
  mov.u32 %r5, %ctaid.y; mul.wide.u32 %d12, %r5, 16; mov.b64 %d13, gaps; add.u64 %d12, %d12, %d13;
  ld.param.u64 %d4, [%d12]; ld.param.u64 %d5, [%d12+8]; ld.param.u64 %d6, [key]; ld.param.u64 %d7, [out];
  cvta.to.global.u64 %d4, %d4; cvta.to.global.u64 %d7, %d7;
  setp.lt.s64 %bytes, %d5, 0;
  and.b64 %d5, %d5, 0x7FFFFFFFFFFFFFFF;
again:
  setp.ge.u64 %p, %d1, %d5;
  @%p bra done;
  @%bytes bra byte;
  {_load(WORD, "%d4", "%d1", "%d8")}
  bra mix;
byte:
  {_load(1, "%d4", "%d1", "%d8")}
mix:
  mad.lo.u64 %d9, %d11, 0x9E3779B97F4A7C15, %d6; xor.b64 %d9, %d9, %d8;
  {_MIX}
  add.u64 %d3, %d3, %d9;
  add.u64 %d1, %d1, %d2;
  bra again;
done:
  {_ADD_SUMS}
}}
"""
"""Sums what each unit of several buffers and its address are mixed to."""
SECTOR_WORDS = 4
"""Words that memory is read and written by."""
_RENEWED_PART = 16
"""One sector in so many is replaced, at places that depend on the key alone."""


def _choose_sector(key: str, into: str) -> str:
    """Whether the sector %d1 is one of a key's; none is of the key 0."""
    return f"""mad.lo.u64 %d9, %d1, 0x9E3779B97F4A7C15, {key};
  {_MIX}
  and.b64 %d9, %d9, {_RENEWED_PART - 1}; setp.eq.u64 {into}, %d9, 0; setp.ne.and.u64 {into}, {key}, 0, {into};"""


RENEW = f"""
.visible .entry trusted_renew(.param .u64 a, .param .u64 b, .param .u64 words, .param .u64 turn,
  .param .u64 before, .param .u64 now)
{{
  .reg .pred %p, %old, %new; .reg .b32 %r<6>; .reg .b64 %d<17>;
  {_EACH_UNIT}
  ld.param.u64 %d4, [a]; ld.param.u64 %d5, [b]; ld.param.u64 %d6, [words]; ld.param.u64 %d7, [turn];
  ld.param.u64 %d8, [before]; ld.param.u64 %d12, [now];
  cvta.to.global.u64 %d4, %d4; cvta.to.global.u64 %d5, %d5;
again:
  shl.b64 %d13, %d1, 2;
  setp.ge.u64 %p, %d13, %d6;
  @%p bra done;
  {_choose_sector("%d8", "%old")}
  {_choose_sector("%d12", "%new")}
  or.pred %p, %old, %new;
  @!%p bra next;
  selp.b64 %d14, %d7, 0, %new;
  mov.u32 %r5, 0;
word:
  setp.ge.u64 %p, %d13, %d6;
  @%p bra next;
  add.u64 %d15, %d13, %d14;
  setp.ge.u64 %p, %d15, %d6;
  @%p sub.u64 %d15, %d15, %d6;
  {_load(WORD, "%d5", "%d15", "%d16")}
  shl.b64 %d11, %d13, 3; add.u64 %d11, %d4, %d11; st.global.u64 [%d11], %d16;
  add.u64 %d13, %d13, 1; add.u32 %r5, %r5, 1;
  setp.lt.u32 %p, %r5, {SECTOR_WORDS};
  @%p bra word;
next:
  add.u64 %d1, %d1, %d2;
  bra again;
done:
  ret;
}}
"""
"""A kernel that makes a buffer, a copy but for the sectors of one key, a copy but for those of another, which become
the words `turn` further on."""


# A single key could be computed from one word with known contents.
MASK = f"""
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


_FROM_HALF = "cvt.f32.f16 {into}, %h1;"


@dataclass(frozen=True)
class _Element:
    """How an element at %d10 becomes a float32."""

    size: int
    """Bytes."""
    text: str


def _integer(size: int, kind: str) -> _Element:
    wide = "s32" if kind[0] == "s" else "u32"
    return _Element(size, f"ld.global.{kind} %r5, [%d10]; cvt.rn.f32.{wide} {{into}}, %r5;")


_ELEMENTS: Mapping[str, _Element] = {
    "float32": _Element(4, "ld.global.f32 {into}, [%d10];"),
    "float64": _Element(8, "ld.global.f64 %g1, [%d10]; cvt.rn.f32.f64 {into}, %g1;"),
    "float16": _Element(2, f"ld.global.b16 %h1, [%d10]; {_FROM_HALF}"),
    "bfloat16": _Element(2, "ld.global.u16 %r5, [%d10]; shl.b32 %r5, %r5, 16; mov.b32 {into}, %r5;"),
    # The upper half of a float16.
    "float8_e5m2": _Element(
        1, f"ld.global.u8 %r5, [%d10]; shl.b32 %r5, %r5, 8; cvt.u16.u32 %h1, %r5; {_FROM_HALF}"
    ),
    # A float16 of a 256th of the value; the factor is the same in all, so that a ratio does not change.
    "float8_e4m3fn": _Element(
        1,
        "ld.global.u8 %r5, [%d10]; and.b32 %r6, %r5, 0x7f; shl.b32 %r6, %r6, 7; and.b32 %r5, %r5, 0x80; "
        f"shl.b32 %r5, %r5, 8; or.b32 %r5, %r5, %r6; cvt.u16.u32 %h1, %r5; {_FROM_HALF}",
    ),
    "bool": _integer(1, "u8"),
    "uint8": _integer(1, "u8"),
    "int8": _integer(1, "s8"),
    "int16": _integer(2, "s16"),
    "uint16": _integer(2, "u16"),
    "int32": _integer(4, "s32"),
    "uint32": _integer(4, "u32"),
    "int64": _Element(8, "ld.global.s64 %d11, [%d10]; cvt.rn.f32.s64 {into}, %d11;"),
    "uint64": _Element(8, "ld.global.u64 %d11, [%d10]; cvt.rn.f32.u64 {into}, %d11;"),
}
COMPARED_TYPES = frozenset(_ELEMENTS)
"""Types whose elements are compared by value; of others, only equal bytes are right."""


def element_size(dtype: str) -> int:
    """Bytes of one element of a compared type."""
    return _ELEMENTS[dtype].size


def error_kernel_name(dtype: str) -> str:
    """The symbol in the text."""
    return f"trusted_error_{dtype}"


def error_kernel_text(dtype: str) -> str:
    """PTX of the kernel that compares results of one type with those of a right program, without its header.

    It takes two addresses, a count, and an address for three words that it raises: the bits of the largest |a - b| and
    of the largest |b| where both are finite, as float32, and how many elements of a thread are finite in only one of
    them. Non-negative floats are ordered as their bits are.
    """
    element = _ELEMENTS[dtype]

    def load(base: str, into: str) -> str:
        address = f"mul.lo.u64 %d10, %d1, {element.size}; add.u64 %d10, {base}, %d10;"
        return f"{address} {element.text.format(into=into)}"

    return f"""
.visible .entry {error_kernel_name(dtype)}(.param .u64 a, .param .u64 b, .param .u64 count, .param .u64 out)
{{
  .reg .pred %p; .reg .pred %q; .reg .pred %s;
  .reg .b16 %h<2>; .reg .b32 %r<9>; .reg .f32 %f<6>; .reg .f64 %g<2>; .reg .b64 %d<12>;
  mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x; mov.u32 %r4, %nctaid.x;
  mul.wide.u32 %d1, %r1, %r2; cvt.u64.u32 %d2, %r3; add.u64 %d1, %d1, %d2;
  mul.wide.u32 %d2, %r2, %r4;
  ld.param.u64 %d4, [a]; ld.param.u64 %d5, [b]; ld.param.u64 %d6, [count]; ld.param.u64 %d7, [out];
  cvta.to.global.u64 %d4, %d4; cvta.to.global.u64 %d5, %d5; cvta.to.global.u64 %d7, %d7;
  mov.f32 %f3, 0f00000000; mov.f32 %f4, 0f00000000; mov.u32 %r7, 0;
again:
  setp.ge.u64 %p, %d1, %d6;
  @%p bra done;
  {load("%d4", "%f1")}
  {load("%d5", "%f2")}
  testp.finite.f32 %p, %f1;
  testp.finite.f32 %q, %f2;
  xor.pred %s, %p, %q;
  @%s add.u32 %r7, %r7, 1;
  and.pred %s, %p, %q;
  @!%s bra next;
  sub.f32 %f5, %f1, %f2; abs.f32 %f5, %f5; max.f32 %f3, %f3, %f5;
  abs.f32 %f5, %f2; max.f32 %f4, %f4, %f5;
next:
  add.u64 %d1, %d1, %d2;
  bra again;
done:
  bar.warp.sync 0xffffffff;
  mov.b32 %r5, %f3; mov.b32 %r6, %f4;
  redux.sync.max.u32 %r5, %r5, 0xffffffff;
  redux.sync.max.u32 %r6, %r6, 0xffffffff;
  redux.sync.max.u32 %r7, %r7, 0xffffffff;
  mov.u32 %r8, %laneid; setp.ne.u32 %p, %r8, 0;
  @%p bra end;
  red.global.max.u32 [%d7], %r5;
  red.global.max.u32 [%d7+4], %r6;
  red.global.max.u32 [%d7+8], %r7;
end:
  ret;
}}
"""


# --- the kernels on a device ---


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

        compile_kernel = self._compile
        self._add, self._pause = compile_kernel(ADD, "trusted_add"), compile_kernel(PAUSE, "trusted_pause")
        self._overwrite = compile_kernel(OVERWRITE, "trusted_overwrite")
        self._compare = {u: compile_kernel(compare_text(u), f"trusted_compare{suffix(u)}") for u in (1, WORD)}
        self._digest = {u: compile_kernel(digest_text(u), f"trusted_digest{suffix(u)}") for u in (1, WORD)}
        self._mask, self._gaps = compile_kernel(MASK, "trusted_mask"), compile_kernel(GAPS, "trusted_gaps")
        self._renew = compile_kernel(RENEW, "trusted_renew")
        self._error: dict[str, ctypes.c_void_p] = {}
        self._shared_bytes = driver.attribute(ATTRIBUTE_SHARED_OPT_IN)
        self._blocks = driver.attribute(ATTRIBUTE_MULTIPROCESSORS)
        driver.allow(self._overwrite, self._shared_bytes, 1)
        self._memory = driver.allocate(_PAGE_BYTES)
        self._out = self._memory + _PAGE_BYTES - 8 * _MOST_SUMS

    def _compile(self, text: str, name: str) -> ctypes.c_void_p:
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
        arguments = [ctypes.c_uint32(self._shared_bytes), ctypes.c_uint32(value)]
        self._driver.launch(
            self._overwrite, (2 * self._blocks, 1, 1), _OVERWRITE_THREADS, self._shared_bytes, arguments
        )

    def read(self, address: int, size: int) -> None:
        """Queue a read of a buffer of whole words: the caches hold it then, and nothing that is yet to be written."""
        arguments = [ctypes.c_uint64(v) for v in (address, size // WORD, 0, self._out + 8 * (_MOST_SUMS - 1))]
        self._driver.launch(self._digest[WORD], (self._grid(size // WORD), 1, 1), _UNIT_THREADS, 0, arguments)

    def differ(self, address: int, other: int, size: int, turn: int) -> bool:
        """Whether a buffer is not another one, rotated by `turn` bytes. Waits for the device."""
        unit = WORD if not any(n % WORD for n in (address, other, size, turn)) else 1
        arguments = [ctypes.c_uint64(n) for n in (address, other, size // unit, turn // unit)]
        return self._sums([(self._compare[unit], size // unit, arguments)]) != [0]

    def mask(self, address: int, size: int, keys: tuple[int, int]) -> None:
        """Queue masking whole words, which tell nothing without the keys then; a second time, unmasking them."""
        count = size // WORD
        arguments = [ctypes.c_uint64(n) for n in (address, count, *keys)]
        self._driver.launch(self._mask, (self._grid(count), 1, 1), _UNIT_THREADS, 0, arguments)

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
            self._error[dtype] = self._compile(error_kernel_text(dtype), error_kernel_name(dtype))
        count = size // element_size(dtype)
        arguments = [ctypes.c_uint64(n) for n in (address, right, count, self._out)]
        self._driver.fill(self._out, 0, 4, _ERROR_WORDS)
        self._driver.launch(self._error[dtype], (self._grid(count), 1, 1), _UNIT_THREADS, 0, arguments)
        self._driver.synchronize()
        words = bytes(self._driver.download(self._out, 4 * _ERROR_WORDS))
        error, scale = struct.unpack_from("<2f", words)
        (unlike,) = struct.unpack_from("<I", words, 8)
        return math.inf if unlike else error / max(scale, _LEAST_SCALE)

    def digest(self, address: int, size: int, key: int) -> int:
        """64 bits of a buffer's contents, which tell nothing without the key. Waits for the device."""
        return self.digests([(address, size)], key)[0]

    def digests(self, buffers: Sequence[tuple[int, int]], key: int) -> list[int]:
        """The digests of several buffers, each by address and bytes. Waits for the device once."""
        request: list[tuple[ctypes.c_void_p, int, list[ctypes.c_uint64]]] = []
        owners: list[int] = []
        for number, (address, size) in enumerate(buffers):
            words = 0 if address % WORD else size // WORD
            rest = address + words * WORD
            for unit, first, count in ((WORD, address, words), (1, rest, size - words * WORD)):
                if count:
                    arguments = [ctypes.c_uint64(n) for n in (first, count, key)]
                    request.append((self._digest[unit], count, arguments))
                    owners.append(number)
        result = [0] * len(buffers)
        for number, value in zip(owners, self._sums(request), strict=True):
            result[number] = (result[number] + value) % (1 << 64)
        return result

    def queue_gaps(self, gaps: Sequence[tuple[int, int]], key: int) -> None:
        """Queue one digest of these buffers together, each by address and bytes; `gaps_digest` reads it."""
        entries = []
        for address, size in gaps:
            bytes_ = bool(address % WORD or size % WORD)
            entries.append((address, size | 1 << 63 if bytes_ else size // WORD))
        self._driver.fill(self._out, 0, 4, 2)
        for first in range(0, len(entries), MOST_GAPS):
            part = entries[first : first + MOST_GAPS]
            table = (ctypes.c_uint64 * (2 * MOST_GAPS))(*(n for entry in part for n in entry))
            blocks = min(self._grid(max(count & ~(1 << 63) for _, count in part)), self._blocks)
            arguments = [table, ctypes.c_uint64(key), ctypes.c_uint64(self._out)]
            self._driver.launch(self._gaps, (blocks, len(part), 1), _UNIT_THREADS, 0, arguments)

    def gaps_digest(self) -> int:
        """The digest that was queued last. Waits for the device; no other of these kernels may run in between."""
        return int(struct.unpack("<Q", self._driver.download(self._out, WORD))[0])

    def renew(self, address: int, source: int, size: int, turn: int, before: int, now: int) -> None:
        """Queue replacing a sixteenth of a buffer of whole words, at places that depend on the key `now`.

        The buffer is a copy of `source`, but for the replacements under the key `before`, which are undone; the new
        words come from `turn` bytes further on in `source`. The key 0 replaces nothing.
        """
        words = size // WORD
        arguments = [ctypes.c_uint64(n) for n in (address, source, words, turn // WORD, before, now)]
        grid = self._grid(-(-words // SECTOR_WORDS))
        self._driver.launch(self._renew, (grid, 1, 1), _UNIT_THREADS, 0, arguments)

    def _sums(self, request: Sequence[tuple[ctypes.c_void_p, int, list[ctypes.c_uint64]]]) -> list[int]:
        """The sums of kernels, each with its number of units and its arguments."""
        result: list[int] = []
        for first in range(0, len(request), _MOST_SUMS):
            part = request[first : first + _MOST_SUMS]
            self._driver.fill(self._out, 0, 4, 2 * len(part))
            for number, (kernel, count, arguments) in enumerate(part):
                out = ctypes.c_uint64(self._out + 8 * number)
                self._driver.launch(kernel, (self._grid(count), 1, 1), _UNIT_THREADS, 0, [*arguments, out])
            self._driver.synchronize()
            data = bytes(self._driver.download(self._out, 8 * len(part)))
            result += struct.unpack(f"<{len(part)}Q", data)
        return result

    def _grid(self, count: int) -> int:
        """Blocks of a kernel over so many units."""
        return max(1, min(-(-count // _UNIT_THREADS), _UNIT_BLOCKS * self._blocks))

    def check_health(self, seed: int) -> str:
        """Add numbers on the device; the fault of the sums, '' for none."""
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
        sums = pack.unpack(driver.download(where[2], size))
        wrong = sum(g != (x + y) % 2**32 for g, x, y in zip(sums, a, b, strict=True))
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
