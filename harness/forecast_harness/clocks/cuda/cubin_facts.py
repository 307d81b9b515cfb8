"""What a cubin says of one of its kernels: parameters, registers, shared memory, threads.

The compiler writes these into sections `.nv.info`, as records of a format byte, an attribute byte and a size or
value. They are what the driver itself goes by.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from forecast_harness.clocks.compilation.cubin_sections import CubinSection, cubin_sections, symbol_tables
from forecast_harness.clocks.records import MachineCodeError

_WITH_DATA = 4
"""The format of a record whose two further bytes are the size of what follows."""
_MAX_THREADS, _REGISTERS, _PARAMETER, _REQUIRED_THREADS = 0x05, 0x2F, 0x17, 0x10
_RESERVED_SHARED = ".nv.shared.reserved"


@dataclass(frozen=True)
class CubinFacts:
    """Of one kernel. None and 0 where the cubin does not tell."""

    parameter_bytes: tuple[int, ...] | None
    """In order."""
    registers: int
    """Of a thread."""
    static_shared_bytes: int
    most_threads: int
    """Of a block, by launch bounds; 0: any."""


def cubin_facts(image: bytes, kernel: str) -> CubinFacts:
    """Facts of the kernel of this name. Raises `MachineCodeError` for bytes that are no cubin, or are cut short."""
    sections = cubin_sections(image)
    own = [s for s in sections if s.name == f".nv.info.{kernel}"]
    whole = [s for s in sections if s.name == ".nv.info"]
    parameters: dict[int, int] = {}
    most_threads = registers = 0
    for attribute, data in (r for s in own for r in _records(s)):
        if attribute == _PARAMETER and len(data) >= 12:
            _, ordinal, _, told = struct.unpack_from("<IHHI", data)
            parameters[ordinal] = told >> 18
        elif attribute in (_MAX_THREADS, _REQUIRED_THREADS) and len(data) >= 12:
            x, y, z = struct.unpack_from("<III", data)
            most_threads = x * y * z
    symbols = next(iter(symbol_tables(sections)), [])
    for attribute, data in (r for s in whole for r in _records(s)):
        if attribute == _REGISTERS and len(data) >= 8:
            symbol, count = struct.unpack_from("<II", data)
            if symbol < len(symbols) and symbols[symbol].name == kernel:
                registers = count
    shared = sum(s.size for s in sections if s.name == f".nv.shared.{kernel}")
    if set(parameters) != set(range(len(parameters))):
        raise MachineCodeError(
            f"machine code numbers the parameters of {kernel!r:.80} {sorted(parameters)[:9]}"
        )
    sizes = tuple(parameters[n] for n in range(len(parameters)))
    return CubinFacts(sizes or None, registers, shared, most_threads)


def kernel_names(image: bytes) -> list[str]:
    """Kernels of a cubin. Raises `MachineCodeError`."""
    return [s.name.removeprefix(".text.") for s in cubin_sections(image) if s.name.startswith(".text.")]


def _records(section: CubinSection) -> Iterator[tuple[int, bytes]]:
    """(attribute, data) of the records that have data. Raises `MachineCodeError` for a cut one."""
    data, at = section.contents, 0
    while at + 4 <= len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != _WITH_DATA:
            continue
        if at + size > len(data):
            raise MachineCodeError(f"machine code ends within a record of {section.name!r:.80}")
        yield attribute, data[at : at + size]
        at += size
