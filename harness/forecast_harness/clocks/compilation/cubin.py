"""A cubin, which is an ELF file: does the code keep memory of its own, and what do its kernels take?

Code that cannot keep anything from one launch to the next cannot return an earlier launch's outputs. A kernel's
own memory is a writable section of its file; buffers are wiped and surrounded with canaries by the runner.

The compiler writes a kernel's parameters into sections `.nv.info`, as records of a format byte, an attribute byte and a
size or value. The driver itself goes by them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forecast_harness.clocks.records import CompiledKernel, MachineCodeError

_MAGIC, _CUDA_MACHINE = b"\x7fELF\x02\x01", 190
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL, _RELOCATION = struct.Struct("<IBBHQQ"), struct.Struct("<QQ")
_WRITE = 1
_SYMBOLS, _RELOCATIONS_WITH_ADDENDS, _NO_CONTENTS, _RELOCATIONS = 2, 4, 8, 9
"""Kinds of sections."""
_RELOCATION_BYTES = {_RELOCATIONS: _RELOCATION.size, _RELOCATIONS_WITH_ADDENDS: _RELOCATION.size + 8}
_CONSTANTS = ".nv.constant3"
"""A module's own constants, to which stores go by their address all the same; Triton's kernels have none."""
_SECTION_SYMBOL = 3
_SIZE_AT = 32
"""Offset of a section's size in its header."""
_FIRST_RESERVED, _ABSOLUTE = 0xFF00, 0xFFF1
"""Numbers that name no section, such as memory that the loader has to find."""
_LIBRARY_NAMES = frozenset({b"__CUDA_FTZ", b"__CUDA_PREC_SQRT", b"__CUDA_PREC_DIV", b"__CUDA_ARCH"})
"""Texts that the compiler leaves behind where code took a function of CUDA's library; nothing reads them."""
_LIBRARY_SYMBOL = re.compile(r"_ZN\w*(?:4cuda|6thrust|3cub|18cooperative_groups)")
"""Symbols of CUDA's C++ headers. Code that includes them has their constants without contents, a byte each:
objects of empty classes, which no code reads."""
_MOST_LIBRARY_BYTES = 256
_MOST_SECTIONS = 4096
_MOST_NAME_BYTES = 64
MOST_IMAGE_BYTES = 64 << 20


class CubinSection(NamedTuple):
    """One section's name, kind, flags, bytes in memory, contents as far as they are in the file, and the number of
    the section that it describes."""

    name: str
    kind: int
    flags: int
    size: int
    contents: bytes
    link: int


class CubinSymbol(NamedTuple):
    """One symbol's kind, the number of its section, and the place of its name."""

    kind: int
    section: int
    texts: bytes
    start: int

    @property
    def name(self) -> str:
        """Read when it is asked for: a table may give a million symbols a name of a megabyte."""
        return _name(self.texts, self.start)


def cubin_sections(image: bytes) -> list[CubinSection]:
    """All sections. Raises `MachineCodeError` for bytes that are no 64-bit ELF file of CUDA's."""
    if len(image) > MOST_IMAGE_BYTES:
        raise MachineCodeError(f"machine code has {len(image)} bytes; at most {MOST_IMAGE_BYTES} are taken")
    if len(image) < _HEADER.size or not image.startswith(_MAGIC):
        raise MachineCodeError("machine code must be an ELF file of 64 bits, little-endian")
    header = _HEADER.unpack_from(image)
    machine, table, entry_size, count, names = header[2], header[6], header[11], header[12], header[13]
    if machine != _CUDA_MACHINE:
        raise MachineCodeError(f"machine code must be for CUDA (ELF machine {_CUDA_MACHINE}), not {machine}")
    if entry_size != _SECTION.size or not 0 < count <= _MOST_SECTIONS or names >= count:
        raise MachineCodeError("machine code has no readable table of sections")
    if table + count * entry_size > len(image):
        raise MachineCodeError("machine code ends before its table of sections")
    rows = [_SECTION.unpack_from(image, table + n * entry_size) for n in range(count)]
    start, size = rows[names][4], rows[names][5]
    texts = image[start : start + size]
    return [
        CubinSection(_name(texts, row[0]), row[1], row[2], row[5], _contents(image, row), row[6])
        for row in rows
    ]


def _contents(image: bytes, row: tuple[int, ...]) -> bytes:
    kind, start, size = row[1], row[4], row[5]
    return b"" if kind == _NO_CONTENTS else image[start : start + size]


