"""A program on the device: its modules, its arguments bound to addresses, its launches."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from forecast_harness.clocks.records import (
    SCALAR_FORMATS,
    BufferRole,
    CompiledKernel,
    KernelArgument,
    LaunchPlan,
    MachineCodeError,
    Program,
)
from forecast_harness.clocks.runner.driver import FUNCTION_LOCAL_BYTES, CudaDriver
from forecast_harness.clocks.runner.memory import Placed

MOST_LOCAL_BYTES = 64 << 10
"""Bytes of a thread's stack and spills; the device holds as much for every thread it can run."""


class LoadedKernel:
    """A kernel's function on the device. Raises `DriverError`, and `MachineCodeError` for one that breaks a rule."""

    def __init__(self, driver: CudaDriver, kernel: CompiledKernel) -> None:
        self.kernel, self._driver = kernel, driver
        self._module = driver.load(kernel.image)
        try:
            self.function = driver.function(self._module, kernel.name)
            self._check()
            driver.allow(self.function, kernel.shared_bytes, kernel.num_ctas)
        except BaseException:
            driver.unload(self._module)
            raise

    def _check(self) -> None:
        kernel = self.kernel
        if (local := self._driver.function_attribute(self.function, FUNCTION_LOCAL_BYTES)) > MOST_LOCAL_BYTES:
            raise MachineCodeError(
                f"{kernel.name} takes {local} bytes of local memory a thread; at most {MOST_LOCAL_BYTES}"
            )
        expected = [_parameter_size(p) for p in kernel.parameters] + [8] * kernel.scratch_parameters
        result = self._driver.parameter_sizes(self.function)
        if result is not None and result != expected:
            raise MachineCodeError(f"{kernel.name} takes parameters of {result} bytes, told were {expected}")

    def unload(self) -> None:
        """Free the module."""
        self._driver.unload(self._module)


def _parameter_size(kind: str) -> int:
    if kind.startswith("*"):
        return 8
    return 2 if kind == "bf16" else struct.calcsize(SCALAR_FORMATS[kind])


def scratch_sizes(program: Program, prefix: str) -> dict[str, int]:
    """Bytes of all buffers that a program needs beside inputs and outputs, by name."""
    sizes = {prefix + b.name: b.size for b in program.plan.buffers if b.role is BufferRole.SCRATCH}
    for number, step in enumerate(program.plan.steps):
        if step.fill:
            continue
        kernel = program.kernels[step.kernel]
        blocks = step.grid[0] * step.grid[1] * step.grid[2] * kernel.num_ctas
        for kind, each in (("own", kernel.global_scratch_bytes), ("profile", kernel.profile_scratch_bytes)):
            if each:
                sizes[f"{prefix}{kind}-{number}"] = each * blocks
    return sizes


class Contestant:
    """One program, loaded and bound to the places of its buffers."""

    def __init__(
        self, driver: CudaDriver, program: Program, kernels: Sequence[LoadedKernel], prefix: str
    ) -> None:
        self.program, self._driver, self._kernels, self._prefix = program, driver, kernels, prefix
        self.scratch = scratch_sizes(program, prefix)
        self._own = {b.name for b in program.plan.buffers if b.role is BufferRole.SCRATCH}
        self._steps: list[tuple[Any, ...]] = []

    @property
    def plan(self) -> LaunchPlan:
        """The launch plan of its program."""
        return self.program.plan

    def buffer(self, name: str) -> str:
        """The placed buffer that the plan's name means."""
        return self._prefix + name if name in self._own else name

    def bind(self, places: Mapping[str, Placed]) -> None:
        """Take the addresses of a placement."""
        self._steps = []
        for number, step in enumerate(self.plan.steps):
            if step.fill:
                address = places[self.buffer(step.fill)].address + step.offset
                self._steps.append((None, address, step.pattern, step.width, step.size // step.width))
                continue
            code = self._kernels[step.kernel]
            kernel = code.kernel
            arguments = [
                self._value(argument, kind, places)
                for argument, kind in zip(step.arguments, kernel.parameters, strict=True)
            ]
            kinds = ("own", "profile")[: kernel.scratch_parameters]
            result = [places.get(f"{self._prefix}{kind}-{number}") for kind in kinds]
            arguments += [ctypes.c_uint64(place.address if place else 0) for place in result]
            self._steps.append((code, step.grid, arguments))

    def launch(self) -> None:
        """Queue all steps."""
        for step in self._steps:
            if step[0] is None:
                self._driver.fill(*step[1:])
            else:
                code, grid, arguments = step
                kernel = code.kernel
                self._driver.launch(
                    code.function,
                    grid,
                    kernel.threads,
                    kernel.shared_bytes,
                    arguments,
                    kernel.num_ctas,
                    kernel.cooperative,
                )

    def _value(self, argument: KernelArgument, kind: str, places: Mapping[str, Placed]) -> Any:
        if kind.startswith("*"):
            return ctypes.c_uint64(places[self.buffer(argument.buffer)].address + argument.offset)
        return (ctypes.c_char * 8).from_buffer_copy(pack_scalar(kind, argument.value).ljust(8, b"\0"))


def pack_scalar(kind: str, value: float | int) -> bytes:
    """The bytes of a scalar argument."""
    if kind == "bf16":
        bits = int.from_bytes(struct.pack("<f", value), "little")
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).to_bytes(2, "little")
    code = SCALAR_FORMATS[kind]
    if kind in ("i1", "u1"):
        return bytes([1 if value else 0])
    return struct.pack(f"<{code}", float(value) if code in "efd" else int(value))
