"""A trial that was timed or failed: `Measurement`. A failed one has no time, an `ok` one has a finite positive one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from forecast_autotune.errors import RecordError
from forecast_autotune.records.base import LARGEST_MS, LARGEST_S, SCHEMA, Extra
from forecast_autotune.records.candidate import Candidate, Outcome
from forecast_autotune.records.codec import Record, json_option

IN_TURNS = "-turns"
"""Ends the protocol of times that were taken side by side."""


@dataclass(frozen=True)
class Measurement(Record, tag="measurement", schema=SCHEMA, lenient=True):
    """One candidate tried for real: an outcome, and times in milliseconds if it ran."""

    problem: str
    candidate: Candidate = field(metadata=json_option(flat=True))
    outcome: Outcome
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    repeats: int = 0
    compile_s: float | None = None
    """Wall seconds spent compiling; None when the binary was already there."""
    protocol: str = ""
    """Which timing protocol gave the times; only equal protocols are compared closely."""
    at: str = ""
    """UTC time, ISO 8601."""
    grid: tuple[int, ...] | None = field(default=None, metadata=json_option(omit_null=True))
    extra: Extra = field(default_factory=dict, compare=False, repr=False)
    """Unknown fields, and free-form facts such as `message`, `registers`, `spills`, `shared`."""

    def __post_init__(self) -> None:
        times = (self.median_ms, self.p20_ms, self.p80_ms)
        if self.outcome is Outcome.OK:
            if self.median_ms is None or not all(t is None or 0 < t <= LARGEST_MS for t in times):
                raise RecordError(f"an ok measurement needs finite positive times, got {times}")
        elif any(t is not None for t in times):
            raise RecordError(f"a measurement with outcome {self.outcome} cannot carry a time, got {times}")
        if self.compile_s is not None and not 0 <= self.compile_s <= LARGEST_S:
            raise RecordError(f"compile_s must be finite and at least 0, or None, got {self.compile_s}")

    @property
    def ok(self) -> bool:
        """Whether the candidate ran and has a time."""
        return self.outcome is Outcome.OK

    @property
    def in_turns(self) -> bool:
        """Whether it was timed side by side with others."""
        return self.protocol.endswith(IN_TURNS)

    @property
    def ms(self) -> float:
        """The median in milliseconds; raises `RecordError` for a failure."""
        if self.median_ms is None:
            raise RecordError(f"{self.candidate} has outcome {self.outcome} and therefore no time")
        return self.median_ms

    @property
    def error_ms(self) -> float:
        """Standard error of the median, as far as the launches tell; 0 where their spread is not known."""
        if self.p20_ms is None or self.p80_ms is None or self.repeats < 2:
            return 0.0
        # Of a normal distribution: 1.253 deviations of the mean, and 1.683 deviations between the quantiles.
        return 1.253 / 1.683 * max(0.0, self.p80_ms - self.p20_ms) / math.sqrt(self.repeats)
