"""A null device whose clock is read at intervals, and which records graphs: kernels of a few microseconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forecast_integrations.triton.null_device import NullDevice, TimeModel, null_device
from tests.core.stepped_cuda import SteppedCuda

FLUSH_S = 80e-6


class SteppedDevice(NullDevice):
    """Stands in for the active driver; its device interface is a `SteppedCuda`."""

    def __init__(self, clock: TimeModel) -> None:
        super().__init__(clock)
        self.cuda = SteppedCuda()
        self.flushes = 0
        self.host_wait_s = 0.0
        """For which a launch that is not recorded waits where the host is slow."""

    def get_device_interface(self) -> Any:
        return self.cuda

    def clear_cache(self, cache: NullDevice) -> None:
        self.flushes += 1
        self.cuda.run(FLUSH_S)

    def _launcher(self, src: object, metadata: Any) -> Callable[..., None]:
        def launch(*args: object) -> None:
            self.launches += 1
            if self.cuda.recorded is None and self.cuda.host_is_slow():
                self.cuda.run(self.host_wait_s)
            self.cuda.run(1e-3 * self.clock(metadata))

        return launch


@contextmanager
def stepped_device(clock: TimeModel) -> Iterator[SteppedDevice]:
    """Make one the active driver for the length of a `with` block."""
    from triton.runtime.driver import driver

    with null_device():
        made = SteppedDevice(clock)
        driver.set_active(made)
        yield made
