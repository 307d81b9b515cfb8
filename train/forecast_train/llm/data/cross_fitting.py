"""Guesses to learn from: what the learned surrogate says of problems whose families it has not seen.

A language model that is shown the guesses of a surrogate on that surrogate's own training problems learns to
copy them; what it has to learn is where they are wrong, so they must be as wrong as they will be (stacked
generalisation, Wolpert 1992).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_train.evaluation.splits import family_groups, tables_without
from forecast_train.surrogate.errors import FitError
from forecast_train.surrogate.fit import fit

FitSurrogate = Callable[[Sequence[Table]], AnalyticSurrogate]
"""Training tables -> surrogate."""
SurrogateFor = Callable[[Table], AnalyticSurrogate]
"""Table -> a surrogate that has seen neither it nor its family."""


def formula_surrogate(table: Table) -> AnalyticSurrogate:
    """The cost formula, which has seen nothing."""
    return AnalyticSurrogate()


def cross_fit(
    tables: Sequence[Table],
    *,
    learn: FitSurrogate = fit,
    parts: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> SurrogateFor:
    """Surrogates fitted to all but a part of the families each, for the tables of that part.

    Families go to `parts` parts of about equal numbers of problems; tables that share a kernel with a part
    are left out of its fit. Fewer than two families, or a part that leaves nothing to learn from, are
    believed by the formula. Raises `FitError` where a package is missing.
    """
    groups = family_groups(tables, parts)
    if len(groups) < 2:
        return formula_surrogate
    made: dict[str, AnalyticSurrogate] = {}
    for done, group in enumerate(groups, 1):
        surrogate = _fit_or_formula(tables_without(tables, group), learn)
        made |= {t.problem.id: surrogate for t in group}
        if progress is not None:
            progress(done, len(groups))
    return lambda table: made[table.problem.id]


def cross_fit_sides(
    sides: Mapping[str, Sequence[Table]],
    *,
    learn: FitSurrogate = fit,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, SurrogateFor]:
    """What to guess by on each side: crosswise on `train`, on the others by what was fitted to all of it."""
    train = sides["train"]
    whole = _fit_or_formula(train, learn)
    found: dict[str, SurrogateFor] = {side: lambda _: whole for side in sides}
    return found | {"train": cross_fit(train, learn=learn, progress=progress)}


def _fit_or_formula(tables: Sequence[Table], learn: FitSurrogate) -> AnalyticSurrogate:
    try:
        return learn(tables)
    except FitError as error:
        if error.__cause__ is not None:  # a package is missing
            raise
        return AnalyticSurrogate()
