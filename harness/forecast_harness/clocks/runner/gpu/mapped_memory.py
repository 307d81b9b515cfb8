"""Device memory of one size at a time. That of other sizes is kept for later, and cannot be addressed meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

from forecast_harness.clocks.runner.gpu.driver import (
    ATTRIBUTE_VIRTUAL_MEMORY,
    OUT_OF_MEMORY,
    CudaDriver,
    DriverError,
)

PAGE_BYTES = 2 << 20
"""Of the device's memory: sizes are multiples of it."""
_MOST_BLOCKS = 8
_MOST_KEPT_BYTES = 4 << 30
"""Of all blocks together; the one in use may be larger."""


@dataclass(frozen=True, eq=False)
class PhysicalBlock:
    """Memory that has no address while it is not mapped."""

    handle: int
    size: int


class MappedMemory:
    """What is in use has an address; nothing else of it has.

    To map memory that is kept takes a tenth of what allocating and freeing do. Where the device cannot map memory, it
    is allocated and freed. Kept memory is released once any call of the driver wants memory that is not there.
    """

    def __init__(
        self, driver: CudaDriver, most_blocks: int = _MOST_BLOCKS, most_bytes: int = _MOST_KEPT_BYTES
    ) -> None:
        self._driver, self._most_blocks, self._most_bytes = driver, most_blocks, most_bytes
        self._kept: list[PhysicalBlock] = []
        """None of it mapped; the least recently used first."""
        self._used: PhysicalBlock | None = None
        self._maps = _can_map(driver)
        self.address, self.size = 0, 0
        driver.on_want_of_memory = self._release_kept

    def reserve(self, size: int) -> None:
        """Have memory of as many pages as `size` needs, or of one more, with any contents.

        Unless what is in use is such memory, waits for the device, and ends the use. Raises `DriverError` where there
        is too little memory.
        """
        rounded = -(-size // PAGE_BYTES) * PAGE_BYTES
        if _suits(self.size, rounded):
            return
        self._end_use()
        if self._maps:
            try:
                self._used = self._block(rounded)
                self.address, self.size = (
                    self._driver.map(self._used.handle, self._used.size),
                    self._used.size,
                )
                return
            except DriverError as error:
                if error.sticky or error.code == OUT_OF_MEMORY:
                    raise
            self._maps = False
            self._end_use()
            self._release_kept()
        self.address = self._driver.allocate(rounded)
        self.size = rounded

    def _end_use(self) -> None:
        address, size, used = self.address, self.size, self._used
        if address and used is None:
            self._driver.free(address)
        elif address:
            self._driver.synchronize()  # a launch that failed may have left work behind; unmapping waits for none
            self._driver.unmap(address, size)
        self.address, self.size, self._used = 0, 0, None
        if used is not None:
            self._kept.append(used)

    def _block(self, size: int) -> PhysicalBlock:
        """One that is kept, or a new one."""
        if found := [one for one in self._kept if _suits(one.size, size)]:
            # The larger one, for the smaller one to be released some time: shifts need now this, now that.
            chosen = max(found, key=lambda one: one.size)
            self._kept.remove(chosen)
            return chosen
        while self._kept and (
            len(self._kept) >= self._most_blocks
            or size + sum(one.size for one in self._kept) > self._most_bytes
        ):
            self._release_oldest()
        return PhysicalBlock(self._driver.create_physical(size), size)

    def _release_oldest(self) -> None:
        self._driver.release_physical(self._kept.pop(0).handle)

    def _release_kept(self) -> bool:
        """Whether there was anything to release."""
        had = bool(self._kept)
        while self._kept:
            self._release_oldest()
        return had


def _suits(size: int, rounded: int) -> bool:
    return rounded <= size <= rounded + PAGE_BYTES


def _can_map(driver: CudaDriver) -> bool:
    try:
        return (
            bool(driver.attribute(ATTRIBUTE_VIRTUAL_MEMORY))
            and PAGE_BYTES % driver.physical_granularity() == 0
        )
    except DriverError:  # an old driver does not know the attribute
        return False
