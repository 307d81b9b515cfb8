"""Recorded tables -> examples: the questions that decisions on these problems would have asked.

A decision asks early, when nothing of its problem is known, or late, when some of it is; with or without
other shapes of the kernel in the store. Each problem gives several such moments, drawn from a seed. The
candidates of all examples are thinned so that every bin is about as frequent (`sampling.balanced`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.bins import BINS
from forecast_autotune.records import Candidate, Measurement, digest
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.questions import ForecastQuestion, build_question
from forecast_autotune.surrogates.protocol import Query, Relative
from forecast_autotune.tuning.replays.replay import tables_of_other_shapes
from forecast_train.evaluation.splits import family_of, hand_of, kernel_of, source_hash
from forecast_train.llm.data.cross_fitting import SurrogateFor, formula_surrogate
from forecast_train.llm.data.examples import Example, ExampleCandidate, ExampleOrigin
from forecast_train.llm.data.sampling import Index, balanced_rows

_CENTRAL_60_WIDTH = 1.6832424671458284
"""Distance of a normal's 20th and 80th percentile in standard deviations."""


@dataclass(frozen=True)
class ExampleSettings:
    """How examples are drawn. Part of a run's configuration file."""

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
    per_bin: int = 0
    """Rows per bin over the whole set; 0: as they come."""


def build_examples(
    tables: Sequence[Table],
    recipe: ExampleSettings | None = None,
    *,
    believe: SurrogateFor = formula_surrogate,
    seed: int = 0,
    progress: Callable[[Table], None] | None = None,
) -> list[Example]:
    """The examples of these tables, in their order; the same for the same seed.

    What is shown as known of other shapes comes from `tables` as well, so give one side of a split only.
    `believe` gives what guesses are made by: it must not have seen the table, see `believing`.
    Infrastructure failures are not labels and are left out. A problem where nothing ran gives nothing.
    """
    recipe = recipe or ExampleSettings()
    found: list[Example] = []
    for table in tables:
        if any(m.ok for m in table.by_candidate().values()):
            found += _examples_of_table(table, tables, believe(table), recipe, seed)
        if progress is not None:
            progress(table)
    # Two moments at which nothing is known ask the same.
    found = list({e.id: e for e in found}.values())
    if not recipe.per_bin:
        return found
    generator = np.random.default_rng([seed, len(found)])
    labels = [e.labels() for e in found]
    kept = balanced_rows(labels, recipe.per_bin, len(BINS) + 1, generator)
    thinned = [_keep_rows(e, rows) for e, rows in zip(found, kept, strict=True)]
    return [e for e in thinned if e.candidates]


def _examples_of_table(
    table: Table, tables: Sequence[Table], surrogate: AnalyticSurrogate, recipe: ExampleSettings, seed: int
) -> list[Example]:
    rows = table.by_candidate()
    candidates = CandidateList.of(list(rows))
    problem = replace(table.problem, ttir={})
    query = Query(problem, candidates, table.grids(), ttir=table.problem.ttir)
    before, believed = AnalyticSurrogate().prior(query), surrogate.prior(query).mean
    log2_ms = np.array(table.log2_ms())
    shapes = tables_of_other_shapes(table.problem, tables)
    made = []
    for moment in range(recipe.moments):
        # Named by the problem, so that adding tables changes no other problem's examples.
        generator = np.random.default_rng([seed, moment, int(digest(table.problem.id)[:12], 16)])
        known = recipe.known[moment % len(recipe.known)]
        own = _draw_measurements(list(rows.values()), min(known, len(rows) // 2), generator)
        others: list[Relative] = []
        if shapes and generator.random() < recipe.relatives:
            some = [
                _draw_measurements(list(t.by_candidate().values()), recipe.relative_rows, generator)
                for t in shapes
            ]
            others = [Relative(t.problem, m) for t, m in zip(shapes, some, strict=True)]
        asked = build_question(
            replace(query, measured=own, relatives=others), before, believed, most=len(candidates)
        )
        if (example := _example(table, candidates, rows, asked, own, log2_ms, recipe, generator)).candidates:
            made.append(example)
    return made


def _draw_measurements(
    rows: Sequence[Measurement], count: int, generator: np.random.Generator
) -> tuple[Measurement, ...]:
    """Some of the measurements, in their order: a decision under way has seen fast and slow ones."""
    taken = generator.permutation(len(rows))[:count]
    return tuple(rows[i] for i in sorted(taken))


def _example(
    table: Table,
    candidates: CandidateList,
    rows: dict[Candidate, Measurement],
    asked: ForecastQuestion,
    own: Sequence[Measurement],
    log2_ms: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
    recipe: ExampleSettings,
    generator: np.random.Generator,
) -> Example:
    shown = {m.candidate for m in own}
    ratios = asked.ratios(log2_ms)
    # What the prompt tells is no question.
    places = [i for i, row in enumerate(asked.rows) if candidates[row] not in shown]
    places = sorted(generator.permutation(places)[: recipe.most].tolist())
    found = []
    for i in places:
        m = rows[candidates[asked.rows[i]]]
        found.append(
            ExampleCandidate(
                asked.prompt.suffixes[i],
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
        asked.prompt.version,
        asked.prompt.prefix,
        asked.log2_ms,
        asked.measured,
        len(own),
        tuple(found),
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


def _keep_rows(example: Example, rows: Index) -> Example:
    return replace(example, candidates=tuple(example.candidates[i] for i in rows))
