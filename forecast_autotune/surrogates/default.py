"""The shipped surrogate: for each problem, the best of the others for the data at hand.

Where the same sizes were measured densely on other devices, those tables outdo any formula (`pooled`); at
other sizes on the same device the formula carries over better than a table does, so the learned surrogate
answers, unless there is no IR for it to read. No recorded problem has both IR and dense tables from other
devices, so it is unknown whether the formula would improve on the tables, which stand alone.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Problem
from forecast_autotune.surrogates.calibration import shipped_calibration
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.learned import (
    LearnedModel,
    LearnedSurrogate,
    has_shipped_model,
    shipped_model,
)
from forecast_autotune.surrogates.pooled import PooledSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative, Surrogate


class DefaultSurrogate:
    """See the module. A pure function of the query; calibrations are those of the surrogate that answers."""

    name = "default"

    def __init__(self, single: Surrogate | None = None, pooled: PooledSurrogate | None = None) -> None:
        """`single` answers what `pooled` does not; by default the learned one, or the bare formula."""
        self._single = single
        self.pooled = pooled or PooledSurrogate()
        first = single or (LearnedSurrogate if has_shipped_model() else AnalyticSurrogate)
        self.version = "+".join(f"{s.name}-{s.version}" for s in (first, self.pooled))

    @cached_property
    def single(self) -> Surrogate:
        """The surrogate that answers where no tables can be pooled; the shipped model is read when first asked for."""
        model = shipped_model() if self._single is None else None
        return self._single or (AnalyticSurrogate() if model is None else LearnedSurrogate(model))

    def load(self) -> None:
        """Read the files of a first forecast (10 ms) ahead, while the caller waits for something else."""
        shipped_calibration(f"{self.single.name}/{self.single.version}")

    def forecast(self, query: Query) -> Forecasts:
        """Forecast all candidates of the query."""
        narrow = self._with_poolable_relatives(query)
        if self.pooled.can_pool(narrow):
            return self.pooled.forecast(narrow)
        if query.advice is not None and isinstance(self.single, AnalyticSurrogate):
            from forecast_autotune.surrogates.advised import advised_forecasts

            return advised_forecasts(self.single, query)
        return self.single.forecast(query)

    def pools_relatives(self, query: Query) -> bool:
        """Whether dense tables of relatives answer this query."""
        return self.pooled.can_pool(self._with_poolable_relatives(query))

    def _with_poolable_relatives(self, query: Query) -> Query:
        return replace(query, relatives=[r for r in query.relatives if _is_poolable(query, r)])


@lru_cache(maxsize=8)
def default_surrogate(model: Path | None = None) -> DefaultSurrogate:
    """The surrogate that ships with this release, or with another model of `train surrogate`.

    A model that cannot be used costs a warning, not the decision: the shipped one takes its place.
    """
    if model is not None:
        try:
            return DefaultSurrogate(LearnedSurrogate(LearnedModel.load(model)))
        except RecordError as error:
            warnings.warn(f"FORECAST_AUTOTUNE_MODEL: {error}: using the shipped model", stacklevel=2)
    return DefaultSurrogate()


def _is_poolable(query: Query, relative: Relative) -> bool:
    """Whether a relative's slowdowns may stand for this problem's, if it is dense.

    The same sizes on another device; without IR any relative, as nothing else is known.
    """
    elsewhere = relative.problem.device.slug != query.problem.device.slug
    return (elsewhere and same_sizes(query.problem, relative.problem)) or not query.ttir


def same_sizes(a: Problem, b: Problem) -> bool:
    """Whether two problems have the same key and arguments: names, kinds, dtypes, shapes and values."""
    keys = [[(x.name, x.kind, x.dtype, x.shape, repr(x.value)) for x in p.arguments] for p in (a, b)]
    return a.key == b.key and keys[0] == keys[1]
