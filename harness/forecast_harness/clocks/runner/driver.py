"""CUDA's driver API through ctypes: only the functions that the runner calls, each call checked."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

LIBRARY = "libcuda.so.1"
LIMIT_PRINTF_BYTES, LIMIT_HEAP_BYTES, LIMIT_PERSISTING_L2 = 1, 2, 6
_COOPERATIVE, _CLUSTER_DIMENSION, _CLUSTER_POLICY = 2, 4, 5
_SPREAD_CLUSTERS = 1
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14
FUNCTION_LOCAL_BYTES = 3
ATTRIBUTE_MULTIPROCESSORS, ATTRIBUTE_L2_BYTES, ATTRIBUTE_SHARED_OPT_IN = 16, 38, 97
ATTRIBUTE_MAJOR, ATTRIBUTE_MINOR = 75, 76
_CAPTURE_THREAD_LOCAL = 1
_LARGE_SHARED_BYTES = 48 << 10
_NOT_SUPPORTED = 801
STICKY_ERRORS = frozenset({214, 219, 220, 226, 700, 702, 710, 713, 714, 715, 716, 717, 718, 719, 721, 999})
"""Errors after which a context is of no more use: illegal addresses, instructions, traps and the like."""


class DriverError(RuntimeError):
    """A call of the driver failed."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name or 'error'} ({code})")
        self.call, self.code = call, code

    @property
    def sticky(self) -> bool:
        """Whether the context is lost."""
        return self.code in STICKY_ERRORS


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint32 * 16))


class _DriverLaunch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint),
    )