def _name(texts: bytes, at: int) -> str:
    return texts[at : texts.find(b"\0", at)].decode("ascii", errors="replace")


def check_cubin(kernel: CompiledKernel) -> None:
    """Raises `MachineCodeError` for code without the kernel, or with memory that outlives a launch.

    Names that the compiler leaves behind are let through where nothing refers to them: code that is not told their
    address has it no more than that of any other memory. See `without_references`.
    """
    sections = cubin_sections(kernel.image)
    references = referred_sections(sections)
    if all(section.name != f".text.{kernel.name}" for section in sections):
        raise MachineCodeError(f"machine code has no kernel {kernel.name!r:.80}")
    for number, section in enumerate(sections):
        if section.name.startswith(_CONSTANTS) and section.size:
            raise MachineCodeError(
                f"machine code has {section.size} bytes of constants that a launch can change, in {section.name!r:.80}"
            )
        if _outlives_launches(section) and not (
            _holds_library_names(sections, number) and number not in references
        ):
            raise MachineCodeError(
                f"machine code keeps {section.size} bytes from launch to launch in {section.name!r:.80}"
            )


def without_references(image: bytes) -> bytes:
    """The same code without the addresses of names that the compiler has left behind.

    Code that calls a function of CUDA's library, as `log`, has such names in writable memory, and their address
    among its constants, where nothing reads it. With the address, a kernel could keep data in their 11 bytes, so the
    loader is not asked to write it. Raises `MachineCodeError` for bytes that are no code of CUDA's.
    """
    sections = cubin_sections(image)
    names = {n for n, s in enumerate(sections) if _outlives_launches(s) and _holds_library_names(sections, n)}
    if not names & referred_sections(sections):
        return image
    result, tables = bytearray(image), _SymbolTables(sections)
    headers = _HEADER.unpack_from(image)[6]
    for number, section in enumerate(sections):
        if section.kind not in _RELOCATION_BYTES:
            continue
        step = _RELOCATION_BYTES[section.kind]
        entries = [section.contents[at : at + step] for at in range(0, section.size, step)]
        remaining = b"".join(e for e in entries if tables.referred_section(section, e) not in names)
        at = headers + number * _SECTION.size
        start = _SECTION.unpack_from(image, at)[4]
        result[start : start + section.size] = remaining.ljust(section.size, b"\0")
        result[at + _SIZE_AT : at + _SIZE_AT + 8] = len(remaining).to_bytes(8, "little")
    return bytes(result)


def _outlives_launches(section: CubinSection) -> bool:
    """Whether a section is memory on the device that a kernel can write, and that outlives a launch."""
    if not section.size:
        return False
    return section.name.startswith(".nv.global") or bool(
        section.flags & _WRITE and not section.name.startswith((".nv.shared", ".nv.local"))
    )


def _holds_library_names(sections: Sequence[CubinSection], number: int) -> bool:
    """Whether a section has names that the compiler leaves behind, or objects of CUDA's headers, and nothing else."""
    section = sections[number]
    if section.kind == _NO_CONTENTS:
        symbols = _symbols_in(sections, number)
        are_known = bool(symbols) and all(_LIBRARY_SYMBOL.match(name) for name in symbols)
        return are_known and section.size <= _MOST_LIBRARY_BYTES
    is_whole = len(section.contents) == section.size <= _MOST_NAME_BYTES and section.contents.endswith(b"\0")
    return is_whole and set(section.contents[:-1].split(b"\0")) <= _LIBRARY_NAMES


def _symbols_in(sections: Sequence[CubinSection], number: int) -> list[str]:
    """Names of the symbols in a section, without the section's own symbol, which has no name."""
    return [
        symbol.name
        for symbols in symbol_tables(sections)
        for symbol in symbols
        if symbol.section == number and symbol.kind != _SECTION_SYMBOL
    ]


def symbol_tables(sections: Sequence[CubinSection]) -> list[list[CubinSymbol]]:
    """The symbols of each table, in order."""
    return [_symbols_of(sections, table) for table in sections if table.kind == _SYMBOLS]


def _symbols_of(sections: Sequence[CubinSection], table: CubinSection) -> list[CubinSymbol]:
    """The symbols of one table, in order; none where their names cannot be read."""
    if not 0 <= table.link < len(sections):
        return []
    result, texts = [], sections[table.link].contents
    for at in range(0, len(table.contents) - _SYMBOL.size + 1, _SYMBOL.size):
        start, info, _, section, _, _ = _SYMBOL.unpack_from(table.contents, at)
        result.append(CubinSymbol(info & 0xF, section, texts, start))
    return result


