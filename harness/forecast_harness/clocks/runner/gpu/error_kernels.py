"""Kernels of the runner's own, in PTX, that compare results with those of a right program, element by element.

One for each type of elements. Each takes two addresses, a count, and an address for three words that it raises: the
bits of the largest |a - b| and of the largest |b| where both are finite, as float32, and how many elements of a thread
are finite in only one of them. Non-negative floats are ordered as their bits are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    """PTX of the kernel for one type, without its header."""
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
