"""Meta-parameters that change nothing a forecast reads, and what they save."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.features.inert_parameters import (
    MIN_PAIRS,
    find_inert,
    trace_parameters,
)
from forecast_autotune.features.ttir.extraction import assignment_of
from forecast_autotune.features.ttir.facts import TtirFacts
from forecast_autotune.records import Candidate, Config, Problem
from forecast_autotune.surrogates.learned import LearnedSurrogate, shipped_model
from forecast_autotune.surrogates.prior import formula_prior

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
