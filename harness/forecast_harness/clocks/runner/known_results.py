"""What a right program leaves behind at calls, kept on the device, where results of others are compared with it.

Programs have no address of it, and could still read and write there. It is masked whenever one of them runs: what is
found there is of no use, and what is written there is seen.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from forecast_autotune.records.codec import Record
from forecast_harness.clocks.runner.gpu.arena import Placed
from forecast_harness.clocks.runner.gpu.driver import CudaDriver
from forecast_harness.clocks.runner.gpu.trusted_kernels import TrustedKernels

_ALIGNMENT = 256


@dataclass(frozen=True)
class ElementKind(Record, label="element kind"):
    """What a buffer's bytes mean: elements of this type, after so many bytes that are nobody's."""

    dtype: str
    late: int = 0


@dataclass(frozen=True)
class _Results:
    """Of one call; digests are those of masked bytes."""

    address: int
    size: int
    places: Mapping[str, Placed]
    digests: Mapping[str, int]
    kinds: Mapping[str, ElementKind]


class KnownResults:
    """Results by call."""

    def __init__(self, driver: CudaDriver, kernels: TrustedKernels) -> None:
        self._driver, self._kernels = driver, kernels
        self._kept: dict[str, _Results] = {}
        chance = random.SystemRandom()
        self._key, self._mask_keys = chance.getrandbits(64), (chance.getrandbits(64), chance.getrandbits(64))

    def __contains__(self, key: str) -> bool:
        return key in self._kept

    def keep(self, key: str, buffers: Mapping[str, Placed], kinds: Mapping[str, ElementKind]) -> None:
        """Copy what is in these buffers now. Raises `DriverError` for want of memory."""
        self.forget(key)
        offsets, size = dict[str, int](), 0
        for name, placed in buffers.items():
            offsets[name] = size
            size += -(-max(1, placed.size) // _ALIGNMENT) * _ALIGNMENT
        size = max(size, _ALIGNMENT)
        address = self._driver.allocate(size)
        places = {n: Placed(address + offsets[n], placed.size) for n, placed in buffers.items()}
        for name, placed in buffers.items():
            self._driver.copy(places[name].address, placed.address, placed.size)
        self._kernels.mask(address, size, self._mask_keys)
        digests = self._digests(places)
        self._kept[key] = _Results(address, size, places, digests, {n: kinds[n] for n in buffers})

    def forget(self, key: str) -> None:
        """Free the results of a call, if there are any."""
        if (found := self._kept.pop(key, None)) is not None:
            self._driver.free(found.address)

    def changed(self, key: str) -> bool:
        """Whether anything was written into the results of a call since they were kept; they are forgotten then."""
        if (found := self._kept.get(key)) is None or self._digests(found.places) == found.digests:
            return False
        self.forget(key)
        return True

    def errors(self, key: str, places: Mapping[str, Placed]) -> dict[str, float]:
        """The largest error in each buffer, relative to the largest finite value in what is right."""
        found, kept = {}, self._kept[key]
        self._kernels.mask(kept.address, kept.size, self._mask_keys)
        for name, right in kept.places.items():
            kind, got = kept.kinds[name], places[name]
            found[name] = self._kernels.relative_error(
                got.address + kind.late, right.address + kind.late, right.size - kind.late, kind.dtype
            )
        self._kernels.mask(kept.address, kept.size, self._mask_keys)
        return found

    def _digests(self, places: Mapping[str, Placed]) -> dict[str, int]:
        buffers = [(placed.address, placed.size) for placed in places.values()]
        return dict(zip(places, self._kernels.digests(buffers, self._key), strict=True))
