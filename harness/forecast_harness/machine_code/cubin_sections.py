"""Sections of a cubin, which is an ELF file: does the code keep memory of its own?

Code that cannot keep anything from one launch to the next cannot return an earlier launch's outputs. A kernel's
own memory is a writable section of its file; buffers are wiped and surrounded with canaries by the runner.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

from forecast_harness.machine_code.records import CompiledKernel, MachineCodeError

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
"""Where a section's size stands in its header."""
_FIRST_RESERVED, _ABSOLUTE = 0xFF00, 0xFFF1
"""Numbers that name no section: of memory that the loader is to find, for one."""
_LIBRARY_NAMES = frozenset({b"__CUDA_FTZ", b"__CUDA_PREC_SQRT", b"__CUDA_PREC_DIV", b"__CUDA_ARCH"})
"""Texts that the compiler leaves behind where code took a function of CUDA's library; nothing reads them."""
_LIBRARY_SYMBOL = re.compile(r"_ZN\w*(?:4cuda|6thrust|3cub|18cooperative_groups)")
"""Symbols of CUDA's C++ headers. Whatever includes them carries their constants without contents, a byte each:
objects of empty classes, which no code reads."""
_MOST_LIBRARY_BYTES = 256
_MOST_SECTIONS = 4096
_MOST_NAME_BYTES = 64
MOST_IMAGE_BYTES = 64 << 20


class CubinSection(NamedTuple):
    """One section's name, kind, flags, bytes in memory, contents as far as they are in the file, and the number of
    the section that it is about."""

    name: str
    kind: int
    flags: int
    size: int
    contents: bytes
    link: int


def cubin_sections(image: bytes) -> list[CubinSection]:
    """All sections. Raises `MachineCodeError` for bytes that are no 64-bit ELF file of CUDA's."""
    if len(image) > MOST_IMAGE_BYTES:
        raise MachineCodeError(f"machine code has {len(image)} bytes; at most {MOST_IMAGE_BYTES} are taken")
    if len(image) < _HEADER.size or not image.startswith(_MAGIC):
        raise MachineCodeError("machine code must be an ELF file of 64 bits, little-endian")
    told = _HEADER.unpack_from(image)
    machine, table, entry_size, count, names = told[2], told[6], told[11], told[12], told[13]
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
    referred = referred_sections(sections)
    if all(section.name != f".text.{kernel.name}" for section in sections):
        raise MachineCodeError(f"machine code has no kernel {kernel.name!r:.80}")
    for number, section in enumerate(sections):
        if section.name.startswith(_CONSTANTS) and section.size:
            raise MachineCodeError(
                f"machine code has {section.size} bytes of constants that a launch can change, in {section.name!r:.80}"
            )
        if _outlives_launches(section) and not (
            _holds_library_names(sections, number) and number not in referred
        ):
            raise MachineCodeError(
                f"machine code keeps {section.size} bytes from launch to launch in {section.name!r:.80}"
            )


def without_references(image: bytes) -> bytes:
    """The same code, not told where names lie that the compiler has left behind.

    Whatever takes a function of CUDA's library, as `log`, carries such names in writable memory, and their address
    among its constants, where nothing reads it. There it would be 11 bytes in which a kernel may keep something, so
    the loader is not asked to write it. Raises `MachineCodeError` for bytes that are no code of CUDA's.
    """
    sections = cubin_sections(image)
    names = {n for n, s in enumerate(sections) if _outlives_launches(s) and _holds_library_names(sections, n)}
    if not names & referred_sections(sections):
        return image
    made = bytearray(image)
    headers = _HEADER.unpack_from(image)[6]
    for number, section in enumerate(sections):
        if section.kind not in _RELOCATION_BYTES:
            continue
        step = _RELOCATION_BYTES[section.kind]
        entries = [section.contents[at : at + step] for at in range(0, section.size, step)]
        left = b"".join(e for e in entries if _referred_section(sections, section, e) not in names)
        at = headers + number * _SECTION.size
        start = _SECTION.unpack_from(image, at)[4]
        made[start : start + section.size] = left.ljust(section.size, b"\0")
        made[at + _SIZE_AT : at + _SIZE_AT + 8] = len(left).to_bytes(8, "little")
    return bytes(made)


