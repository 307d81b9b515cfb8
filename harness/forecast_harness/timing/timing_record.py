"""A time with all that one must know before believing or comparing it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forecast_autotune.errors import RecordError


@dataclass(frozen=True)
class TimingSummary:
    """Times of one solution on one workload, in milliseconds."""

    median_ms: float
    p20_ms: float
    p80_ms: float
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

    def to_json(self) -> dict[str, Any]:
        """All fields by name, and the spread."""
        return {
            "median_ms": float(f"{self.median_ms:.6g}"),
            "p20_ms": float(f"{self.p20_ms:.6g}"),
            "p80_ms": float(f"{self.p80_ms:.6g}"),
            "n": self.n,
            "spread": round(self.spread, 5),
            "protocol": self.protocol,
            "harness": self.harness,
            "device_uuid": self.device_uuid,
            "clocks": dict(self.clocks),
        }