def referred_sections(sections: Sequence[CubinSection]) -> frozenset[int]:
    """Numbers of sections whose address the loader writes into code or constants.

    Raises `MachineCodeError` for tables that cannot be read.
    """
    result, tables = set(), _SymbolTables(sections)
    for table in sections:
        if table.kind not in _RELOCATION_BYTES:
            continue
        if not 0 <= table.link < len(sections) or sections[table.link].kind != _SYMBOLS:
            raise MachineCodeError(f"relocations in {table.name!r:.80} name no table of symbols")
        step = _RELOCATION_BYTES[table.kind]
        if len(table.contents) != table.size or table.size % step:
            raise MachineCodeError(f"relocations in {table.name!r:.80} cannot be read")
        for at in range(0, table.size, step):
            result.add(tables.referred_section(table, table.contents[at : at + step]))
    return frozenset(result)


class _SymbolTables:
    """Symbols by table, each of which is read once, however many relocations name it."""

    def __init__(self, sections: Sequence[CubinSection]) -> None:
        self._sections = sections
        self._tables: dict[int, list[CubinSymbol]] = {}

    def referred_section(self, table: CubinSection, entry: bytes) -> int:
        """Number of the section in which the symbol of a relocation lies. Raises `MachineCodeError`."""
        if table.link not in self._tables:
            self._tables[table.link] = _symbols_of(self._sections, self._sections[table.link])
        symbols = self._tables[table.link]
        index = int(_RELOCATION.unpack_from(entry)[1] >> 32)
        if index >= len(symbols):
            raise MachineCodeError(f"a relocation in {table.name!r:.80} names a symbol that is not there")
        number: int = symbols[index].section
        if number == 0:
            raise MachineCodeError(
                f"a relocation in {table.name!r:.80} names a symbol in section 0: {symbols[index].name!r:.60} is the "
                "driver's own, so leave out printf, assert, malloc and launches by the device"
            )
        if number >= _FIRST_RESERVED and number != _ABSOLUTE:
            raise MachineCodeError(
                f"a relocation in {table.name!r:.80} names a symbol in section {number:#x}"
            )
        return number


_WITH_DATA = 4
"""The format of a record whose two further bytes are the size of what follows."""
_MAX_THREADS, _REGISTERS, _PARAMETER, _REQUIRED_THREADS = 0x05, 0x2F, 0x17, 0x10


@dataclass(frozen=True)
class CubinFacts:
    """The resources of one kernel. None and 0 where the cubin does not tell."""

    parameter_bytes: tuple[int, ...] | None
    """Bytes of each parameter, in order."""
    registers: int
    """Registers of a thread."""
    static_shared_bytes: int
    most_threads: int
    """Threads of a block, by launch bounds; 0: any."""


def cubin_facts(image: bytes, kernel: str) -> CubinFacts:
    """Facts of the kernel of this name. Raises `MachineCodeError` for bytes that are no cubin, or are cut short."""
    sections = cubin_sections(image)
    own = [s for s in sections if s.name == f".nv.info.{kernel}"]
    info_sections = [s for s in sections if s.name == ".nv.info"]
    parameters: dict[int, int] = {}
    most_threads = registers = 0
    for attribute, data in (r for s in own for r in _records(s)):
        if attribute == _PARAMETER and len(data) >= 12:
            _, ordinal, _, facts = struct.unpack_from("<IHHI", data)
            parameters[ordinal] = facts >> 18
        elif attribute in (_MAX_THREADS, _REQUIRED_THREADS) and len(data) >= 12:
            x, y, z = struct.unpack_from("<III", data)
            most_threads = x * y * z
    symbols = next(iter(symbol_tables(sections)), [])
    for attribute, data in (r for s in info_sections for r in _records(s)):
        if attribute == _REGISTERS and len(data) >= 8:
            symbol, count = struct.unpack_from("<II", data)
            if symbol < len(symbols) and symbols[symbol].name == kernel:
                registers = count
    shared_bytes = sum(s.size for s in sections if s.name == f".nv.shared.{kernel}")
    if set(parameters) != set(range(len(parameters))):
        raise MachineCodeError(
            f"machine code numbers the parameters of {kernel!r:.80} {sorted(parameters)[:9]}"
        )
    sizes = tuple(parameters[n] for n in range(len(parameters)))
    return CubinFacts(sizes or None, registers, shared_bytes, most_threads)


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
