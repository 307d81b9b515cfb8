"""What was measured: `Measurement`. A failed one has no time, an `ok` one has a finite positive one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.base import SCHEMA, Extra, check_line
from forecast_autotune.records.candidate import Candidate, Config, Outcome
from forecast_autotune.records.json_fields import read_integer, read_integers, read_number, unknown_fields


@dataclass(frozen=True)
class Measurement:
    """One candidate tried for real: an outcome, and times in milliseconds if it ran."""

    problem: str
    candidate: Candidate
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
    grid: tuple[int, ...] | None = None
    extra: Extra = field(default_factory=dict, compare=False, repr=False)
    """Unknown fields, and free-form facts such as `message`, `registers`, `spills`, `shared`."""

    def __post_init__(self) -> None:
        times = (self.median_ms, self.p20_ms, self.p80_ms)
        if self.outcome is Outcome.OK:
            if self.median_ms is None or not all(t is None or (math.isfinite(t) and t > 0) for t in times):
                raise RecordError(f"an ok measurement needs finite positive times, got {times}")
        elif any(t is not None for t in times):
            raise RecordError(f"a measurement with outcome {self.outcome} cannot carry a time, got {times}")
        if self.compile_s is not None and not 0 <= self.compile_s < math.inf:
            raise RecordError(f"compile_s must be finite and at least 0, or None, got {self.compile_s}")

    @property
    def ok(self) -> bool:
        """Whether the candidate ran and has a time."""
        return self.outcome is Outcome.OK

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

    def to_json(self) -> dict[str, Any]:
        """The `measurement` line of a table."""
        data: dict[str, Any] = {
            **dict(self.extra),
            "type": "measurement",
            "schema": SCHEMA,
            "problem": self.problem,
            "variant": self.candidate.variant,
            "config": self.candidate.config.to_json(),
            "outcome": str(self.outcome),
            "median_ms": self.median_ms,
            "p20_ms": self.p20_ms,
            "p80_ms": self.p80_ms,
            "repeats": self.repeats,
            "compile_s": self.compile_s,
            "protocol": self.protocol,
            "at": self.at,
        }
        if self.grid is not None:
            data["grid"] = list(self.grid)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Read a `measurement` line. Raises `RecordError` naming what is wrong."""
        check_line(data, "measurement")
        try:
            return cls(
                problem=str(data["problem"]),
                candidate=Candidate(Config.from_json(data["config"]), str(data.get("variant", "base"))),
                outcome=Outcome(data["outcome"]),
                median_ms=read_number(data.get("median_ms"), "median_ms"),
                p20_ms=read_number(data.get("p20_ms"), "p20_ms"),
                p80_ms=read_number(data.get("p80_ms"), "p80_ms"),
                repeats=read_integer(data.get("repeats") or 0, "repeats"),
                compile_s=read_number(data.get("compile_s"), "compile_s"),
                protocol=str(data.get("protocol") or ""),
                at=str(data.get("at") or ""),
                grid=None if data.get("grid") is None else read_integers(data["grid"], "grid"),
                extra=unknown_fields(data, _MEASUREMENT_FIELDS),
            )
        except RecordError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"measurement line is malformed: {error!r} in {data!r:.160}") from error


_MEASUREMENT_FIELDS = frozenset(
    (
        "type",
        "schema",
        "problem",
        "variant",
        "config",
        "outcome",
        "median_ms",
        "p20_ms",
        "p80_ms",
        "repeats",
        "compile_s",
        "protocol",
        "at",
        "grid",
    )
)
