"""Messages between a runner and its host: requests, answers, outputs of launches, and marks of running code."""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from forecast_autotune.records.codec import Record
from forecast_autotune.timing import pause_lengths
from forecast_harness.clocks.records import MachineCodeError, Program
from forecast_harness.sandbox.jobs import SandboxError, TensorBytes


@dataclass(frozen=True)
class BufferContents:
    """`size` bytes: `data`, as often as it takes. Raises `MachineCodeError` for data that cannot fill it."""

    data: bytes
    size: int

    def __post_init__(self) -> None:
        if len(self.data) > self.size or (self.size and not self.data):
            raise MachineCodeError(f"{len(self.data)} bytes cannot be the contents of {self.size}")

    @classmethod
    def of(cls, data: bytes) -> BufferContents:
        """These bytes, once."""
        return cls(data, len(data))

    def whole(self) -> bytes:
        """All bytes."""
        if len(self.data) == self.size:
            return self.data
        return (self.data * (self.size // len(self.data) + 1))[: self.size]


class RunnerFaultKind(StrEnum):
    """The kind of fault that a program was for the runner."""

    HANG = "hang"
    DEVICE_ERROR = "device error"
    """The driver reported an error that ends the context, such as an illegal address."""
    REFUSED = "refused"
    """The driver or the runner refused the program: bad code, too many resources, too little memory."""
    CRASH = "crash"
    """The runner died, twice."""


class ProgramFault(SandboxError):
    """A fault of a program of `candidate`; `kind` says which."""

    def __init__(self, kind: RunnerFaultKind, candidate: str, detail: str) -> None:
        super().__init__(f"{candidate}: {kind}: {detail}")
        self.kind, self.candidate, self.detail = kind, candidate, detail


@dataclass(frozen=True)
class FaultRecord(Record, label="fault"):
    """One fault, for the log."""

    candidate: str
    kind: str
    detail: str
    restart_s: float = 0.0
    """Seconds until a healthy runner was back; 0 where the old one went on."""


@dataclass(frozen=True)
class Violation(Record, label="violation"):
    """An act that no right program does."""

    contestant: int
    rule: str
    detail: str


PAUSES = len(pause_lengths())


@dataclass(frozen=True)
class TimingLimits(Record, label="timing limits"):
    """Rules on the end of timing."""

    least: int = 5
    """Launches of each contestant before any is given up; behind pauses in whole rounds of those."""
    most: int = 24
    bound_s: float = 0.0
    """Seconds that a contestant must be able to beat; 0: those of the first contestant, if there are two."""
    checks: int = 2
    """Launches of the last contestant whose outputs are kept, at random."""


@dataclass(frozen=True)
class ElementKind(Record, label="element kind"):
    """The meaning of a buffer's bytes: elements of this type, after `late` bytes that belong to none."""

    dtype: str
    late: int = 0


@dataclass(frozen=True)
class ProgramInputs:
    """The inputs of a call, and how they may be changed."""

    key: str
    """The name of the inputs: calls of one key have the same inputs, which are sent once."""
    inputs: Mapping[str, BufferContents]
    """The contents, by buffer."""
    outputs: Mapping[str, int] = field(default_factory=dict)
    """Sizes of buffers that are given to be written."""
    rotate: Mapping[str, int] = field(default_factory=dict)
    """Inputs whose contents may be rotated, by multiples of so many bytes."""
    updates: tuple[str, ...] = ()
    """Inputs that may be written."""


@dataclass(frozen=True)
class ObservedLaunch:
    """The outputs of one launch, and how far its inputs were rotated, in bytes."""

    rotation: Mapping[str, int]
    outputs: tuple[bytes, ...] = ()
    """The outputs; none at a call whose results were learned."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """The largest error in each buffer, relative to the largest right value there, at a call whose results were
    learned, for a launch that was not rotated."""


@dataclass(frozen=True)
class CheckAnswer:
    """The launches of a program, and the rules that it broke."""

    launches: tuple[ObservedLaunch, ...]
    violations: tuple[Violation, ...]


@dataclass(frozen=True)
class TimingRequest:
    """One program, or two side by side of which the second is on trial, to be timed at one call."""

    programs: Sequence[Program]
    given: ProgramInputs
    limits: TimingLimits = TimingLimits()


@dataclass
class TimingAnswer:
    """Seconds of each contestant's launches, and the outputs of some of the last contestant's."""

    seconds: list[list[float]]
    stopped: str = ""
    """Why timing ended early; '' where it did not."""
    recorded: bool = False
    """Whether launches were replayed behind pauses."""
    launches: list[ObservedLaunch] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)


NOBODY = -1
"""The mark while no contestant's code runs."""
_FORMAT = struct.Struct("<iI")


class LaunchMarker:
    """A contestant's number, and a serial number that is another one for every launch."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of a memory file as `create_marker` makes it."""
        self._memory = mmap.mmap(descriptor, _FORMAT.size)
        self._serial = 0

    def set(self, contestant: int) -> None:
        """Mark the contestant whose code runs from here on."""
        self._serial = (self._serial + 1) % (1 << 32)
        self._memory[:] = _FORMAT.pack(contestant, self._serial)

    def read(self) -> tuple[int, int]:
        """(contestant, serial number)."""
        contestant, serial = _FORMAT.unpack(self._memory[:])
        return contestant, serial

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


def create_marker() -> int:
    """The descriptor of a new memory file for marks."""
    result = os.memfd_create("run-marks")
    os.ftruncate(result, _FORMAT.size)
    return result


def encode_launches(
    launches: Sequence[ObservedLaunch], part: str
) -> tuple[list[dict[str, Any]], dict[str, TensorBytes]]:
    """Launches in JSON, and the bytes of their outputs by `PART/LAUNCH/OUTPUT`."""
    facts = [
        {
            "rotation": dict(launch.rotation),
            "outputs": len(launch.outputs),
            "errors": {n: e if math.isfinite(e) else None for n, e in launch.errors.items()},
        }
        for launch in launches
    ]
    arrays = {
        f"{part}/{number}/{place}": TensorBytes("uint8", (len(data),), data)
        for number, launch in enumerate(launches)
        for place, data in enumerate(launch.outputs)
    }
    return facts, arrays


def decode_launches(
    facts: Sequence[Mapping[str, Any]], arrays: Mapping[str, TensorBytes], part: str
) -> tuple[ObservedLaunch, ...]:
    """The launches that `encode_launches` was given. Raises `KeyError` for an output that was not sent."""
    return tuple(
        ObservedLaunch(
            launch["rotation"],
            tuple(bytes(arrays[f"{part}/{number}/{place}"].data) for place in range(launch["outputs"])),
            {n: math.inf if e is None else float(e) for n, e in launch["errors"].items()},
        )
        for number, launch in enumerate(facts)
    )
