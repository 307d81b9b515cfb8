"""Inputs of calls on the device, from which every launch's own are copied: sent once for all launches."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from forecast_harness.clocks.runner.buffer_contents import BufferContents
from forecast_harness.clocks.runner.gpu.driver import CudaDriver, DriverError
from forecast_harness.clocks.runner.gpu.trusted_kernels import TrustedKernels

_ALIGNMENT = 256
_MOST_KEPT_BYTES = 16 << 30
"""Of all reserves together; the one in use may be larger."""


@dataclass(frozen=True)
class InputReserve:
    """The inputs of one call in device memory. Candidates have no address of it, and could still write there."""

    address: int
    size: int
    places: Mapping[str, int]
    """Addresses by buffer."""
    digests: Mapping[str, int]
    """Of what the host has sent, by the key of `InputReserves`."""


class InputReserves:
    """The reserves of the calls that were used last."""

    def __init__(
        self, driver: CudaDriver, kernels: TrustedKernels, most_bytes: int = _MOST_KEPT_BYTES
    ) -> None:
        self._driver, self._kernels, self._most_bytes = driver, kernels, most_bytes
        self._kept: OrderedDict[str, InputReserve] = OrderedDict()
        self._key = random.SystemRandom().getrandbits(64)

    def get(self, key: str, inputs: Mapping[str, BufferContents]) -> InputReserve:
        """The reserve of these inputs, which `key` names; sent anew where anything was written into it."""
        found = self._kept.get(key)
        if found is None or self.changed(found, inputs):
            self.forget(key)
            found = self._kept[key] = self._make(inputs)
        self._kept.move_to_end(key)
        return found

    def changed(self, reserve: InputReserve, inputs: Mapping[str, BufferContents]) -> list[str]:
        """Which buffers are not what the host has sent."""
        return [
            name
            for name, digest in self._digests(reserve.places, inputs).items()
            if digest != reserve.digests[name]
        ]

    def forget(self, key: str) -> None:
        """Free a reserve, if there is one."""
        if (found := self._kept.pop(key, None)) is not None:
            self._driver.free(found.address)

    def forget_all(self) -> bool:
        """Free all, for want of memory; whether there were any."""
        kept = list(self._kept)
        for key in kept:
            self.forget(key)
        return bool(kept)

    def _make(self, inputs: Mapping[str, BufferContents]) -> InputReserve:
        offsets, size = dict[str, int](), 0
        for name, contents in inputs.items():
            offsets[name] = size
            size += -(-max(1, contents.size) // _ALIGNMENT) * _ALIGNMENT
        while self._kept and size + sum(one.size for one in self._kept.values()) > self._most_bytes:
            self.forget(next(iter(self._kept)))
        size = max(size, _ALIGNMENT)
        try:
            address = self._driver.allocate(size)
        except DriverError:
            if not self.forget_all():
                raise
            address = self._driver.allocate(size)
        places = {name: address + offset for name, offset in offsets.items()}
        for name, contents in inputs.items():
            self._fill(places[name], contents)
        return InputReserve(address, size, places, self._digests(places, inputs))

    def _fill(self, address: int, contents: BufferContents) -> None:
        """Send what repeats once, and double it on the device."""
        done = len(contents.data)
        self._driver.upload(address, contents.data)
        while done < contents.size:
            more = min(done, contents.size - done)
            self._driver.copy(address + done, address, more)
            done += more

    def _digests(self, places: Mapping[str, int], inputs: Mapping[str, BufferContents]) -> dict[str, int]:
        buffers = [(places[name], contents.size) for name, contents in inputs.items()]
        return dict(zip(inputs, self._kernels.digests(buffers, self._key), strict=True))
