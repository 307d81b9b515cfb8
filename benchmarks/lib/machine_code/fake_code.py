"""Machine code of the fake driver: an ELF file with operations of `fake_driver.cpp`, written in Python."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

from forecast_harness.clocks.records import (
    BufferRole,
    CompiledKernel,
    KernelArgument,
    LaunchPlan,
    PlanBuffer,
    PlanStep,
    Program,
    ReturnedTensor,
)
from forecast_harness.clocks.runner.contestant import pack_scalar

Operation = tuple[int, ...]
_DRIVER_SOURCE = Path(__file__).with_name("fake_driver.cpp")
_UNIT, _HALF = 1 << 40, 1 << 39
SHARED_BYTES = 64 << 10
"""Shared memory of the fake device, which outlives a launch."""


def has_compiler() -> bool:
    """Whether the fake driver can be built here."""
    return shutil.which("g++") is not None


def build_driver(folder: Path) -> Path:
    """The fake driver as a shared library. Raises `CalledProcessError` where it does not compile."""
    result = folder / "libfakecuda.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(result), str(_DRIVER_SOURCE)]
    subprocess.run(command, check=True)
    return result


# --- operations; parameters are numbers, offsets and sizes bytes ---


def add(target: int, left: int, right: int, count: int) -> Operation:
    """float32 sums; `count` is the parameter that holds the number of elements."""
    return (1, target, left, right, count)


def scale(target: int, source: int, thousandths: int, count: int) -> Operation:
    """float32 products."""
    return (2, target, source, thousandths, count)


def copy(target: tuple[int, int], source: tuple[int, int], size: int) -> Operation:
    """Bytes from (parameter, offset) to (parameter, offset)."""
    return (3, target[0] * _UNIT + target[1] + _HALF, source[0] * _UNIT + source[1] + _HALF, size, 0)


def store(parameter: int, offset: int, size: int, value: int) -> Operation:
    """Set bytes."""
    return (4, parameter, offset, size, value)


def loop_for_ever() -> Operation:
    """Never end."""
    return (5, 0, 0, 0, 0)


def fail(code: int) -> Operation:
    """End the context with the driver's error `code`."""
    return (6, code, 0, 0, 0)


def spend(nanoseconds: int) -> Operation:
    """Take device time."""
    return (7, nanoseconds, 0, 0, 0)


def skip_if_word(parameter: int, offset: int, value: int, operations: int) -> Operation:
    """Skip operations where a word of memory has this value."""
    return (8, parameter, offset, value, operations)


def skip_if_address(parameter: int, bit: int, operations: int) -> Operation:
    """Skip operations where a pointer has this bit."""
    return (9, parameter, bit, 0, operations)


def keep_shared(parameter: int, offset: int, size: int, place: int) -> Operation:
    """Copy into shared memory."""
    return (10, parameter, offset, size, place)


def take_shared(parameter: int, offset: int, size: int, place: int) -> Operation:
    """Copy from shared memory."""
    return (11, parameter, offset, size, place)


def skip_if_shared(place: int, value: int, operations: int) -> Operation:
    """Skip operations where a word of shared memory has this value."""
    return (12, place, value, 0, operations)


def skip_if_time(modulus: int, remainder: int, operations: int) -> Operation:
    """Skip operations at some of the device's times, in ns."""
    return (13, modulus, remainder, 0, operations)


def crash() -> Operation:
    """Take the process down, as a fault in the driver itself does."""
    return (14, 0, 0, 0, 0)


def find_elsewhere(parameter: int, size: int, *, alike: bool = False) -> Operation:
    """Copy the first other data anywhere on the device; `alike`: that begins as the buffer does."""
    return (16, parameter, size, int(alike), 0)


def spoil_copies(parameter: int, size: int) -> Operation:
    """Change whatever else on the device begins as a buffer does."""
    return (19, parameter, size, 0, 0)


def noise(parameter: int, offset: int, size: int) -> Operation:
    """Bytes that differ from launch to launch."""
    return (17, parameter, offset, size, 0)