class CudaDriver:
    """One device's primary context, current in this thread. Raises `DriverError` and, without a driver, `OSError`."""

    def __init__(self, library: str = LIBRARY, device: int = 0) -> None:
        self._library = ctypes.CDLL(library)
        self._call("cuInit", ctypes.c_uint(0))
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        self._device = number
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._call("cuCtxSetCurrent", context)
        self.stream = self._handle("cuStreamCreate", ctypes.c_uint(0))
        """The stream of all work; it and the default stream, on which memory is copied to and from the host, wait
        for each other."""

    def _call(self, name: str, *arguments: Any) -> None:
        if code := int(getattr(self._library, name)(*arguments)):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"").decode(errors="replace"))

    def _handle(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        result = ctypes.c_void_p()
        self._call(name, ctypes.byref(result), *arguments)
        return result

    def attribute(self, which: int) -> int:
        """A fact of the device by its number in `CUdevice_attribute`."""
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(which), self._device)
        return value.value

    @property
    def device_name(self) -> str:
        """The device's name, by the driver."""
        text = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", text, ctypes.c_int(128), self._device)
        return text.value.decode(errors="replace")

    def limit(self, which: int, value: int) -> None:
        """Set a limit of the context."""
        self._call("cuCtxSetLimit", ctypes.c_int(which), ctypes.c_size_t(value))

    def set_no_l2_aside(self) -> None:
        """Set no lines of the L2 aside from here on, where a device can do so."""
        with contextlib.suppress(DriverError):
            self.limit(LIMIT_PERSISTING_L2, 0)

    def release_persisting_l2(self) -> None:
        """Give back lines of the L2 that a launch has set aside, where a device can do so."""
        with contextlib.suppress(DriverError):
            self._call("cuCtxResetPersistingL2Cache")

    # --- memory ---

    def allocate(self, size: int) -> int:
        """The address of new memory of `size` bytes."""
        result = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(result), ctypes.c_size_t(size))
        return result.value

    def free(self, address: int) -> None:
        """Give memory back."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def upload(self, address: int, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes to the device, and wait."""
        size = memoryview(data).nbytes
        if size:
            source = data if isinstance(data, bytes) else (ctypes.c_char * size).from_buffer(_writable(data))
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(size))

    def download(self, address: int, size: int) -> bytearray:
        """Bytes of the device, after all work before."""
        data = bytearray(size)
        if size:
            room = (ctypes.c_char * size).from_buffer(data)
            self._call("cuMemcpyDtoH_v2", room, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data

    def copy(self, target: int, source: int, size: int) -> None:
        """Queue a copy on the device."""
        if size:
            self._call(
                "cuMemcpyDtoDAsync_v2",
                ctypes.c_uint64(target),
                ctypes.c_uint64(source),
                ctypes.c_size_t(size),
                self.stream,
            )

    def fill(self, address: int, pattern: int, width: int, count: int) -> None:
        """Queue setting `count` elements of `width` bytes (1, 2, 4)."""
        if count:
            kind = {1: ctypes.c_ubyte, 2: ctypes.c_ushort, 4: ctypes.c_uint}[width]
            self._call(
                f"cuMemsetD{8 * width}Async",
                ctypes.c_uint64(address),
                kind(pattern),
                ctypes.c_size_t(count),
                self.stream,
            )

    # --- code ---

    def load(self, image: bytes) -> ctypes.c_void_p:
        """A module of a cubin, or of PTX text that ends in NUL."""
        return self._handle("cuModuleLoadData", image)

    def unload(self, module: ctypes.c_void_p) -> None:
        """Free a module."""
        self._call("cuModuleUnload", module)

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """A kernel of a module."""
        return self._handle("cuModuleGetFunction", module, name.encode())

    def function_attribute(self, function: ctypes.c_void_p, which: int) -> int:
        """A fact of a kernel by its number in `CUfunction_attribute`."""
        value = ctypes.c_int()
        self._call("cuFuncGetAttribute", ctypes.byref(value), ctypes.c_int(which), function)
        return value.value

    def parameter_sizes(self, function: ctypes.c_void_p) -> list[int] | None:
        """Bytes of each parameter; None where the driver does not tell, as those before 12.4."""
        if not hasattr(self._library, "cuFuncGetParamInfo"):
            return None
        result: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        info = self._library.cuFuncGetParamInfo
        while not (
            code := info(function, ctypes.c_size_t(len(result)), ctypes.byref(offset), ctypes.byref(size))
        ):
            result.append(size.value)
        if code == _NOT_SUPPORTED:
            return None
        return result

    def allow(self, function: ctypes.c_void_p, shared: int, clusters: int) -> None:
        """Permit a kernel's dynamic shared memory, in bytes, and its blocks per cluster."""
        if shared > _LARGE_SHARED_BYTES:
            self._call(
                "cuFuncSetAttribute", function, ctypes.c_int(_MAX_DYNAMIC_SHARED), ctypes.c_int(shared)
            )
        if clusters > 8:
            self._call("cuFuncSetAttribute", function, ctypes.c_int(_NON_PORTABLE_CLUSTER), ctypes.c_int(1))

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: Sequence[int],
        threads: int | Sequence[int],
        shared: int,
        arguments: Sequence[Any],
        clusters: int = 1,
        cooperative: bool = False,
    ) -> None:
        """Queue a launch; `arguments` are ctypes values, and `grid` counts clusters along its first axis.

        `threads` of a block lie along its first axis, or are three numbers.
        """
        config, attributes = _DriverLaunch(), (_LaunchAttribute * 3)()
        config.grid[:] = [grid[0] * clusters, grid[1], grid[2]]
        config.block[:] = [threads, 1, 1] if isinstance(threads, int) else list(threads)
        config.shared, config.stream = shared, self.stream
        count = 0
        if cooperative:
            attributes[count].id = _COOPERATIVE
            attributes[count].value[0] = 1
            count += 1
        if clusters != 1:
            attributes[count].id = _CLUSTER_DIMENSION
            attributes[count].value[:3] = [clusters, 1, 1]
            attributes[count + 1].id = _CLUSTER_POLICY
            attributes[count + 1].value[0] = _SPREAD_CLUSTERS
            count += 2
        config.attributes, config.attribute_count = attributes, count
        pointers = (ctypes.c_void_p * max(1, len(arguments)))()
        for n, argument in enumerate(arguments):
            pointers[n] = ctypes.addressof(argument)
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    # --- time ---

    def synchronize(self) -> None:
        """Wait for all work. Raises `DriverError` for what went wrong in it."""
        self._call("cuCtxSynchronize")

    def event(self) -> ctypes.c_void_p:
        """A new event."""
        return self._handle("cuEventCreate", ctypes.c_uint(0))

    def record(self, event: ctypes.c_void_p) -> None:
        """Queue an event."""
        self._call("cuEventRecord", event, self.stream)

    def elapsed_ms(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> float:
        """Milliseconds between two events that have passed."""
        result = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(result), start, end)
        return result.value

    # --- graphs ---

    def begin_capture(self) -> None:
        """Capture work that is queued from here on, instead of doing it."""
        self._call("cuStreamBeginCapture_v2", self.stream, ctypes.c_int(_CAPTURE_THREAD_LOCAL))

    def end_capture(self) -> ctypes.c_void_p:
        """End the capture: a graph of the captured work, ready to be launched."""
        graph = ctypes.c_void_p()
        self._call("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        result = self._handle("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
        self._call("cuGraphDestroy", graph)
        return result

    def launch_graph(self, graph: ctypes.c_void_p) -> None:
        """Queue the captured work."""
        self._call("cuGraphLaunch", graph, self.stream)

    def destroy_graph(self, graph: ctypes.c_void_p) -> None:
        """Free it."""
        self._call("cuGraphExecDestroy", graph)


def _writable(data: bytes | bytearray | memoryview) -> Any:
    view = memoryview(data)
    return bytearray(view) if view.readonly else view
