"""Torch allocates from the judge's memory while launches are recorded: their outputs then lie where the judge reads.

What would otherwise be copied there, in every window, is work that a candidate could leave out by writing its
outputs there itself. Runs in the cell.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

_LIBRARY = "libcuda.so.1"
_ALIGN = 512
_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: memory may be allocated while something is recorded."""
SLACK_BYTES = 64 << 20
"""Torch asks for 2 or 20 MiB at once, and divides these."""
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_Release = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class OutputPool:
    """A pool of torch's in `block`; beyond its end, memory is the driver's."""

    def __init__(self, block: torch.Tensor) -> None:
        """Raises `RuntimeError`, `AttributeError` or `TypeError` where torch has no such pools."""
        self._driver = ctypes.CDLL(_LIBRARY)
        self._next: int = block.data_ptr()
        self._end = self._next + int(block.numel())
        # Torch keeps addresses of these functions alone, and may call them as long as the process lives.
        self._functions = _Allocate(self._allocate), _Release(self._release)
        _kept.append(self)
        addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in self._functions]
        make: Any = torch._C._cuda_customAllocator
        self._allocator = make(*addresses)
        self._pool = torch.cuda.MemPool(self._allocator)
        self.id = self._pool.id

    def fill(self, sizes: Sequence[int], stream: torch.cuda.Stream) -> None:
        """Ask for all that will be needed on this stream now, where nothing is recorded yet."""
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(self._pool):
            held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        del held

    def _allocate(self, size: int, device: int, stream: int) -> int:
        if self._next + size <= self._end:
            found = self._next
            self._next += -(-size // _ALIGN) * _ALIGN
            return found
        mode, address = ctypes.c_int(_RELAXED), ctypes.c_uint64()
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size))
        self._driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        return int(address.value)

    def _release(self, address: int, size: int, device: int, stream: int) -> None:
        """The process ends soon."""


_kept: list[OutputPool] = []


def open_output_pool(
    block: torch.Tensor, sizes: Sequence[int], stream: torch.cuda.Stream
) -> OutputPool | None:
    """A pool that is `fill`ed, or None where torch has none."""
    with suppress(RuntimeError, AttributeError, TypeError, OSError):
        pool = OutputPool(block)
        pool.fill(sizes, stream)
        return pool
    return None
