"""A measurer that tries every candidate at all measured sizes of a range."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from forecast_autotune.ranges.points import RangeRows
from forecast_autotune.records import Candidate, Measurement, MeasuringCost
from forecast_autotune.tuning.measurer import Measurer


class RangeMeasurer:
    """Asks one measurer per measured point, and answers with one measurement for the range.

    Candidates are compiled for the first point; the others find binaries there, or compile their own. `keep` is told
    of each point's own measurement as soon as it exists: (point, measurement). What is known of a point is not
    measured again.
    """

    def __init__(
        self, measurers: Sequence[Measurer], rows: RangeRows, keep: Callable[[int, Measurement], None]
    ) -> None:
        self._first, *self._others = measurers
        self._all = list(measurers)
        self._rows, self._keep = rows, keep

    @property
    def workers(self) -> int:
        """As the first point's."""
        return self._first.workers

    @property
    def quiet(self) -> bool:
        """As the first point's."""
        return self._first.quiet

    def ready(self) -> Collection[Candidate]:
        """As the first point's."""
        return self._first.ready()

    def compiling(self) -> Mapping[Candidate, float]:
        """As the first point's."""
        return self._first.compiling()

    def prefetch(self, candidates: Sequence[Candidate]) -> None:
        """As the first point's."""
        self._first.prefetch(candidates)

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        prefetch: Sequence[Candidate] = (),
        within_s: float | None = None,
    ) -> Iterator[Measurement]:
        """Yield one measurement per candidate for all measured points together, as the first point's finishes."""
        known = self._rows.labels(self._rows.measured[0])
        for candidate in candidates:
            if candidate in known:
                yield self._complete(known[candidate])
        fresh = [c for c in candidates if c not in known]
        if fresh:
            for m in self._first.measure(fresh, prefetch=prefetch, within_s=within_s):
                self._keep(self._rows.measured[0], m)
                yield self._complete(m)

    def _complete(self, first: Measurement) -> Measurement:
        parts = [first]
        for point, measurer in zip(self._rows.measured[1:], self._others, strict=True):
            if not parts[-1].ok:
                break
            known = self._rows.labels(point).get(first.candidate)
            if known is not None:
                parts.append(known)
                continue
            # Kept before the next is asked for: what has lost the device says so then.
            for found in measurer.measure([first.candidate]):
                self._keep(point, found)
                parts.append(found)
        return self._rows.combine(parts)

    def compare(self, candidates: Sequence[Candidate]) -> list[Measurement]:
        """Time the candidates in turns at each point; empty where one of the points has no such times."""
        points = []
        for point, measurer in zip(self._rows.measured, self._all, strict=True):
            timed = measurer.compare(candidates)
            if len(timed) != len(candidates):
                return []
            for m in timed:
                self._keep(point, m)
            points.append(timed)
        return [self._rows.combine(parts) for parts in zip(*points, strict=True)]

    def spent(self) -> MeasuringCost:
        """Of all points together; the wall clock is the first one's."""
        costs = [m.spent() for m in self._all]
        return MeasuringCost(
            sum(c.compile_s for c in costs),
            sum(c.timing_s for c in costs),
            sum(c.compiled for c in costs),
            max(c.wall_s for c in costs),
        )

    def close(self) -> None:
        """Close all."""
        for measurer in self._all:
            measurer.close()
