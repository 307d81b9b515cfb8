"""Memory of a device (or a host) that a judge owns and one cell maps: for windows, see `LaunchBatches`.

The driver's virtual memory calls are used, whose memory is handed over as a descriptor: between users and
namespaces that share nothing else.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from forecast_harness.sandbox.wire import SharedMemory, map_shared

SLACK_BYTES = 64 << 20
"""Torch asks for 2 or 20 MiB at once, and divides these."""
LIBRARY = "libcuda.so.1"
_PINNED, _DESCRIPTOR, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE and
CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""


class ExportError(RuntimeError):
    """The device's driver does not share memory in this way; the text says which call failed."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _DeviceBytes:
    """Bytes at an address of a device, for `torch.as_tensor`."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class ExportedMemory:
    """Bytes of a device in `tensor` (uint8), and `fd`, the descriptor with which another process maps them."""

    def __init__(self, size: int, device: str) -> None:
        """At least `size` bytes on torch's `device`. Raises `ExportError`, `OSError`."""
        if device == "cpu":
            memory = SharedMemory(size)
            self.fd, self.size = os.dup(memory.fd), memory.size
            memory.forget_descriptor()
            self.tensor = torch.frombuffer(memory.data, dtype=torch.uint8)
            return
        index = _prepare(device)
        properties = _AllocationProperties(_PINNED, _DESCRIPTOR, _Location(_ON_DEVICE, index))
        step = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(properties), ctypes.c_int(0))
        self.size = -(-size // step.value) * step.value
        handle, fd = ctypes.c_ulonglong(), ctypes.c_int()
        _call(
            "cuMemCreate",
            ctypes.byref(handle),
            ctypes.c_size_t(self.size),
            ctypes.byref(properties),
            ctypes.c_ulonglong(0),
        )
        _call(
            "cuMemExportToShareableHandle",
            ctypes.byref(fd),
            handle,
            ctypes.c_int(_DESCRIPTOR),
            ctypes.c_ulonglong(0),
        )
        self.fd = fd.value
        self.tensor = _map_memory(handle, self.size, index)

    def forget_descriptor(self) -> None:
        """Close `fd`, once the other process has mapped the memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def import_memory(fd: int, size: int, device: str) -> torch.Tensor:
    """The bytes behind a descriptor that another process exported, of its `size`. Raises `ExportError`."""
    if device == "cpu":
        return torch.frombuffer(map_shared(fd, size), dtype=torch.uint8)
    index = _prepare(device)
    handle = ctypes.c_ulonglong()
    _call(
        "cuMemImportFromShareableHandle",
        ctypes.byref(handle),
        ctypes.c_void_p(fd),
        ctypes.c_int(_DESCRIPTOR),
    )
    return _map_memory(handle, size, index)


def _prepare(device: str) -> int:
    """Make torch's context of the device this thread's; returns the device's number."""
    torch.zeros(1, device=device)
    return int(torch.cuda.current_device())


def _map_memory(handle: ctypes.c_ulonglong, size: int, index: int) -> torch.Tensor:
    address, none = ctypes.c_uint64(), ctypes.c_ulonglong(0)
    _call(
        "cuMemAddressReserve",
        ctypes.byref(address),
        ctypes.c_size_t(size),
        ctypes.c_size_t(0),
        ctypes.c_uint64(0),
        none,
    )
    _call("cuMemMap", address, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, none)
    access = _Access(_Location(_ON_DEVICE, index), _READ_WRITE)
    _call("cuMemSetAccess", address, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
    _call("cuMemRelease", handle)  # the mapping keeps it
    return torch.as_tensor(_DeviceBytes(address.value, size), device=f"cuda:{index}")


def _call(name: str, *arguments: Any) -> None:
    try:
        code = int(getattr(ctypes.CDLL(LIBRARY), name)(*arguments))
    except (OSError, AttributeError) as error:
        raise ExportError(f"{name}: {error}") from error
    if code:
        raise ExportError(f"{name}: error {code} of the driver")
