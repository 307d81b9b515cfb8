"""Times that cannot be true, for memory, arithmetic or another clock; and a summary of those that can."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forecast_autotune.errors import RecordError
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.json_fields import significant


@dataclass(frozen=True)
class DevicePeaks(Record, label="peaks"):
    """The most a device can do: bytes per second from its slowest level that inputs must cross, and
    floating-point operations per second in the format that the task allows."""

    bytes_per_s: float
    flops_per_s: float


HOST_PEAKS = DevicePeaks(4e12, 5e13)
"""No processor of today is faster, even from its caches: a faster time on a host is no measurement."""

_DISPATCH_ALLOWANCE_S = 50e-6
_MOST_UNEXPLAINED = 0.2
_FEWEST_LAUNCHES = 8
_SLOW_START = 5.0


def matched_times(own: Mapping[str, float], theirs: Mapping[str, float], ratio: float) -> dict[str, float]:
    """`own` times beside `theirs`, of which they are `ratio` times, the geometric mean over what both were timed at.

    A ratio is of pairs of launches, and medians of each side are taken apart: on a busy machine they tell another one.
    Other names keep their times.
    """
    common = own.keys() & theirs.keys()
    off = statistics.fmean(math.log(own[n] / theirs[n]) for n in common) - math.log(ratio) if common else 0.0
    return {name: time * math.exp(-off) for name, time in own.items()}


def roofline_seconds(moved_bytes: float, flops: float, peaks: DevicePeaks) -> float:
    """The least seconds one launch can take (roofline; Williams, Waterman, Patterson 2009)."""
    return max(moved_bytes / peaks.bytes_per_s, flops / peaks.flops_per_s)


def impossible_time(seconds: float, moved_bytes: float, flops: float, peaks: DevicePeaks) -> str:
    """Why one launch cannot have taken so few seconds; '' if it can.

    Applied per workload, before any mean: one time of zero would make a geometric mean zero.
    """
    if not math.isfinite(seconds) or seconds <= 0:
        return f"{seconds!r} s is no time"
    least = roofline_seconds(moved_bytes, flops, peaks)
    if seconds < least:
        return (
            f"{seconds:.3g} s for {moved_bytes:.3g} bytes and {flops:.3g} operations, "
            f"which take {least:.3g} s at the device's peak"
        )
    return ""


def clocks_disagree(
    reported: Sequence[float],
    outside: Sequence[float],
    idle: Sequence[float],
) -> str:
    """How the times reported by a candidate's process contradict those from outside; '' if they agree.

    `outside` is from question to answer by another process's clock, `idle` the same for a question that
    launches nothing. The time of a launch beyond the reported one (its excess) has to be explained by
    `idle`. A lie about every launch shows in the smallest excesses, which a busy machine does not disturb;
    a lie about most shows in the median, which is held against thrice what was reported. A time above the
    outside one is wrong at any rate. Fewer than eight launches say nothing.
    """
    if any(inner > outer for inner, outer in zip(reported, outside, strict=True)):
        return "a launch is said to have taken longer than the question it answered"
    if len(reported) < _FEWEST_LAUNCHES:
        return ""
    typical = _quantile(reported, 0.5)
    excesses = [o - r for r, o in zip(reported, outside, strict=True)]
    for level, overhead, margin in (
        (0.1, _quantile(idle, 0.5), _MOST_UNEXPLAINED),
        (0.5, _asking_overhead(idle), 3.0),
    ):
        excess, limit = (
            _quantile(excesses, level) - overhead,
            margin * typical + _DISPATCH_ALLOWANCE_S + 0.5 * overhead,
        )
        if excess > limit:
            return (
                f"launches took {excess * 1e6:.0f} us more than was reported ({typical * 1e6:.0f} us); "
                f"{limit * 1e6:.0f} us can be explained"
            )
    return ""


def underreported_share(reported: Sequence[float], outside: Sequence[float], idle: Sequence[float]) -> float:
    """The share of launches that took clearly longer than was reported: half as long again, and a dispatch.

    Compared between contestants that were timed in turns, as a busy machine affects both alike: a lie about
    one launch in ten is the least that moves a comparison of pairs.
    """
    limit = _asking_overhead(idle) + 0.5 * _quantile(reported, 0.5) + _DISPATCH_ALLOWANCE_S
    return sum(o - r > limit for r, o in zip(reported, outside, strict=True)) / len(reported)


def _asking_overhead(idle: Sequence[float]) -> float:
    """Seconds that a question may take on this machine now: a busy machine must not convict honest candidates."""
    return _quantile(idle, 0.95)


def slow_at_first(samples: Sequence[float]) -> str:
    """Why the first launches are unlike the last ones; '' if they are not.

    A candidate that is slow at first on purpose makes an adaptive harness take fewer samples. Even the
    fastest of the first quarter must be slower than nine tenths of the last: no burst of load does that,
    nor does compilation, which some launches escape.
    """
    quarter = len(samples) // 4
    if quarter < 3:
        return ""
    first, last = min(samples[:quarter]), _quantile(samples[-quarter:], 0.9)
    if first > _SLOW_START * last:
        return f"each of the first {quarter} launches took at least {first / last:.1f} times the last ones"
    return ""


def _quantile(values: Sequence[float], level: float) -> float:
    ascending = sorted(values)
    return ascending[min(len(ascending) - 1, int(level * len(ascending)))]


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
    """The clock and the cache state; only times of equal ones are comparable."""
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

    def scaled(self, by: float) -> TimingSummary:
        """The summary with all times multiplied by a factor."""
        low, middle, high = (by * ms for ms in (self.p20_ms, self.median_ms, self.p80_ms))
        return replace(self, p20_ms=low, median_ms=middle, p80_ms=high)

    @classmethod
    def of(cls, seconds: Sequence[float], **about: Any) -> TimingSummary:
        """The label of samples in seconds. Raises `RecordError` for none or for times of zero."""
        if not seconds:
            raise RecordError("a label needs at least one sample, got none")
        times = sorted(1e3 * s for s in seconds)
        n = len(times)
        low, high = times[n // 5], times[min(n - 1, (4 * n) // 5)]
        return cls(statistics.median(times), low, high, n, **about)
