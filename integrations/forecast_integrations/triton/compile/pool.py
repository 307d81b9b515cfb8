"""Compile candidates in parallel, without launching them: in forked children, or on threads.

Children are the default where the platform has `fork`: they do not share the interpreter lock, so the
parent times kernels undisturbed while they compile (with threads in one process, medians came out up
to thirty times too long), a compiler that aborts or hangs takes only its child along, and a child is
killed when nobody wants its result any more. The binary travels through Triton's own disk cache. A
child never touches the device: the driver it sees is a stand-in that only knows the target.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forecast_autotune.records import Candidate
from forecast_integrations.triton.compile.fork import ForkPool
from forecast_integrations.triton.compile.protocol import CompilePool
from forecast_integrations.triton.compile.threads import ThreadPool
from forecast_integrations.triton.problem.call import KernelCall

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

_FORK_BELOW = 16 * 2**30
"""Forking copies about 2 MB of page tables per GB in use: beyond this, threads are quicker."""


def can_fork() -> bool:
    """Whether children are to be had here, and quickly."""
    return sys.platform == "linux" and _resident_bytes() < _FORK_BELOW


def _resident_bytes() -> int:
    """Memory of this process that is in use; 0 where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Driver(Protocol):
    """As much of Triton's active driver as a compilation asks for."""

    def get_current_device(self) -> int:
        """The number of the device."""
        ...

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        ...


class _TargetOnlyDriver:
    """The driver a forked child sees: it knows what to compile for, and nothing else."""

    def __init__(self, active: Driver) -> None:
        self._device = active.get_current_device()
        self._target = active.get_current_target()

    def get_current_device(self) -> int:
        return self._device

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def make_pool(
    compile_one: Callable[[Candidate], object],
    workers: int,
    timeout_s: float,
    how: str,
    patient: bool = True,
    call: KernelCall | None = None,
) -> CompilePool:
    """`how` is `fork`, `threads`, or `auto`: children where they can hand their binaries over.

    With a `call`, children also prepare what its first launch needs besides binaries.
    """
    from triton import knobs

    if how == "auto":
        # A child hands its binary over through Triton's cache.
        how = "fork" if can_fork() and not knobs.compilation.always_compile else "threads"
    if how == "threads":
        return ThreadPool(compile_one, workers, timeout_s, _device_selector())
    return ForkPool(without_device(compile_one), workers, timeout_s, patient, call)


def without_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a child may run it: the driver that it sees only knows the target.

    Raises `RuntimeError` when there is no driver whose target could be known.
    """
    from triton.runtime.driver import driver

    stand_in = _TargetOnlyDriver(driver.active)

    def call(*args: object) -> Any:
        active = driver.active
        driver.set_active(stand_in)
        try:
            return function(*args)
        finally:
            driver.set_active(active)

    return call


def _device_selector() -> Callable[[], None]:
    """A function for compile threads: a new thread starts on device 0, whatever its parent uses."""
    import torch

    if not torch.cuda.is_available():
        return lambda: None
    index = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(index)