def skip_if_later(nanoseconds: int, operations: int) -> Operation:
    """Skip operations from this device time on."""
    return (18, nanoseconds, 0, 0, operations)


def image(
    name: str,
    parameters: Sequence[str],
    operations: Sequence[Operation],
    global_bytes: int = 0,
    initial: bytes = b"",
    referred: bool = False,
) -> bytes:
    """A cubin of one kernel; `global_bytes`, or `initial` ones, of memory that it keeps from launch to launch.

    `referred`: whether its code is told where the initial ones are.
    """
    sizes = bytes(8 if p.startswith("*") else len(pack_scalar(p, 0)) for p in parameters)
    body = (
        b"FKC1"
        + struct.pack("<II", len(sizes), len(operations))
        + sizes.ljust(-(-len(sizes) // 4) * 4, b"\0")
    )
    body += b"".join(struct.pack("<5q", *one) for one in operations)
    sections = [("", 0, b"", 0), (f".text.{name}", 6, body, 0)]
    if global_bytes:
        sections.append((".nv.global", 3, b"", global_bytes))
    if initial:
        sections.append((".nv.global.init", 3, initial, 0))
    kinds = {".symtab": (2, 0), ".rel.text": (9, len(sections))}
    """Kinds of sections, and what they are about, where that matters."""
    if referred:
        place = len(sections) - 1
        sections.append((".symtab", 0, bytes(24) + struct.pack("<IBBHQQ", 0, 3, 0, place, 0, 0), 0))
        sections.append((".rel.text", 0, struct.pack("<QQ", 8, 1 << 32 | 2), 0))
    names = b"\0".join(s[0].encode() for s in sections) + b"\0.shstrtab\0"
    sections.append((".shstrtab", 0, names, 0))
    offset, rows, data, at = 64, b"", b"", 0
    for title, flags, content, reserved in sections:
        size = reserved or len(content)
        kind, link = kinds.get(title, (8 if reserved else 1, 0))
        rows += struct.pack("<IIQQQQIIQQ", at, kind, flags, 0, offset, size, link, 0, 1, 0)
        at += len(title) + 1
        data += content
        offset += len(content)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        *(2, 190, 1, 0, 0, offset, 0, 64, 0, 0, 64, len(sections), len(sections) - 1),
    )
    return header + data + rows


ADDITION = ("*fp32", "*fp32", "*fp32", "i32")
"""Parameters of a kernel that adds: left, right, sum, elements."""


def addition(
    candidate: str,
    operations: Sequence[Operation],
    count: int,
    *,
    name: str = "kernel",
    global_bytes: int = 0,
    scratch_bytes: int = 0,
    parameters: Sequence[str] = ADDITION,
) -> Program:
    """A program that is to return the sum of `x` and `y`, `count` float32 each, by these operations.

    Parameters are x, y, the sum and the count; with `scratch_bytes` a fifth points to memory of its own.
    """
    kinds = (*parameters, "*i8") if scratch_bytes else tuple(parameters)
    code = image(name, kinds, operations, global_bytes)
    kernel = CompiledKernel(name, 90, kinds, image=code)
    buffers = [
        PlanBuffer("x", BufferRole.INPUT, 4 * count),
        PlanBuffer("y", BufferRole.INPUT, 4 * count),
        PlanBuffer("sum", BufferRole.SCRATCH, 4 * count),
    ]
    given = [*(KernelArgument(n) for n in ("x", "y", "sum")), KernelArgument(value=count)]
    if scratch_bytes:
        buffers.append(PlanBuffer("own", BufferRole.SCRATCH, scratch_bytes))
        given.append(KernelArgument("own"))
    step = PlanStep(0, (1, 1, 1), tuple(given))
    returned = (ReturnedTensor("sum", 0, "float32", (count,)),)
    return Program(candidate, (kernel,), LaunchPlan(tuple(buffers), (step,), returned))


def honest(cost_ns: int = 50_000) -> list[Operation]:
    """A right sum that takes so long."""
    return [add(2, 0, 1, 3), spend(cost_ns)]
