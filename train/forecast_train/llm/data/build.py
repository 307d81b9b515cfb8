"""Recorded tables -> examples: the questions that decisions on these problems would have question.

A decision asks early, when nothing of its problem is known, or late, when some of it is; with or without
other shapes of the kernel in the store. Each problem gives several such moments, drawn from a seed. The
candidates of all examples are thinned so that every bin is about as frequent: most configs of a space are slow,
and a plain sample teaches a model those. A model that is shown the guesses of a surrogate on that surrogate's own
training problems learns to copy them, so every guess is of a surrogate that has not seen the family (stacked
generalisation, Wolpert 1992).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.records import Candidate, Measurement, digest
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.questions import ForecastQuestion, build_question
from forecast_autotune.surrogates.protocol import Query, Relative
from forecast_autotune.tuning.replays.replay import tables_of_other_shapes
from forecast_train.llm.data.examples import Example, ExampleCandidate, ExampleOrigin
from forecast_train.splits import (
    family_groups,
    family_of,
    hand_of,
    kernel_of,
    source_hash,
    tables_without,
)
from forecast_train.surrogate.fit import FitError, fit

Index = npt.NDArray[np.intp]
FitSurrogate = Callable[[Sequence[Table]], AnalyticSurrogate]
"""Training tables -> surrogate."""
SurrogateFor = Callable[[Table], AnalyticSurrogate]
"""Table -> a surrogate that has seen neither it nor its family."""

_CENTRAL_60_WIDTH = 1.6832424671458284
"""Distance of a normal's 20th and 80th percentile in standard deviations."""


@dataclass(frozen=True)
class ExampleSettings:
    """Settings of the drawing of examples. Part of a run's configuration file."""

    moments: int = 6
    """Examples per problem."""
    known: tuple[int, ...] = (0, 0, 2, 4, 8, 16)
    """Own measurements at each moment, in turn."""
    relatives: float = 0.5
    """Probability that other shapes of the kernel are known."""
    relative_rows: int = 16
    """Measurements known of each other shape."""
    most: int = 64
    """Candidates per example at the most."""


def formula_surrogate(table: Table) -> AnalyticSurrogate:
    """The cost formula, which has seen nothing."""
    return AnalyticSurrogate()


def build_examples(
    tables: Sequence[Table],
    recipe: ExampleSettings | None = None,
    *,
    believe: SurrogateFor = formula_surrogate,
    seed: int = 0,
    progress: Callable[[Table], None] | None = None,
) -> list[Example]:
    """The examples of these tables, in their order; the same for the same seed.

    Known rows of other shapes come from `tables` as well, so give one side of a split only.
    `believe` gives what guesses are made by: it must not have seen the table, see `cross_fit`.
    Infrastructure failures are not labels and are left out. A problem where nothing ran gives nothing.
    """
    recipe = recipe or ExampleSettings()
    examples: list[Example] = []
    for table in tables:
        if any(m.ok for m in table.by_candidate().values()):
            examples += _examples_of_table(table, tables, believe(table), recipe, seed)
        if progress is not None:
            progress(table)
    # Two moments at which nothing is known ask the same.
    return list({e.id: e for e in examples}.values())


