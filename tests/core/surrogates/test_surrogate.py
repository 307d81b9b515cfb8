"""Forecasts and what is derived from them; what the shipped surrogate learns from which measurement."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.policy.state import REFUSED
from forecast_autotune.records import (
    Candidate,
    Config,
    Device,
    Measurement,
    Outcome,
    Problem,
)
from forecast_autotune.surrogates.formula import AnalyticSurrogate, problem_distance
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative
from forecast_autotune.testing import example_table, query_of
from forecast_autotune.tuning.loop import validate_forecasts

NAMES = [Candidate(Config.of({"N": n})) for n in range(4)]


def made(mean: list[float], sd: float = 0.1, p_fail: float = 0.0) -> Forecasts:
    n = len(mean)
    return Forecasts(NAMES[:n], np.array(mean), np.full(n, sd), np.full(n, p_fail))


def test_outcomes_are_drawn_once_for_the_same_question() -> None:
    forecasts, rows = made([0.0, 1.0], p_fail=0.5), np.array([0, 1])
    drawn = forecasts.sampled_outcomes(rows, 64, 1)
    assert forecasts.sampled_outcomes(rows, 64, 1) is drawn
    runs = np.isfinite(drawn)
    assert 0 < runs.sum() < runs.size
    np.testing.assert_array_equal(drawn[runs], forecasts.samples(rows, 64, 1)[runs])
    with pytest.raises(ValueError, match="read-only"):
        drawn[0, 0] = 0.0
    sure = replace(forecasts, p_fail=np.zeros(2))
    np.testing.assert_array_equal(sure.sampled_outcomes(rows, 64, 1), forecasts.samples(rows, 64, 1))
    assert not np.array_equal(forecasts.sampled_outcomes(rows, 64, 2), drawn)
    np.testing.assert_array_equal(forecasts.sampled_outcomes(rows, 64, 1), drawn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidates": NAMES[::-1]}, "in their order"),
        ({"candidates": NAMES[:3]}, "4 candidates"),
        ({"mean": np.zeros(3)}, r"mean must have shape \(4,\), not \(3,\)"),
        ({"sd": np.array([1.0, math.inf, math.nan, 1.0])}, "sd must be finite, but 2 values"),
        ({"sd": np.full(4, -1.0)}, "sd must be at least 0"),
        ({"p_fail": np.full(4, 1.1)}, "p_fail a probability"),
    ],
)
def test_answers_no_decision_can_be_built_on(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        validate_forecasts(replace(made([0.0] * 4), **change), NAMES)


# --- the shipped surrogate ---


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")


@cache
def products() -> Query:
    """A matrix product in six block shapes and three depths, with its IR, on a device we know."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from tests.core.features.traced import traced_products

    shapes = [(m, n, 64) for m in (32, 64, 128) for n in (64, 256)]
    problem, assignments, texts = traced_products(shapes)
    candidates = [Candidate(Config.of(a, num_warps=8, num_stages=s)) for a in assignments for s in (2, 3, 4)]
    grids = {
        c: (4096 // int(str(c.config.parameters()["BM"])), 4096 // int(str(c.config.parameters()["BN"])))
        for c in candidates
    }
    return Query(problem, candidates, grids, ttir=texts)


def shared(candidate: Candidate, *, warp_groups: bool = True) -> int:
    """Bytes of the pipelined operands: what a GEMM of this kind really takes."""
    p = {name: int(str(value)) for name, value in candidate.config.parameters().items() if name != "EVEN_K"}
    grouped = warp_groups and p["num_warps"] % 4 == 0 and p["BM"] >= 64
    return 2 * (p["num_stages"] - 1 + grouped) * p["BK"] * (p["BM"] + p["BN"])


def test_bytes_of_a_failure_correct_the_others_of_the_kernel() -> None:
    """All take a fifth more than was forecast: what is then too large is refused, and nothing besides."""
    query = products()
    sizes = np.array([shared(c) for c in query.candidates])
    before = AnalyticSurrogate().forecast(query)
    limit = 232448
    victims = [next(int(i) for i in np.argsort(sizes) if 1.2 * sizes[i] > limit), int(np.argmin(sizes))]
    seen = [
        out_of_memory(query, victims[0], 1.2 * sizes[victims[0]]),
        Measurement(
            query.problem.id,
            query.candidates[victims[1]],
            Outcome.OK,
            1.0,
            extra={"shared": int(1.2 * sizes[victims[1]])},
        ),
    ]
    after = AnalyticSurrogate().forecast(replace(query, measured=seen))
    assert after.p_fail[victims[0]] == 1.0
    assert (after.p_fail[sizes > limit] >= REFUSED).all()
    assert (after.p_fail[1.3 * sizes < limit] < 0.5).all()
    assert (before.p_fail[1.3 * sizes < limit] < REFUSED).all()


def test_a_failure_refuses_none_that_may_fit() -> None:
    """Bytes that the rules got wrong make all of them doubted: the same failure used to refuse whatever needs more."""
    query = products()
    sizes = np.array([shared(c) for c in query.candidates])
    victim = int(np.argsort(sizes)[len(sizes) // 2])
    after = AnalyticSurrogate().forecast(replace(query, measured=[out_of_memory(query, victim, 232449)]))
    assert after.p_fail[victim] == 1.0
    others = np.delete(np.arange(len(sizes)), victim)
    assert (after.p_fail[others][sizes[others] < 232448] < REFUSED).all()


def out_of_memory(query: Query, row: int, required: float) -> Measurement:
    """The failure of a candidate that takes so many bytes, in Triton's words."""
    said = f"out of resource: shared memory, Required: {int(required)}, Hardware limit: 232448. Reducing ..."
    extra = {"message": f"OutOfResources: {said}"}
    return Measurement(query.problem.id, query.candidates[row], Outcome.OUT_OF_RESOURCES, extra=extra)


def test_running_vouches_for_whoever_needs_less() -> None:
    query = products()
    sizes = np.array([shared(c) for c in query.candidates])
    before = AnalyticSurrogate().forecast(query)
    largest = int(np.argmax(sizes))
    success = Measurement(query.problem.id, query.candidates[largest], Outcome.OK, 1.0)
    after = AnalyticSurrogate().forecast(replace(query, measured=[success]))
    assert after.p_fail[largest] == 0.0
    assert (after.p_fail <= before.p_fail).all()


def test_more_shared_memory_than_the_device_has_is_refused_at_once() -> None:
    query = products()
    small = replace(query.problem, device=replace(query.problem.device, name="half", shared_memory_bytes=0))
    sizes = np.array([shared(c, warp_groups=False) for c in query.candidates])
    limit = 101376  # of an RTX 4090
    device = Device("NVIDIA GeForce RTX 4090", "cuda", "89", 128, limit, 65536, 1536)
    forecasts = AnalyticSurrogate().forecast(replace(query, problem=replace(small, device=device)))
    assert (forecasts.p_fail[sizes > 1.2 * limit] > 0.9).all()
    assert (forecasts.p_fail[sizes < 0.8 * limit] < 0.1).all()
    assert (sizes > 1.2 * limit).any()


def test_a_measurement_moves_its_neighbours() -> None:
    """One candidate found eight times slower than thought: those like it are expected slower too."""
    query = products()
    before = AnalyticSurrogate().forecast(query)
    ms = 2.0 ** float(before.mean[4] + 3.0)
    after = AnalyticSurrogate().forecast(
        replace(query, measured=[Measurement(query.problem.id, query.candidates[4], Outcome.OK, ms)])
    )
    assert after.mean[4] == pytest.approx(before.mean[4] + 3.0, abs=0.2)
    assert (after.mean > before.mean).all()
    assert (after.sd < before.sd).all()


def test_ir_makes_forecasts_surer() -> None:
    query = products()
    informed, blind = (
        AnalyticSurrogate().forecast(query),
        AnalyticSurrogate().forecast(replace(query, ttir={})),
    )
    assert informed.sd.mean() < blind.sd.mean()
    assert np.ptp(informed.mean) > 0.5 > np.ptp(blind.mean)
    assert "TTIR" in informed.reason
    assert "no TTIR" in blind.reason


def test_the_nearest_relative_teaches_most() -> None:
    table = example_table()
    query = query_of(table)
    truth = np.array([math.log2(m.ms) for m in table.measurements if m.ok])
    ran = [i for i, m in enumerate(table.measurements) if m.ok]

    def ranking(problem: Problem) -> float:
        rows = [replace(m, problem=problem.id) for m in example_table(seed=2).measurements]
        forecasts = AnalyticSurrogate().forecast(replace(query, relatives=[Relative(problem, rows)]))
        return float(np.corrcoef(forecasts.mean[ran], truth)[0, 1])

    def at(size: int) -> Problem:
        arguments = (replace(table.problem.arguments[0], shape=(size, 4096)), table.problem.arguments[1])
        return replace(table.problem, id=f"at {size}", arguments=arguments)

    assert problem_distance(query.problem, at(8192)) < problem_distance(query.problem, at(4096 * 64))
    near = AnalyticSurrogate().forecast(
        replace(query, relatives=[Relative(at(8192), example_table(seed=2).measurements)])
    )
    far = AnalyticSurrogate().forecast(
        replace(query, relatives=[Relative(at(4096 * 64), example_table(seed=2).measurements)])
    )
    assert ranking(at(8192)) > 0.8
    assert near.sd.mean() < far.sd.mean()


def test_a_relative_that_never_ran_teaches_nothing() -> None:
    table = example_table()
    query = query_of(table)
    failed = Measurement("other", table.measurements[0].candidate, Outcome.COMPILE_ERROR)
    relative = Relative(replace(table.problem, id="other"), [failed])
    before, after = (
        AnalyticSurrogate().forecast(query),
        AnalyticSurrogate().forecast(replace(query, relatives=[relative])),
    )
    np.testing.assert_array_equal(before.mean, after.mean)
    np.testing.assert_array_equal(before.p_fail, after.p_fail)


def test_relatives_are_read_once_while_a_problem_is_tuned() -> None:
    """... and again as soon as they are others, or could have grown."""

    class Counting(AnalyticSurrogate):
        read = fitted = 0

        def prior(self, query: Query) -> Prior:
            self.read += 1
            return super().prior(query)

        def _fit_scale(self, *given: Any) -> None:
            self.fitted += 1
            super()._fit_scale(*given)

    query, surrogate = products(), Counting()
    query = replace(query, candidates=CandidateList.of(query.candidates))
    rows = tuple(
        Measurement("a", c, Outcome.OK, 0.1 + 0.02 * i, grid=(64,))
        for i, c in enumerate(query.candidates[:8])
    )
    near, far = (Relative(replace(query.problem, id=name), rows) for name in ("near", "far"))
    before = surrogate.prior(query)
    for relatives, reads in (([near], 1), ([near], 0), ([far], 1), ([near, far], 2), ([], 0), ([near], 1)):
        for own in range(3):
            asked = replace(query, relatives=relatives, measured=rows[:own])
            surrogate.read = surrogate.fitted = 0
            evidence = surrogate.log_likelihood(asked, before)
            assert evidence == AnalyticSurrogate().log_likelihood(asked, before)
            result, fresh = surrogate.answer(asked, before), AnalyticSurrogate().answer(asked, before)
            assert surrogate.read == (reads if not own else 0)
            assert surrogate.fitted <= 1, "evidence and answer of one question are of one fit"
            np.testing.assert_array_equal(result.mean, fresh.mean)
            np.testing.assert_array_equal(result.sd, fresh.sd)
    growing = list(rows[:4])
    asked = replace(query, relatives=[Relative(near.problem, growing)])
    surrogate.answer(asked, before)
    growing += rows[4:]
    np.testing.assert_array_equal(
        surrogate.answer(asked, before).mean, AnalyticSurrogate().answer(asked, before).mean
    )
