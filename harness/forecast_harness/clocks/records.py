"""A cell's answer about a solution: machine code, and how it is launched on which buffers. Plain data.

All of it is the candidate's word. `LaunchPlan.check` and `cubin_sections.check_cubin` bound what it can mean;
whether it is right, the runner's launches show.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from forecast_autotune.records import digest
from forecast_autotune.records.codec import Record, json_option
from forecast_harness.sandbox.jobs import SandboxError, byte_size
from forecast_harness.targets.cuda import MOST_BLOCK, MOST_GRID, MOST_THREADS

SCALAR_FORMATS: Mapping[str, str] = {
    "i1": "b",
    "u1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp16": "e",
    "bf16": "bf16",
    "fp32": "f",
    "f32": "f",
    "fp64": "d",
}
"""Triton's scalar types and how `struct` packs them; bfloat16 is the upper half of a float32."""
_SYMBOL = re.compile(r"[A-Za-z_.$][\w.$]*")
MOST_STEPS = 64
MOST_BUFFERS = 128
MOST_PARAMETERS = 256


class MachineCodeError(SandboxError):
    """Machine code or a launch plan that breaks a rule; the text names the rule and the value."""


class BufferRole(StrEnum):
    """The purpose of a buffer of a plan."""

    INPUT = "input"
    """Filled by the runner, and unchanged by a right solution unless the problem says so."""
    OUTPUT = "output"
    """Given by the problem to be written into."""
    SCRATCH = "scratch"
    """Allocated by the solution, its results included."""


