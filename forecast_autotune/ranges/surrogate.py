"""Forecasts of a candidate's time for a range, from those of its sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from forecast_autotune.ranges.points import RangeRows
from forecast_autotune.surrogates.protocol import Array, FileBackedSurrogate, Forecasts, Query, Surrogate


class RangeSurrogate:
    """Asks a surrogate about each measured point, and weighs its answers as the measurements are weighed.

    Errors at different sizes are taken for one error: the same joint draws are used for all of them.
    """

    def __init__(self, inner: Surrogate, rows: RangeRows) -> None:
        self._inner, self._rows = inner, rows
        self.name, self.version = inner.name, inner.version
        self.texts: Mapping[str, str] = {}
        """TTIR by assignment, as the last query had it."""

    def load(self) -> None:
        """Read the inner surrogate's files."""
        if isinstance(self._inner, FileBackedSurrogate):
            self._inner.load()

    def forecast(self, query: Query) -> Forecasts:
        """Forecasts of the weighted geometric mean over the measured points. Raises what the inner one raises."""
        self.texts = query.ttir
        rows = self._rows
        found = [self.at_point(query, i) for i in rows.measured]
        first = found[0]

        def weighed(values: Sequence[Array]) -> Array:
            return np.asarray(sum(w * v for w, v in zip(rows.shares, values, strict=True)))

        def draw(chosen: npt.NDArray[np.intp], count: int, generator: np.random.Generator) -> Array:
            seed = int(generator.integers(2**31))
            return weighed([f.samples(chosen, count, seed) for f in found])

        return replace(
            first,
            mean=weighed([f.mean for f in found]),
            sd=weighed([f.sd for f in found]),
            p_fail=np.max([f.p_fail for f in found], axis=0),
            lower_bound=weighed([f.optimistic() for f in found]),
            sampler=draw,
            without_llm=None,
        )

    def at_point(self, query: Query, point: int) -> Forecasts:
        """The inner surrogate's forecasts at one point, from all that is measured at it and at the others."""
        rows, at = self._rows, self._rows.points[point]
        known = set(query.candidates)
        others = [
            replace(r, problem=replace(r.problem, ttir=r.problem.ttir or query.ttir))
            for r in rows.relatives(point)
        ]
        own = {p.problem.id for p in rows.points}
        others += [r for r in query.relatives if r.problem.id not in own]
        return self._inner.forecast(
            replace(
                query,
                problem=at.problem,
                grids=at.grids or query.grids,
                measured=[m for m in rows.rows[point] if m.candidate in known],
                relatives=others,
                provisional=True,  # a model would be asked of every point, each time anew
            )
        )
