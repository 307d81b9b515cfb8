"""A null device: kernels are really compiled for a GPU that is not there, and launches do nothing.

The whole pipeline (binder, parallel compilation, hooks, timing protocol, store) runs in CI with it;
only the times are invented, by a function of the kernel's metadata. After tinygrad's `ops_null.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from triton.backends.compiler import GPUTarget

from forecast_autotune.records import Device
from forecast_integrations.triton.protocols import Times


class KernelMetadata(Protocol):
    """What Triton's compiler says of a kernel, as far as made-up times depend on it."""

    shared: int
    """Bytes of shared memory."""
    num_warps: int


TimeModel = Callable[[KernelMetadata], float]
"""Metadata of a compiled kernel -> milliseconds of one launch."""


def time_by_shape(metadata: KernelMetadata) -> float:
    """A smooth made-up time: best at 64 KiB of shared memory and 8 warps."""
    shared = (metadata.shared + 1024) / 65536
    return 0.1 * (shared + 1 / shared) + 0.01 * abs(metadata.num_warps - 8)


class NullDevice:
    """Stands in for `triton.runtime.driver.active`; see `null_device()`."""

    def __init__(self, clock: TimeModel, arch: int = 90, shared_memory_bytes: int = 232448) -> None:
        self.now_ms = 0.0
        self.launches = 0
        self.clock = clock
        self.target = GPUTarget("cuda", arch, 32)
        self.utils = _NullUtils(shared_memory_bytes)
        self.launcher_cls = self._launcher
        self._arch, self._shared = arch, shared_memory_bytes

    def forecast_device(self) -> Device:
        """The device record that our integration reports for it."""
        return Device("null H200", "cuda", str(self._arch), 132, self._shared, 65536, 2048, 60 * 2**20)

    def get_current_target(self) -> GPUTarget:
        """The target kernels are compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """Always the first."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream."""
        return 0

    def get_device_interface(self) -> NullDevice:
        """What `do_bench` asks for events and synchronisation."""
        return self

    def get_benchmarker(self) -> Callable[..., Times]:
        """Triton's own benchmark function, running on the made-up clock."""
        from triton.testing import do_bench

        return do_bench

    def get_empty_cache_for_benchmark(self) -> NullDevice:
        """Nothing has to be flushed."""
        return self

    def clear_cache(self, cache: NullDevice) -> None:
        """Flushing costs a little made-up time, as it does on a device."""
        self.now_ms += 0.05

    def synchronize(self, device: int | None = None) -> None:
        """Everything is always done."""

    def Event(self, enable_timing: bool = True) -> _NullEvent:
        """An event on the made-up clock."""
        return _NullEvent(self)

    def _launcher(self, src: object, metadata: KernelMetadata) -> Callable[..., None]:
        def launch(*args: object) -> None:
            self.launches += 1
            self.now_ms += self.clock(metadata)

        return launch


class _NullUtils:
    def __init__(self, shared_memory_bytes: int) -> None:
        self._shared = shared_memory_bytes

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._shared,
            "multiprocessor_count": 132,
            "max_num_regs": 65536,
            "warpSize": 32,
        }

    def load_binary(
        self, name: str, binary: bytes, shared: int, device: int
    ) -> tuple[None, int, int, int, int]:
        # No module, so that nothing is unloaded: a kernel may outlive the null device, and unloading
        # would then ask for a real driver in the midst of a garbage collection.
        return None, 1, 64, 0, 1024


class _NullEvent:
    def __init__(self, device: NullDevice) -> None:
        self._device = device
        self.at = 0.0
        self._asked = False

    def record(self, stream: int | None = None) -> None:
        self.at = self._device.now_ms
        self._asked = False

    def query(self) -> bool:
        # Done when asked a second time: a device is always a little behind its host.
        before, self._asked = self._asked, True
        return before

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, other: _NullEvent) -> float:
        return max(other.at - self.at, 1e-6)


@contextmanager
def null_device(
    clock: TimeModel = time_by_shape, *, shared_memory_bytes: int = 232448
) -> Iterator[NullDevice]:
    """Make a null device Triton's active driver for the length of a `with` block."""
    from triton.compiler import compiler
    from triton.runtime.driver import driver

    # Triton remembers a device's limit by its number, whichever driver it was asked of.
    forget = getattr(getattr(compiler, "max_shared_mem", None), "cache_clear", lambda: None)
    name = "_active" if "_active" in vars(driver) else "active"  # up to Triton 3.4
    before = vars(driver)[name]
    device = NullDevice(clock, shared_memory_bytes=shared_memory_bytes)
    driver.set_active(device)
    forget()
    try:
        yield device
    finally:
        setattr(driver, name, before)
        forget()
