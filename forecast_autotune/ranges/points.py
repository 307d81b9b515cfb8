"""The sizes of a range as problems, what is measured of them, and one time for all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forecast_autotune.records import Candidate, Measurement, Outcome, Problem
from forecast_autotune.records.table import latest_labels
from forecast_autotune.surrogates.protocol import Relative


@dataclass(frozen=True)
class RangePoint:
    """One size of a range: an ordinary problem, whose measurements are filed under its own name."""

    problem: Problem
    label: str
    """`M=16`."""
    grids: Mapping[Candidate, tuple[int, ...]] = field(default_factory=dict)
    """Launch grids, where they depend on the candidate."""


@dataclass
class RangeRows:
    """What is known of every point, and how points that are measured count for the range.

    `shares[i]` is the weight of the measured point i, the sum is 1: a candidate's time for the range is the weighted
    geometric mean of its times at these points.
    """

    problem: str
    """Id of the range's own problem, under which its decision is filed."""
    points: Sequence[RangePoint]
    measured: Sequence[int]
    """Which of the points are measured."""
    shares: Sequence[float]
    rows: list[list[Measurement]]
    """By point: all measurements, in order."""

    def add(self, point: int, measurement: Measurement) -> None:
        """Take note of what happened at a point."""
        self.rows[point].append(measurement)

    def labels(self, point: int) -> dict[Candidate, Measurement]:
        """The latest label per candidate at a point."""
        return latest_labels(self.rows[point])

    def combined(self) -> list[Measurement]:
        """One measurement per candidate that was measured at all measured points, or failed at one."""
        known = [self.labels(i) for i in self.measured]
        found = []
        for candidate in dict.fromkeys(c for labels in known for c in labels):
            parts = [labels[candidate] for labels in known if candidate in labels]
            if len(parts) == len(known) or not all(m.ok for m in parts):
                found.append(self.combine(parts))
        return found

    def combine(self, parts: Sequence[Measurement]) -> Measurement:
        """One measurement for the range from those at the measured points, in order; what failed anywhere fails."""
        failed = next((m for m in parts if not m.ok), None)
        first = parts[0]
        seconds = [m.compile_s for m in parts if m.compile_s is not None]
        compile_s = sum(seconds) if seconds else None
        if failed is not None:
            return Measurement(
                self.problem,
                failed.candidate,
                failed.outcome,
                compile_s=compile_s,
                protocol=failed.protocol,
                at=failed.at,
                extra=failed.extra,
            )

        def mean(times: Sequence[float]) -> float:
            return 2.0 ** sum(w * math.log2(t) for w, t in zip(self.shares, times, strict=True))

        return Measurement(
            self.problem,
            first.candidate,
            Outcome.OK,
            mean([m.ms for m in parts]),
            mean([m.p20_ms or m.ms for m in parts]),
            mean([m.p80_ms or m.ms for m in parts]),
            repeats=min(m.repeats for m in parts),
            compile_s=compile_s,
            protocol=f"{first.protocol}, mean of {len(parts)} sizes",
            at=max(m.at for m in parts),
            extra=first.extra,
        )

    def relatives(self, point: int) -> list[Relative]:
        """What is measured at the other points, nearest first."""
        others = sorted(
            (i for i in range(len(self.points)) if self.rows[i] and i != point), key=lambda i: abs(i - point)
        )
        return [Relative(self.points[i].problem, tuple(self.rows[i])) for i in others]
