"""The surrogate that ships: asks for each problem the one that can make the most of what is known.

Where the same sizes were measured densely on other devices, those tables outdo any formula (`pooled`); at
other sizes on the same device the formula carries over better than a table does, so the learned surrogate
answers, unless there is no IR for it to read. No recorded problem has both IR and dense tables from other
devices, so whether the formula would add anything to them is not known, and they stand alone.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Problem
from forecast_autotune.surrogates.formula import Analytic
from forecast_autotune.surrogates.learned import Learned, Model, shipped_model
from forecast_autotune.surrogates.pooled import Pooled
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative, Surrogate


class Default:
    """See the module. A pure function of the query; calibrations are those of the surrogate that answers."""

    name = "default"

    def __init__(self, single: Surrogate | None = None, pooled: Pooled | None = None) -> None:
        """`single` answers what `pooled` does not; by default the learned one, or the bare formula."""
        model = shipped_model()
        self.single = single or (Analytic() if model is None else Learned(model))
        self.pooled = pooled or Pooled()
        self.version = "+".join(f"{s.name}-{s.version}" for s in (self.single, self.pooled))

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query."""
        narrow = self._narrowed(query)
        return self.pooled.forecast(narrow) if self.pooled.knows(narrow) else self.single.forecast(query)

    def pools(self, query: Query) -> bool:
        """Whether dense tables of relatives answer this query."""
        return self.pooled.knows(self._narrowed(query))

    def _narrowed(self, query: Query) -> Query:
        return replace(query, relatives=[r for r in query.relatives if poolable(query, r)])


@lru_cache(maxsize=8)
def default(model: Path | None = None) -> Default:
    """The surrogate that ships with this release, or with another model of `train surrogate`.

    A model that cannot be used costs a warning, not the decision: the shipped one takes its place.
    """
    if model is not None:
        try:
            return Default(Learned(Model.load(model)))
        except RecordError as error:
            warnings.warn(f"FORECAST_AUTOTUNE_MODEL: {error}: using the shipped model", stacklevel=2)
    return Default()


def poolable(query: Query, relative: Relative) -> bool:
    """Whether a relative's slowdowns may stand for this problem's, if it is dense.

    The same sizes on another device; without IR any relative, as nothing else is known.
    """
    elsewhere = relative.problem.device.slug != query.problem.device.slug
    return (elsewhere and same_sizes(query.problem, relative.problem)) or not query.ttir


def same_sizes(a: Problem, b: Problem) -> bool:
    """Whether two problems have the same key and arguments: names, kinds, dtypes, shapes and values."""
    shown = [[(x.name, x.kind, x.dtype, x.shape, repr(x.value)) for x in p.arguments] for p in (a, b)]
    return a.key == b.key and shown[0] == shown[1]
