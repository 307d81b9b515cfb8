"""Texts that came with facts: what is read of them again, and what is not."""

from __future__ import annotations

from dataclasses import replace

from forecast_autotune.features import traced_texts
from forecast_autotune.features.traced_texts import (
    CompressedText,
    TracedTexts,
    cached_facts,
    collect_facts,
    facts_by_unit,
    facts_of_text,
)
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.records.problem import FACTS
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Query, Relative
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_autotune.tuning.tracing import LaunchFacts, LazyTraces

TABLE = max(load(shipped_tables()), key=lambda table: len(table.problem.ttir))
TEXTS = TABLE.problem.ttir
NAME, TEXT = next(iter(TEXTS.items()))
ARGUMENTS = TABLE.problem.arguments
MARKED = TtirFacts(load_bytes=12345.5, ops=7, dot_shapes=((16, 16, 16, 1.0),))


def test_facts_that_came_along_are_taken_for_their_arguments_only() -> None:
    texts = TracedTexts(ARGUMENTS)
    texts.add(NAME, CompressedText.of(TEXT), {(5, 1, 1): MARKED})
    assert texts.facts(NAME, ARGUMENTS, (5, 1, 1)) is MARKED
    assert facts_of_text(texts, NAME, tuple(ARGUMENTS), (5, 1, 1)) is MARKED
    assert texts.facts(NAME, ARGUMENTS, (6, 1, 1)) == cached_facts(TEXT, ARGUMENTS, (6, 1, 1))
    other = ARGUMENTS[:-1]
    assert texts.facts(NAME, other, (5, 1, 1)) == cached_facts(TEXT, other, (5, 1, 1)) != MARKED


def facts_alone() -> TracedTexts:
    """The facts of the table's candidates beside texts that could not be expanded."""
    problem, grids = TABLE.problem, TABLE.grids()
    texts = TracedTexts(problem.arguments)
    every = {grids.get(c, problem.grid) for c in TABLE.by_candidate()}
    for name, text in TEXTS.items():
        facts = {grid: traced_texts.cached_facts(text, problem.arguments, grid) for grid in every}
        texts.add(name, CompressedText("not base64 of anything", len(text)), facts)
    return texts


def test_a_forecast_and_a_store_read_no_text_that_came_with_its_facts() -> None:
    problem, candidates, grids = TABLE.problem, list(TABLE.by_candidate()), TABLE.grids()
    texts = facts_alone()
    here = default_surrogate().forecast(Query(problem, candidates, grids, ttir=TEXTS))
    there = default_surrogate().forecast(Query(problem, candidates, grids, ttir=texts))
    assert there.mean.tobytes() == here.mean.tobytes()
    assert there.sd.tobytes() == here.sd.tobytes()
    kept = collect_facts(problem, candidates, grids, texts, within_s=60.0)
    assert kept == collect_facts(problem, candidates, grids, TEXTS, within_s=60.0)


def test_candidates_without_texts_have_the_facts_that_their_problem_s_record_kept() -> None:
    """Compile seconds are forecast from these, also where a recorded decision is replayed."""
    problem, candidates, grids = TABLE.problem, list(TABLE.by_candidate()), TABLE.grids()
    kept = collect_facts(problem, candidates, grids, TEXTS, within_s=60.0)
    bare = replace(problem, ttir={}, extra={FACTS: kept})
    traces = LazyTraces(candidates, None, LaunchFacts(bare, grids))
    for row, candidate in enumerate(candidates):
        text = TEXTS.get(assignment_of(candidate))
        one = None if text is None else cached_facts(text, ARGUMENTS, grids.get(candidate, problem.grid))
        assert traces.facts(row) == one
    assert any(traces.facts(row) for row in range(len(candidates)))
    forgotten = LazyTraces(candidates, None, LaunchFacts(replace(bare, extra={}), grids))
    assert forgotten.facts(0) is None


def test_a_relative_is_read_from_the_facts_that_are_kept_of_it() -> None:
    """The same forecast as from texts, which a store does not keep: those of the asked problem stand for them."""
    candidates, grids = list(TABLE.by_candidate()), TABLE.grids()
    name = TABLE.problem.kernel.name
    other = next(
        t
        for t in load(shipped_tables())
        if t.problem.kernel.name == name and t.problem.id != TABLE.problem.id
    )
    rows = tuple(replace(m, grid=other.grids().get(m.candidate)) for m in other.measurements[:20])
    kept = collect_facts(
        other.problem, [m.candidate for m in rows], other.grids(), other.problem.ttir, within_s=60.0
    )
    bare = replace(other.problem, ttir={})
    means = [
        default_surrogate().forecast(Query(TABLE.problem, candidates, grids, (), [relative], texts)).mean
        for relative, texts in (
            (Relative(other.problem, rows), TEXTS),
            (Relative(bare, rows), TEXTS),
            (Relative(replace(bare, extra={FACTS: kept}), rows), facts_alone()),
        )
    ]
    assert means[0].tobytes() == means[1].tobytes() == means[2].tobytes()
    alone = default_surrogate().forecast(Query(TABLE.problem, candidates, grids, ttir=TEXTS)).mean
    assert means[0].tobytes() != alone.tobytes(), "a relative counts"


def test_facts_of_the_version_before_are_read_and_their_bytes_are_a_guess() -> None:
    """Recorded lists and users' stores hold them; another unknown version is passed over."""
    kept = collect_facts(TABLE.problem, list(TABLE.by_candidate())[:4], {}, TEXTS, within_s=60.0)
    kept["units"] = [
        [*unit[:2], {n: v for n, v in unit[2].items() if n != "opaque"}] for unit in kept["units"]
    ]

    kept["units"][0][2]["reduced_length"] = 64.0  # a fact that this version has not

    def read(version: str) -> list[float]:
        extra = {**TABLE.problem.extra, FACTS: {**kept, "version": version}}
        return [one.opaque for one in facts_by_unit(replace(TABLE.problem, extra=extra)).values()]

    assert read("2-d3e997e4") == [1.0] * len(kept["units"])
    assert read("1-00000000") == []
