"""What a runner is asked for, and what it answers or is told to have gone wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from forecast_autotune.records.codec import Record
from forecast_harness.clocks.records import Program
from forecast_harness.clocks.runner.buffer_contents import BufferContents
from forecast_harness.clocks.runner.session import TimingLimits, Violation
from forecast_harness.sandbox.jobs import SandboxError


class RunnerFaultKind(StrEnum):
    """What a program did to the runner."""

    HANG = "hang"
    DEVICE_ERROR = "device error"
    """The driver reported an error that ends the context, such as an illegal address."""
    REFUSED = "refused"
    """The driver or the runner did not take it: bad code, too many resources, too little memory."""
    CRASH = "crash"
    """The runner died, twice."""


class ProgramFault(SandboxError):
    """A program's doing. `candidate` says whose, `kind` what."""

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
class ProgramInputs:
    """What a call is given; `key` names the bytes, so that they are sent once."""

    key: str
    inputs: Mapping[str, BufferContents]
    outputs: Mapping[str, int] = field(default_factory=dict)
    rotate: Mapping[str, int] = field(default_factory=dict)
    updates: tuple[str, ...] = ()


@dataclass(frozen=True)
class ObservedLaunch:
    """What one launch left behind, and how far its inputs were rotated, in bytes."""

    rotation: Mapping[str, int]
    outputs: tuple[bytes, ...] = ()
    """None at a call whose results were learned."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """At such a call, of a launch that was not rotated: the largest error in each buffer, relative to the largest value
    that is right there."""


@dataclass(frozen=True)
class CheckAnswer:
    """What launches of a program showed."""

    launches: tuple[ObservedLaunch, ...]
    violations: tuple[Violation, ...]


@dataclass(frozen=True)
class TimingRequest:
    """One program, or two side by side of which the second is on trial, to be timed at one call."""

    programs: Sequence[Program]
    given: ProgramInputs
    limits: TimingLimits = TimingLimits()


@dataclass(frozen=True)
class TimingAnswer:
    """Seconds of each contestant's launches, and outputs of some."""

    seconds: tuple[tuple[float, ...], ...]
    stopped: str
    recorded: bool
    launches: tuple[ObservedLaunch, ...]
    violations: tuple[Violation, ...]