def _examples_of_table(
    table: Table, tables: Sequence[Table], surrogate: AnalyticSurrogate, recipe: ExampleSettings, seed: int
) -> list[Example]:
    rows = table.by_candidate()
    candidates = CandidateList.of(list(rows))
    problem = replace(table.problem, ttir={})
    query = Query(problem, candidates, table.grids(), ttir=table.problem.ttir)
    before, forecast = AnalyticSurrogate().prior(query), surrogate.prior(query).mean
    log2_ms = np.array(table.log2_ms())
    shapes = tables_of_other_shapes(table.problem, tables)
    examples = []
    for moment in range(recipe.moments):
        # Named by the problem, so that adding tables changes no other problem's examples.
        generator = np.random.default_rng([seed, moment, int(digest(table.problem.id)[:12], 16)])
        count = recipe.known[moment % len(recipe.known)]
        own = _draw_measurements(list(rows.values()), min(count, len(rows) // 2), generator)
        relatives: list[Relative] = []
        if shapes and generator.random() < recipe.relatives:
            samples = [
                _draw_measurements(list(t.by_candidate().values()), recipe.relative_rows, generator)
                for t in shapes
            ]
            relatives = [Relative(t.problem, m) for t, m in zip(shapes, samples, strict=True)]
        question = build_question(
            replace(query, measured=own, relatives=relatives), before, forecast, most=len(candidates)
        )
        if (
            example := _example(table, candidates, rows, question, own, log2_ms, recipe, generator)
        ).candidates:
            examples.append(example)
    return examples


def _draw_measurements(
    rows: Sequence[Measurement], count: int, generator: np.random.Generator
) -> tuple[Measurement, ...]:
    """Some of the measurements, in their order: a decision under way has seen fast and slow ones."""
    places = generator.permutation(len(rows))[:count]
    return tuple(rows[i] for i in sorted(places))


def _example(
    table: Table,
    candidates: CandidateList,
    rows: dict[Candidate, Measurement],
    question: ForecastQuestion,
    own: Sequence[Measurement],
    log2_ms: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    recipe: ExampleSettings,
    generator: np.random.Generator,
) -> Example:
    own_candidates = {m.candidate for m in own}
    ratios = question.ratios(log2_ms)
    # What the prompt tells is no question.
    places = [i for i, row in enumerate(question.rows) if candidates[row] not in own_candidates]
    places = sorted(generator.permutation(places)[: recipe.most].tolist())
    answers = []
    for i in places:
        m = rows[candidates[question.rows[i]]]
        answers.append(
            ExampleCandidate(
                question.prompt.suffixes[i],
                m.candidate.variant,
                str(m.candidate.config),
                str(m.outcome),
                float(ratios[i]),
                _timing_noise(m),
                float(m.extra.get("audit_probability", math.nan)),
            )
        )
    return Example(
        _origin(table),
        question.prompt.version,
        question.prompt.prefix,
        question.log2_ms,
        question.measured,
        len(own),
        tuple(answers),
    )


def _timing_noise(m: Measurement) -> float:
    if not m.ok or m.p20_ms is None or m.p80_ms is None or m.p80_ms < m.p20_ms:
        return math.nan
    return math.log2(m.p80_ms / m.p20_ms) / _CENTRAL_60_WIDTH


def _origin(table: Table) -> ExampleOrigin:
    problem = table.problem
    source = problem.kernel.source
    return ExampleOrigin(
        problem.id,
        kernel_of(problem),
        family_of(problem),
        hand_of(problem),
        problem.device.slug,
        source_hash(source) if source.strip() else problem.kernel.source_sha256,
        max((m.at for m in table.measurements), default=""),
    )


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
    fits: dict[str, AnalyticSurrogate] = {}
    for count, group in enumerate(groups, 1):
        surrogate = _fit_or_formula(tables_without(tables, group), learn)
        fits |= {t.problem.id: surrogate for t in group}
        if progress is not None:
            progress(count, len(groups))
    return lambda table: fits[table.problem.id]


def cross_fit_sides(
    sides: Mapping[str, Sequence[Table]],
    *,
    learn: FitSurrogate = fit,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, SurrogateFor]:
    """The surrogate to guess by on each side: crosswise on `train`, on the others by what was fitted to all of it."""
    train = sides["train"]
    whole = _fit_or_formula(train, learn)
    fits: dict[str, SurrogateFor] = {side: lambda _: whole for side in sides}
    return fits | {"train": cross_fit(train, learn=learn, progress=progress)}


def _fit_or_formula(tables: Sequence[Table], learn: FitSurrogate) -> AnalyticSurrogate:
    try:
        return learn(tables)
    except FitError as error:
        if error.__cause__ is not None:  # a package is missing
            raise
        return AnalyticSurrogate()
