"""What goes through the gates, and what comes out of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from forecast_autotune.records import Outcome
from forecast_autotune.records.codec import Record

LaunchOptions = Mapping[str, int]
"""Triton's options of every launch of a source: one config of it."""


class Gate(StrEnum):
    """How far a source came."""

    NOVELTY = "novelty"
    FORECAST = "forecast"
    COMPILE = "compile"
    CHECK = "check"
    TIME = "time"
    CONFIGS = "configs"
    RACE = "race"
    VERIFY = "verify"


@dataclass(frozen=True)
class ProposedSource:
    """A source and the configs that it may run in, the likeliest to be fast first."""

    name: str
    source: str
    configs: tuple[LaunchOptions, ...] = ({},)


@dataclass(frozen=True)
class SourceVerdict:
    """What became of a source."""

    name: str
    gate: Gate
    """The last one it came to."""
    outcome: Outcome
    """`ok` where it ran and was right on the small case; that is not yet a verification."""
    detail: str = ""
    host_code: bool = False
    """Whether it has to be judged in a sandbox instead."""
    seconds: float = 0.0
    """Of its best config, on the timed case; 0 where none was timed."""
    config: LaunchOptions = field(default_factory=dict)
    timed: int = 0
    """Configs that were timed."""
    incumbent: bool = False
    """Whether it was verified in full, and took the incumbent's place."""


@dataclass(frozen=True)
class GateCounts(Record, label="counts"):
    """How many sources, and configs of them, came how far."""

    proposed: int = 0
    repeated: int = 0
    unpromising: int = 0
    compiled: int = 0
    checked: int = 0
    timed: int = 0
    verified: int = 0
    judged: int = 0
    faults: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class GateRules(Record, label="gate rules"):
    """When a source is given up."""

    worse: float = 1.05
    """Times the incumbent's: a first config beyond it ends the source."""
    gain: float = 0.005
    """Share by which a source must be faster than the incumbent to be verified for its place."""
    progress_s: float = 1.0
    """Longest time without telling progress."""
    ahead: int = 3
    """Sources that are compiled ahead, for each worker."""
