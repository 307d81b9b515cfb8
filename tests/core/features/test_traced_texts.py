"""Texts that came with facts: what is read of them again, and what is not."""

from __future__ import annotations

import json

from forecast_autotune.features import traced_texts
from forecast_autotune.features.stored_facts import collect_facts
from forecast_autotune.features.traced_texts import (
    CompressedText,
    TracedTexts,
    cached_facts,
    decode_facts,
    encode_facts,
    facts_of_text,
)
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.surrogates.default import default_surrogate
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.tuning.replay import load, shipped_tables

TABLE = max(load(shipped_tables()), key=lambda table: len(table.problem.ttir))
TEXTS = TABLE.problem.ttir
NAME, TEXT = next(iter(TEXTS.items()))
ARGUMENTS = TABLE.problem.arguments
MARKED = TtirFacts(load_bytes=12345.5, ops=7, dot_shapes=((16, 16, 16, 1.0),))


def test_a_compressed_text_is_the_same_text() -> None:
    packed = CompressedText.of(TEXT)
    assert packed.expand() == TEXT
    assert packed.characters == len(TEXT)
    assert len(packed.data) < len(TEXT) / 2


def test_facts_survive_the_way_through_json() -> None:
    grids = [None, (7, 3, 1), (1000, 1, 1)]
    told = json.loads(json.dumps(encode_facts(TEXT, ARGUMENTS, grids)))
    assert decode_facts(told) == {grid: cached_facts(TEXT, ARGUMENTS, grid) for grid in grids}
    assert decode_facts(json.loads(json.dumps(encode_facts("no module", ARGUMENTS, [None])))) == {None: None}


def test_facts_that_came_along_are_taken_for_their_arguments_only() -> None:
    texts = TracedTexts(ARGUMENTS)
    texts.add(NAME, CompressedText.of(TEXT), {(5, 1, 1): MARKED})
    assert texts.facts(NAME, ARGUMENTS, (5, 1, 1)) is MARKED
    assert facts_of_text(texts, NAME, tuple(ARGUMENTS), (5, 1, 1)) is MARKED
    assert texts.facts(NAME, ARGUMENTS, (6, 1, 1)) == cached_facts(TEXT, ARGUMENTS, (6, 1, 1))
    other = ARGUMENTS[:-1]
    assert texts.facts(NAME, other, (5, 1, 1)) == cached_facts(TEXT, other, (5, 1, 1)) != MARKED


def test_a_merge_takes_facts_of_the_same_arguments() -> None:
    given = TracedTexts(ARGUMENTS)
    given.add(NAME, TEXT, {None: MARKED})
    same, elsewhere = TracedTexts(ARGUMENTS), TracedTexts(())
    same.merge(given)
    elsewhere.merge(given)
    elsewhere.merge({"plain": TEXT})
    assert same.facts(NAME, ARGUMENTS, None) is MARKED
    assert elsewhere.facts(NAME, ARGUMENTS, None) != MARKED
    assert elsewhere == {NAME: TEXT, "plain": TEXT}
    del same[NAME]
    assert NAME not in same
    same[NAME] = TEXT
    assert same.facts(NAME, ARGUMENTS, None) != MARKED, "what was read of a text is forgotten with it"


def test_a_forecast_and_a_store_read_no_text_that_came_with_its_facts() -> None:
    """The same forecast from facts alone: the texts here could not be expanded."""
    problem, candidates, grids = TABLE.problem, list(TABLE.by_candidate()), TABLE.grids()
    texts = TracedTexts(problem.arguments)
    every = {grids.get(c, problem.grid) for c in candidates}
    for name, text in TEXTS.items():
        facts = {grid: traced_texts.cached_facts(text, problem.arguments, grid) for grid in every}
        texts.add(name, CompressedText("not base64 of anything", len(text)), facts)
    here = default_surrogate().forecast(Query(problem, candidates, grids, ttir=TEXTS))
    there = default_surrogate().forecast(Query(problem, candidates, grids, ttir=texts))
    assert there.mean.tobytes() == here.mean.tobytes()
    assert there.sd.tobytes() == here.sd.tobytes()
    kept = collect_facts(problem, candidates, grids, texts, within_s=60.0)
    assert kept == collect_facts(problem, candidates, grids, TEXTS, within_s=60.0)