def _name_list(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise MachineCodeError(f"must be a list of texts, not {value!r:.80}")
    return tuple(value)


@dataclass(frozen=True)
class CompiledKernel(Record, label="compiled kernel", unknown="refuse"):
    """One kernel's machine code and the facts that its launch needs."""

    name: str
    """The symbol in the code."""
    arch: int
    """Compute capability it was compiled for, as in sm_90: 90."""
    parameters: tuple[str, ...] = field(metadata=json_option(read=_name_list))
    """Types of the parameters in order, pointers as `*fp16`; constants that were compiled in are not there."""
    scratch_parameters: int = 0
    """Pointers that the compiler appended: memory for the kernel's own use, then for a profiler's."""
    shared_bytes: int = 0
    num_warps: int = 4
    block: tuple[int, int, int] = field(default=(0, 0, 0), metadata=json_option(read=lambda v: _grid(v)))
    """Threads along each axis; zeros: `num_warps` warps along the first."""
    num_ctas: int = 1
    """Blocks of a cluster, along the first axis."""
    global_scratch_bytes: int = 0
    """Bytes of scratch for each block."""
    global_scratch_align: int = 1
    profile_scratch_bytes: int = 0
    profile_scratch_align: int = 1
    cooperative: bool = False
    image: bytes = field(default=b"", repr=False, metadata=json_option(private=True))
    """The cubin."""

    def __post_init__(self) -> None:
        if not _SYMBOL.fullmatch(self.name) or len(self.name) > 2000:
            raise MachineCodeError(f"a kernel's name must be a symbol, not {self.name!r:.80}")
        if len(self.parameters) > MOST_PARAMETERS:
            raise MachineCodeError(f"{len(self.parameters)} parameters; at most {MOST_PARAMETERS} are taken")
        for kind in self.parameters:
            if not kind.startswith("*") and kind not in SCALAR_FORMATS:
                raise MachineCodeError(f"parameters of type {kind!r:.40} cannot be passed by the runner")
        for name, low, high in (
            ("arch", 50, 200),
            ("scratch_parameters", 0, 2),
            ("shared_bytes", 0, 1 << 20),
            ("num_warps", 1, 32),
            ("num_ctas", 1, 16),
            ("global_scratch_bytes", 0, 1 << 24),
            ("profile_scratch_bytes", 0, 1 << 24),
            ("global_scratch_align", 1, 4096),
            ("profile_scratch_align", 1, 4096),
        ):
            if not low <= getattr(self, name) <= high:
                raise MachineCodeError(f"{name} must be in [{low}, {high}], not {getattr(self, name)}")
        if any(self.block) and not (
            all(1 <= n <= most for n, most in zip(self.block, MOST_BLOCK, strict=True))
            and math.prod(self.block) <= MOST_THREADS
        ):
            raise MachineCodeError(
                f"a block must have at most {MOST_BLOCK} threads, {MOST_THREADS} in all, not {self.block}"
            )

    @property
    def threads(self) -> tuple[int, int, int]:
        """The threads of a block, along each axis."""
        return self.block if any(self.block) else (32 * self.num_warps, 1, 1)

    @property
    def id(self) -> str:
        """A stable name of the code and of how it is launched."""
        return digest(self.to_json(), hashlib.sha256(self.image).hexdigest())


@dataclass(frozen=True)
class PlanBuffer(Record, label="buffer", unknown="refuse"):
    """Memory that a plan names."""

    name: str
    role: BufferRole
    size: int
    """Bytes."""


@dataclass(frozen=True)
class KernelArgument(Record, label="argument", unknown="refuse"):
    """An address inside a buffer, or a number."""

    buffer: str = ""
    offset: int = 0
    """Bytes from the buffer's beginning."""
    value: float | int = field(default=0, metadata=json_option(read=lambda v: v))
    """The number, where no buffer is named."""


@dataclass(frozen=True)
class PlanStep(Record, label="step", unknown="refuse"):
    """A kernel's launch; or, where `fill` names a buffer, bytes that are set as torch would."""

    kernel: int = 0
    """Number of the kernel among those that come with the plan."""
    grid: tuple[int, int, int] = field(default=(1, 1, 1), metadata=json_option(read=lambda v: _grid(v)))
    arguments: tuple[KernelArgument, ...] = ()
    fill: str = ""
    offset: int = 0
    size: int = 0
    pattern: int = 0
    """The value of each of `size / width` elements, little-endian."""
    width: int = 1
    """Bytes of the pattern: 1, 2 or 4."""


@dataclass(frozen=True)
class ReturnedTensor(Record, label="returned tensor", unknown="refuse"):
    """The place of a returned tensor, which is contiguous."""

    buffer: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes. Raises `WireError` for a dtype or shape that is none."""
        return byte_size(self.dtype, self.shape)


def _grid(value: object) -> tuple[int, int, int]:
    if not isinstance(value, list | tuple) or len(value) != 3 or any(type(n) is not int for n in value):
        raise MachineCodeError(f"a grid or block must be three integers, not {value!r:.80}")
    return (value[0], value[1], value[2])


@dataclass(frozen=True)
class LaunchPlan(Record, label="launch plan", unknown="refuse"):
    """The work of a solution on the device for arguments of these sizes."""

    buffers: tuple[PlanBuffer, ...]
    steps: tuple[PlanStep, ...]
    returned: tuple[ReturnedTensor, ...] = ()

    def check(
        self, kernels: Sequence[CompiledKernel], given: Mapping[str, int], *, scratch_limit: int
    ) -> None:
        """Compare with the facts of the trusted side: `given` are the bytes of inputs and outputs by name.

        `scratch_limit`: most bytes that the solution may allocate. Raises `MachineCodeError` for the first
        rule that is broken.
        """
        sizes = {b.name: b.size for b in self.buffers}
        if len(sizes) != len(self.buffers) or len(sizes) > MOST_BUFFERS:
            raise MachineCodeError(f"buffers must be at most {MOST_BUFFERS}, each with a name of its own")
        own = {b.name: b.size for b in self.buffers if b.role is not BufferRole.SCRATCH}
        if own != dict(given):
            raise MachineCodeError(f"inputs and outputs must be {dict(given)}, the plan has {own}")
        scratch = [b.size for b in self.buffers if b.role is BufferRole.SCRATCH]
        scratch += [
            math.prod(s.grid) * k.num_ctas * (k.global_scratch_bytes + k.profile_scratch_bytes)
            for s in self.steps
            if not s.fill
            for k in kernels[s.kernel : s.kernel + 1]
        ]
        if min(sizes.values(), default=0) < 0 or sum(scratch) > scratch_limit:
            raise MachineCodeError(f"scratch takes {sum(scratch)} bytes; at most {scratch_limit} are given")
        if not 1 <= len(self.steps) <= MOST_STEPS or all(s.fill for s in self.steps):
            raise MachineCodeError(f"a plan has 1 to {MOST_STEPS} steps with a launch, not {len(self.steps)}")
        for number, step in enumerate(self.steps):
            _check_step(f"step {number}", step, kernels, sizes)
        for tensor in self.returned:
            if tensor.buffer not in sizes or not 0 <= tensor.offset <= sizes[tensor.buffer] - tensor.size:
                raise MachineCodeError(f"a returned tensor lies outside of buffer {tensor.buffer!r:.60}")


def _check_step(
    which: str, step: PlanStep, kernels: Sequence[CompiledKernel], sizes: Mapping[str, int]
) -> None:
    if step.fill:
        size = sizes.get(step.fill, -1)
        if not 0 <= step.offset <= step.offset + step.size <= size or step.size < 0:
            raise MachineCodeError(f"{which} fills bytes outside of {step.fill!r:.60}, which has {size}")
        if step.width not in (1, 2, 4) or step.size % step.width or step.offset % step.width:
            raise MachineCodeError(f"{which} fills elements of {step.width} bytes in {step.size}")
        if not 0 <= step.pattern < 1 << 8 * step.width:
            raise MachineCodeError(f"{which} has a pattern wider than {step.width} bytes")
        return
    if not 0 <= step.kernel < len(kernels):
        raise MachineCodeError(f"{which} launches kernel {step.kernel} of {len(kernels)}")
    kernel = kernels[step.kernel]
    if not all(1 <= n <= most for n, most in zip(step.grid, MOST_GRID, strict=True)):
        raise MachineCodeError(f"{which} has the grid {step.grid}; each axis takes 1 to {MOST_GRID}")
    if step.grid[0] * kernel.num_ctas > MOST_GRID[0]:
        raise MachineCodeError(f"{which} has more than {MOST_GRID[0]} blocks along its first axis")
    if len(step.arguments) != len(kernel.parameters):
        raise MachineCodeError(
            f"{which} has {len(step.arguments)} arguments, {kernel.name} takes {len(kernel.parameters)}"
        )
    for n, (argument, kind) in enumerate(zip(step.arguments, kernel.parameters, strict=True)):
        _check_argument(f"{which}, argument {n}", argument, kind, sizes)


def _check_argument(which: str, argument: KernelArgument, kind: str, sizes: Mapping[str, int]) -> None:
    if kind.startswith("*"):
        size = sizes.get(argument.buffer, -1)
        if not 0 <= argument.offset <= size:
            raise MachineCodeError(f"{which} must point into a buffer, not {argument.to_json()}")
        return
    value: Any = argument.value
    if argument.buffer or type(value) not in (int, float):
        raise MachineCodeError(f"{which} must be a number of type {kind}, not {argument.to_json()}")
    if kind[0] in "iu" and kind != "i1":
        bits = int(kind[1:])
        low, high = (-(1 << bits - 1), 1 << bits - 1) if kind[0] == "i" else (0, 1 << bits)
        if type(value) is not int or not low <= value < high:
            raise MachineCodeError(f"{which} must be an integer of type {kind}, not {value!r:.40}")
    elif kind == "i1" and value not in (0, 1):
        raise MachineCodeError(f"{which} must be 0 or 1, not {value!r:.40}")
    elif not math.isfinite(value):
        raise MachineCodeError(f"{which} must be a finite number, not {value!r:.40}")


@dataclass(frozen=True)
class Program(Record, label="program", unknown="refuse"):
    """A solution at some sizes, ready to be launched."""

    candidate: str
    """The name of the source to blame for faults."""
    kernels: tuple[CompiledKernel, ...]
    plan: LaunchPlan