def _outlives_launches(section: CubinSection) -> bool:
    """Whether it is memory on the device that a kernel can write, and that is no launch's own."""
    if not section.size:
        return False
    return section.name.startswith(".nv.global") or bool(
        section.flags & _WRITE and not section.name.startswith((".nv.shared", ".nv.local"))
    )


def _holds_library_names(sections: Sequence[CubinSection], number: int) -> bool:
    """Whether it holds names that the compiler leaves behind, or objects of CUDA's headers, and nothing else."""
    section = sections[number]
    if section.kind == _NO_CONTENTS:
        symbols = _symbols_in(sections, number)
        known = bool(symbols) and all(_LIBRARY_SYMBOL.match(name) for name in symbols)
        return known and section.size <= _MOST_LIBRARY_BYTES
    whole = len(section.contents) == section.size <= _MOST_NAME_BYTES and section.contents.endswith(b"\0")
    return whole and set(section.contents[:-1].split(b"\0")) <= _LIBRARY_NAMES


def _symbols_in(sections: Sequence[CubinSection], number: int) -> list[str]:
    """Names of what lies in a section; the section itself, which has a symbol too, has none of its own."""
    found = []
    for table in sections:
        if table.kind != _SYMBOLS or not 0 <= table.link < len(sections):
            continue
        texts = sections[table.link].contents
        for at in range(0, len(table.contents) - _SYMBOL.size + 1, _SYMBOL.size):
            start, info, _, place, _, _ = _SYMBOL.unpack_from(table.contents, at)
            if place == number and info & 0xF != _SECTION_SYMBOL:
                found.append(_name(texts, start))
    return found


def referred_sections(sections: Sequence[CubinSection]) -> frozenset[int]:
    """Numbers of sections whose address the loader writes into code or constants.

    Raises `MachineCodeError` for tables that cannot be read.
    """
    found = set()
    for table in sections:
        if table.kind not in _RELOCATION_BYTES:
            continue
        if not 0 <= table.link < len(sections) or sections[table.link].kind != _SYMBOLS:
            raise MachineCodeError(f"relocations in {table.name!r:.80} name no table of symbols")
        step = _RELOCATION_BYTES[table.kind]
        if len(table.contents) != table.size or table.size % step:
            raise MachineCodeError(f"relocations in {table.name!r:.80} cannot be read")
        for at in range(0, table.size, step):
            found.add(_referred_section(sections, table, table.contents[at : at + step]))
    return frozenset(found)


def _referred_section(sections: Sequence[CubinSection], table: CubinSection, entry: bytes) -> int:
    """Number of the section in which the symbol of a relocation lies. Raises `MachineCodeError`."""
    symbols = sections[table.link].contents
    place = (_RELOCATION.unpack_from(entry)[1] >> 32) * _SYMBOL.size
    if place + _SYMBOL.size > len(symbols):
        raise MachineCodeError(f"a relocation in {table.name!r:.80} names a symbol that is not there")
    told = _SYMBOL.unpack_from(symbols, place)
    number = int(told[3])
    if number == 0:
        texts = (
            sections[sections[table.link].link].contents if sections[table.link].link < len(sections) else b""
        )
        raise MachineCodeError(
            f"a relocation in {table.name!r:.80} names a symbol in section 0: {_name(texts, told[0])!r:.60} is the "
            "driver's own, so leave out printf, assert, malloc and launches by the device"
        )
    if number >= _FIRST_RESERVED and number != _ABSOLUTE:
        raise MachineCodeError(f"a relocation in {table.name!r:.80} names a symbol in section {number:#x}")
    return number
