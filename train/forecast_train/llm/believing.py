"""Guesses to learn from: what the learned surrogate says of problems whose families it has not seen.

A language model that is shown the guesses of a surrogate on that surrogate's own training problems learns to
copy them; what it has to learn is where they are wrong, so they must be as wrong as they will be (stacked
generalisation, Wolpert 1992).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import Analytic
from forecast_train.evaluation.splits import family_groups, without
from forecast_train.surrogate.errors import FitError
from forecast_train.surrogate.fit import fit

Learn = Callable[[Sequence[Table]], Analytic]
"""Training tables -> surrogate."""
Believe = Callable[[Table], Analytic]
"""Table -> a surrogate that has seen neither it nor its family."""


def by_formula(table: Table) -> Analytic:
    """The cost formula, which has seen nothing."""
    return Analytic()


def crosswise(
    tables: Sequence[Table],
    *,
    learn: Learn = fit,
    parts: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Believe:
    """Surrogates fitted to all but a part of the families each, for the tables of that part.

    Families go to `parts` parts of about equal numbers of problems; tables that share a kernel with a part
    are left out of its fit. Fewer than two families, or a part that leaves nothing to learn from, are
    believed by the formula. Raises `FitError` where a package is missing.
    """
    groups = family_groups(tables, parts)
    if len(groups) < 2:
        return by_formula
    made: dict[str, Analytic] = {}
    for done, group in enumerate(groups, 1):
        surrogate = _fitted(without(tables, group), learn)
        made |= {t.problem.id: surrogate for t in group}
        if progress is not None:
            progress(done, len(groups))
    return lambda table: made[table.problem.id]


def for_sides(
    sides: Mapping[str, Sequence[Table]],
    *,
    learn: Learn = fit,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Believe]:
    """What to guess by on each side: crosswise on `train`, on the others by what was fitted to all of it."""
    train = sides["train"]
    whole = _fitted(train, learn)
    found: dict[str, Believe] = {side: lambda _: whole for side in sides}
    return found | {"train": crosswise(train, learn=learn, progress=progress)}


def _fitted(tables: Sequence[Table], learn: Learn) -> Analytic:
    try:
        return learn(tables)
    except FitError as error:
        if error.__cause__ is not None:  # a package is missing
            raise
        return Analytic()
