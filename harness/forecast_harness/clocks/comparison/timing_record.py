"""A time with all that one must know before believing or comparing it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import significant


@dataclass(frozen=True)
class TimingSummary(
    Record,
    label="timing",
    order=("median_ms", "p20_ms", "p80_ms", "n", "spread", "protocol", "harness", "device_uuid", "clocks"),
    derived={"spread": lambda timing: round(timing.spread, 5)},
):
    """Times of one solution on one workload, in milliseconds."""

    median_ms: float = field(metadata=json_option(write=significant(6)))
    p20_ms: float = field(metadata=json_option(write=significant(6)))
    p80_ms: float = field(metadata=json_option(write=significant(6)))
    n: int
    protocol: str
    """Which clock and cache state; only equal ones are comparable."""
    harness: str
    """Hash of the code that timed."""
    device_uuid: str = ""
    clocks: Mapping[str, Any] = field(default_factory=dict)
    """Clocks, temperature, power and throttle reasons around the samples, where the driver tells."""

    def __post_init__(self) -> None:
        if not 0 < self.p20_ms <= self.median_ms <= self.p80_ms:
            raise RecordError(
                f"times must be positive and in order, got {self.p20_ms}, {self.median_ms}, {self.p80_ms}"
            )
        if self.n < 1:
            raise RecordError(f"a label needs at least one sample, got n={self.n}")

    @property
    def spread(self) -> float:
        """Distance of the outer quintiles over the median."""
        return (self.p80_ms - self.p20_ms) / self.median_ms

    @classmethod
    def of(cls, seconds: Sequence[float], **about: Any) -> TimingSummary:
        """The label of samples in seconds. Raises `RecordError` for none or for times of zero."""
        if not seconds:
            raise RecordError("a label needs at least one sample, got none")
        ordered = sorted(1e3 * s for s in seconds)
        n = len(ordered)
        low, high = ordered[n // 5], ordered[min(n - 1, (4 * n) // 5)]
        return cls(statistics.median(ordered), low, high, n, **about)
