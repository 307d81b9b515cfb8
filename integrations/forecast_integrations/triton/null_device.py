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
    """Metadata of a kernel by Triton's compiler, as far as made-up times depend on it."""

    shared: int
    """Bytes of shared memory."""
    num_warps: int


TimeModel = Callable[[KernelMetadata], float]
"""Metadata of a compiled kernel -> milliseconds of one launch."""


def time_by_shape(metadata: KernelMetadata) -> float:
    """A smooth made-up time: best at 64 KiB of shared memory and 8 warps."""
    shared = (metadata.shared + 1024) / 65536
    return 0.1 * (shared + 1 / shared) + 0.01 * abs(metadata.num_warps - 8)


def target_of(device: Device) -> GPUTarget:
    """Return Triton's target on such a device: its backend, architecture and threads of a warp."""
    arch = int(device.arch) if device.backend == "cuda" else device.arch
    return GPUTarget(device.backend, arch, device.warp_size)


_numbers: dict[Device | None, int] = {None: 0}
"""The kinds of null devices that this process has had, besides the first; see `NullDevice.get_current_device`."""


class NullDevice:
    """Stands in for `triton.runtime.driver.active`; see `null_device()`."""

    computes = False
    """Whether launches write results, which could be compared."""

    def __init__(
        self,
        clock: TimeModel,
        shared_memory_bytes: int = 232448,
        device: Device | None = None,
    ) -> None:
        """An H200, or whatever `device` is a record of: kernels are compiled for its backend and architecture.

        `shared_memory_bytes` is the H200's; a `device` has its own.
        """
        self.now_ms = 0.0
        self.launches = 0
        self.clock = clock
        self._device = device or Device(
            "null H200", "cuda", "90", 132, shared_memory_bytes, 65536, 2048, 60 * 2**20
        )
        self.target = target_of(self._device)
        self._number = _numbers.setdefault(self._device, len(_numbers)) if device else 0
        self.utils = _NullUtils(self._device)
        self.launcher_cls = self._launcher

    def forecast_device(self) -> Device:
        """The device record that our integration reports for it."""
        return self._device

    def get_current_target(self) -> GPUTarget:
        """The target kernels are compiled for."""
        return self.target

    def get_current_device(self) -> int:
        """A number of its own for each kind: by it, Triton remembers what it has compiled in this process."""
        return self._number

    def get_current_stream(self, device: int | None = None) -> int:
        """The default stream."""
        return 0

    def get_device_interface(self) -> NullDevice:
        """Return the object that `do_bench` asks for events and synchronisation."""
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
    def __init__(self, device: Device) -> None:
        self._device = device

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": self._device.shared_memory_bytes,
            "multiprocessor_count": self._device.multiprocessors,
            "max_num_regs": self._device.registers_per_multiprocessor,
            "warpSize": self._device.warp_size,
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
        self._was_queried = False

    def record(self, stream: int | None = None) -> None:
        self.at = self._device.now_ms
        self._was_queried = False

    def query(self) -> bool:
        # Done when asked a second time: a device is always a little behind its host.
        before, self._was_queried = self._was_queried, True
        return before

    def synchronize(self) -> None:
        return None

    def elapsed_time(self, other: _NullEvent) -> float:
        return max(other.at - self.at, 1e-6)


@contextmanager
def null_device(
    clock: TimeModel = time_by_shape, *, shared_memory_bytes: int = 232448, device: Device | None = None
) -> Iterator[NullDevice]:
    """Make a null device Triton's active driver for the length of a `with` block.

    An H200 with this much shared memory, or the one that `device` is a record of, such as
    `datasheet_device("mi300x")`: any that this Triton compiles for. A `device` says itself how much it has.
    """
    from triton.compiler import compiler
    from triton.runtime.driver import driver

    # Triton remembers a device's limit by its number, whichever driver it was asked of.
    forget = getattr(getattr(compiler, "max_shared_mem", None), "cache_clear", lambda: None)
    name = "_active" if "_active" in vars(driver) else "active"  # up to Triton 3.4
    before = vars(driver)[name]
    stand_in = NullDevice(clock, shared_memory_bytes=shared_memory_bytes, device=device)
    driver.set_active(stand_in)
    forget()
    try:
        yield stand_in
    finally:
        setattr(driver, name, before)
        forget()
