"""The runner's own kernels, in PTX: a known addition, a pause, and one that overwrites shared memory."""

from __future__ import annotations

import ctypes
import random
import struct

from forecast_harness.machine_code.runner.driver import (
    ATTRIBUTE_MULTIPROCESSORS,
    ATTRIBUTE_SHARED_OPT_IN,
    CudaDriver,
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
_CANARY_ELEMENTS = 4096
_OVERWRITE_THREADS = 1024
_PAGE_BYTES = 2 << 20
"""Of the device's memory: what an allocation leaves of its last page would be anybody's."""


class TrustedKernels:
    """Kernels of our own on one device. Raises `DriverError` where the device does not take them."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver

        def made(text: str, name: str) -> ctypes.c_void_p:
            return driver.function(driver.load((_HEADER + text).encode() + b"\0"), name)

        self._add, self._pause = made(_ADD, "trusted_add"), made(_PAUSE, "trusted_pause")
        self._overwrite = made(_OVERWRITE, "trusted_overwrite")
        self._shared = driver.attribute(ATTRIBUTE_SHARED_OPT_IN)
        self._blocks = driver.attribute(ATTRIBUTE_MULTIPROCESSORS)
        driver.allow(self._overwrite, self._shared, 1)
        self._memory = driver.allocate(_PAGE_BYTES)

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
        return f"{wrong} of {_CANARY_ELEMENTS} sums are wrong" if wrong else ""
