"""What the kernels that digest bytes come to, worked out on the host, and the same asked of any driver."""

from __future__ import annotations

import random

from forecast_harness.clocks.runner.driver import CudaDriver
from forecast_harness.clocks.runner.kernels import RunnerKernels

_ALL = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
WORD = 8


def mixed(value: int) -> int:
    """As splitmix64 mixes 64 bits."""
    value &= _ALL
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _ALL
    return value ^ value >> 31


def units(data: bytes, size: int) -> list[int]:
    """The whole words of some bytes, or the bytes."""
    return [int.from_bytes(data[n : n + size], "little") for n in range(0, len(data) - size + 1, size)]


def buffer_digest(data: bytes, key: int) -> int:
    """Of a buffer at a whole word."""
    whole = len(data) // WORD * WORD
    result = 0
    for size, part in ((WORD, data[:whole]), (1, data[whole:])):
        result += sum(mixed((n * _STEP + key) ^ unit) for n, unit in enumerate(units(part, size)))
    return result & _ALL


def gap_digest(address: int, data: bytes, key: int) -> int:
    """Of a gap's units and their addresses."""
    size = 1 if address % WORD or len(data) % WORD else WORD
    return (
        sum(mixed(((address + size * n) * _STEP + key) ^ unit) for n, unit in enumerate(units(data, size)))
        & _ALL
    )


def check_digests(driver: CudaDriver, kernels: RunnerKernels, size: int) -> None:
    """A buffer of that size, and gaps from one byte to that size, some at no whole word."""
    chance = random.Random(size)
    data, key = chance.randbytes(size), chance.getrandbits(64)
    address = driver.allocate(size + WORD)
    driver.upload(address, data)
    assert kernels.digest(address, size, key) == buffer_digest(data, key)
    gaps = [
        (address + late, length) for late in (0, 1, 3, 8) for length in (1, 8, 129, size - 8) if length > 0
    ]
    kernels.queue_gaps(gaps, key)
    wanted = sum(gap_digest(at, data[at - address : at - address + length], key) for at, length in gaps)
    assert kernels.gaps_digest() == wanted & _ALL
    driver.free(address)
