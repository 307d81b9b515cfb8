"""Meta-parameters that change nothing a forecast reads, and what they save."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.inert_parameters import (
    MIN_PAIRS,
    equivalence_classes,
    find_inert,
    trace_parameters,
)
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.records import Candidate, Config, Problem
from forecast_autotune.surrogates.learned import LearnedSurrogate, shipped_model
from forecast_autotune.surrogates.prior import formula_prior
from forecast_autotune.tuning.tracing import FULL_TRACE_LIMIT, TRACES_PER_ROUND, LazyTraces

Spaced = tuple[Problem, list[Candidate], dict[Candidate, tuple[int, ...]]]
TILES, ORDERS = [16, 32, 64, 128, 256], range(1, 9)
GRID = [
    Candidate(Config.of({"A": a, "B": b, "ORDER": g}, num_warps=w))
    for a, b, g, w in itertools.product(TILES, TILES, ORDERS, (4, 8))
]


def of(candidate: Candidate, text: str = "") -> TtirFacts:
    """Facts that the order of programs does not change, but for one operation less where it is 1."""
    p = dict(candidate.config.kwargs)
    return TtirFacts(load_bytes=float(p["A"]), store_bytes=float(p["B"]), ops=10 + (p["ORDER"] != 1))


def test_only_what_never_makes_a_difference_is_mute() -> None:
    listed = CandidateList(GRID)
    columns, rows = trace_parameters(listed), np.arange(0, len(GRID), 2)
    assert set(columns) == {"A", "B", "ORDER"}
    assert find_inert(columns, rows, [of(GRID[i]) for i in rows]) == ("ORDER",)
    odd = [of(GRID[i]) for i in rows]
    odd[-1] = replace(odd[-1], special=1.0)
    assert find_inert(columns, rows, odd) == (), "it does once"
    assert find_inert(columns, rows[:MIN_PAIRS], odd[:MIN_PAIRS]) == (), "too few pairs to tell"
    assert find_inert(columns, rows[: MIN_PAIRS + 1], odd[: MIN_PAIRS + 1]) == ("ORDER",)
    assert find_inert(columns, rows[:0], []) == ()


def test_classes_share_all_that_counts() -> None:
    listed = CandidateList(GRID)
    rows = np.arange(len(GRID))
    alike = equivalence_classes(trace_parameters(listed), rows, ("ORDER",))
    assert len(set(alike.tolist())) == len(TILES) ** 2
    for i, j in ((0, 3), (0, 15), (0, 16), (0, len(GRID) - 1)):
        a, b = (dict(GRID[k].config.kwargs) for k in (i, j))
        assert (alike[i] == alike[j]) == ((a["A"], a["B"]) == (b["A"], b["B"]))
    assert len(set(equivalence_classes(trace_parameters(listed), rows, ()).tolist())) == len(GRID) // 2, (
        "warps have one text"
    )


class Tracer:
    """Traces everything but what it is told not to, and counts."""

    def __init__(self, without: Sequence[Candidate] = ()) -> None:
        self.asked: list[str] = []
        self.without = {assignment_of(c) for c in without}

    def __call__(self, wanted: Sequence[Candidate]) -> Mapping[str, str]:
        names = [assignment_of(c) for c in wanted]
        self.asked += names
        return {name: f"module {name}" for name in names if name not in self.without}


def tiles(names: Sequence[str]) -> set[str]:
    return {name.rpartition(",")[0] for name in names}


def test_one_of_each_tile_is_traced_where_the_order_is_mute() -> None:
    tracer = Tracer()
    traces = LazyTraces(GRID, tracer, of)
    traces.trace_initial()
    assert len(tiles(tracer.asked)) == len(TILES) ** 2
    assert len(tracer.asked) == len(set(tracer.asked)) < FULL_TRACE_LIMIT < len(GRID) // 2
    assert not traces.trace_best(np.arange(len(GRID))), "nothing that is left could differ"


def test_without_a_reader_or_a_mute_parameter_the_best_are_traced_next() -> None:
    for read in (None, lambda c, text: replace(of(c), special=float(dict(c.config.kwargs)["ORDER"]))):
        tracer = Tracer()
        traces = LazyTraces(GRID, tracer, read)
        traces.trace_initial()
        before = len(tracer.asked)
        assert traces.trace_best(np.arange(len(GRID)))
        assert len(tracer.asked) == before + TRACES_PER_ROUND


def test_a_tile_whose_first_text_failed_is_tried_with_another_order() -> None:
    # Every text of one tile but those of the last order.
    broken = [
        c
        for c in GRID
        if c.config.kwargs[:2] == (("A", 16), ("B", 256)) and ("ORDER", 8) not in c.config.kwargs
    ]
    tracer = Tracer(without=broken)
    traces = LazyTraces(GRID, tracer, of)
    traces.trace_initial()
    order = np.arange(len(GRID))
    for _ in range(len(ORDERS)):
        traces.trace_best(order)
    assert tiles(list(traces.texts)) == tiles(tracer.asked)
    assert len(tiles(list(traces.texts))) == len(TILES) ** 2


@pytest.fixture(name="spaced")
def _spaced(
    monkeypatch: pytest.MonkeyPatch,
) -> Spaced:
    """A matrix product over tiles and an order of programs that the kernel does not have, so is mute."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tests.core.features.traced import traced_products

    problem, given, traced = traced_products(itertools.product((32, 64, 128), (32, 64, 128), (32, 64)))
    texts = list(traced.values())
    candidates = [
        Candidate(Config.of({**p, "ORDER": g}, num_warps=4)) for p, g in itertools.product(given, ORDERS)
    ]
    ttir = {assignment_of(c): texts[i // len(ORDERS)] for i, c in enumerate(candidates)}
    tile = [dict(c.config.kwargs) for c in candidates]
    grids = {
        c: (4096 // int(p["BM"] or 1) * (4096 // int(p["BN"] or 1)),)
        for c, p in zip(candidates, tile, strict=True)
    }
    return replace(problem, ttir=ttir), candidates, grids


def test_a_few_texts_stand_for_a_space_with_a_mute_parameter(spaced: Spaced) -> None:
    problem, candidates, grids = spaced
    whole = formula_prior(problem, candidates, grids, problem.ttir)
    some = [assignment_of(c) for i, c in enumerate(candidates) if i % len(ORDERS) == 0 or i < MIN_PAIRS + 1]
    part = formula_prior(problem, candidates, grids, {name: problem.ttir[name] for name in some})
    assert part.exact.all()
    np.testing.assert_array_equal(part.mean, whole.mean)
    np.testing.assert_array_equal(part.parts, whole.parts)
    # Of half of the tiles there is none: they are interpolated, all orders alike.
    few = [name for i, name in enumerate(some) if i <= MIN_PAIRS or i % 2]
    rough = formula_prior(problem, candidates, grids, {name: problem.ttir[name] for name in few})
    assert 0 < rough.exact.sum() < len(candidates)
    assert (np.ptp(rough.mean.reshape(-1, len(ORDERS)), axis=1) == 0).all()
    np.testing.assert_array_equal(rough.mean[rough.exact], whole.mean[rough.exact])


def test_where_one_assignment_has_several_grids_nothing_is_merged(spaced: Spaced) -> None:
    problem, some, grids = spaced
    more = [replace(c, config=replace(c.config, num_warps=8)) for c in some]
    # A kernel that is launched once per warp, say.
    grids = {**grids, **{c: (2 * grids[one][0],) for c, one in zip(more, some, strict=True)}}
    texts = {
        name: text for i, (name, text) in enumerate(problem.ttir.items()) if i % len(ORDERS) == 0 or i < 9
    }
    result = formula_prior(problem, [*some, *more], grids, texts)
    assert result.informed
    assert not result.exact.all()


def test_forests_that_walk_each_distinct_row_once_say_the_same(
    spaced: Spaced, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forecast_autotune.surrogates import learned
    from forecast_autotune.surrogates.protocol import Query

    problem, candidates, grids = spaced
    model = shipped_model()
    assert model is not None
    query = Query(problem, candidates, grids, ttir=problem.ttir)
    plain = LearnedSurrogate(model).prior(query)
    monkeypatch.setattr(learned, "_LONG", 2)
    once = LearnedSurrogate(model).prior(query)
    np.testing.assert_array_equal(once.mean, plain.mean)
    np.testing.assert_array_equal(once.p_fail, plain.p_fail)
    np.testing.assert_array_equal(once.leaves, plain.leaves)
