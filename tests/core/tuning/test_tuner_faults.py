"""The loop when a part of it fails: candidates, the harness, the surrogate. A call still gets a config."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.errors import NoWorkingConfigError
from forecast_autotune.policy import Exhaustive
from forecast_autotune.records import Candidate, Evidence, Measurement, Outcome
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_autotune.tuning.loop import TuningTask, tune
from tests.core.tuning.loop import TABLE, Bench, Told, constant, decide, outcomes

# --- failures ---


def test_nothing_launches_lists_what_happened() -> None:
    table = outcomes(Outcome.COMPILE_ERROR, message="no such intrinsic")
    table.measurements[0] = Measurement(table.problem.id, TABLE.measurements[0].candidate, Outcome.TIMEOUT)
    store, bench = Store(None), Bench(table)
    expected = r"none of 15 candidates ran \(14 compile_error, 1 timeout\).*no such intrinsic"
    with pytest.raises(NoWorkingConfigError, match=expected):
        decide(store, bench)
    assert len(bench.asked) == 15
    assert bench.closed == 1
    assert store.decision(TABLE.problem) is None
    again = Bench(table)
    with pytest.raises(NoWorkingConfigError):
        decide(store, again)
    assert len(again.asked) == 14, "a compiler may have been mended; what hung the device is not tried again"
    assert TABLE.measurements[0].candidate not in again.asked


@pytest.mark.parametrize("settings", [{}, {"max_measurements": 2}, {"max_seconds": 0.001}])
def test_the_one_candidate_that_runs_is_found(settings: dict[str, Any]) -> None:
    """A budget must not leave the caller without a config: Triton would have found one."""
    table = outcomes(Outcome.OUT_OF_RESOURCES, but=11)
    decision = decide(Store(None), Bench(table), table=table, **settings)
    assert decision.chosen == TABLE.measurements[11].candidate


def test_out_of_resources_spares_the_larger_ones() -> None:
    """After one failure for want of shared memory, whoever needs more is not compiled any more."""

    def by_size(query: Query) -> Forecasts:
        made = constant(sd=0.5)(query)
        made.mean[:] = [-float(dict(c.config.kwargs)["BLOCK"] or 0) for c in query.candidates]
        limit = min(
            (
                dict(m.candidate.config.kwargs)["BLOCK"]
                for m in query.measured
                if m.outcome is Outcome.OUT_OF_RESOURCES
            ),
            default=10**9,
        )
        made.p_fail[:] = [0.95 * (dict(c.config.kwargs)["BLOCK"] >= limit) for c in query.candidates]
        return made

    names = [m.candidate for m in TABLE.measurements]
    fits = {c: dict(c.config.kwargs)["BLOCK"] <= 32 for c in names}
    rows = [
        Measurement("p", c, Outcome.OK, 1.0) if fits[c] else Measurement("p", c, Outcome.OUT_OF_RESOURCES)
        for c in names
    ]
    bench = Bench(Table(TABLE.problem, [replace(m, problem=TABLE.problem.id) for m in rows]))
    decision = decide(Store(None), bench, surrogate=Told(by_size))
    assert fits[decision.chosen]
    tried = [c for c in bench.asked if not fits[c]]
    assert tried, "the forecasts liked the large ones best"
    assert decision.refused == sum(not ok for ok in fits.values()) - len(tried) > 0


def test_a_broken_harness_gives_the_best_forecast_and_is_tried_again_later() -> None:
    store = Store(None)
    broken = Bench(outcomes(Outcome.INFRASTRUCTURE, message="CUDA out of memory"))
    with pytest.warns(UserWarning, match="CUDA out of memory"):
        decision = decide(store, broken)
    assert decision.evidence is Evidence.FORECAST
    assert 0 < len(broken.asked) < 15, "more of the same would follow"
    assert len(set(broken.asked)) == len(broken.asked)
    assert store.decision(TABLE.problem) is None, "a guess must not pass for a decision in frozen mode"
    healthy = Bench(TABLE)
    decision = decide(store, healthy)
    assert decision.evidence is Evidence.MEASURED
    assert decision.known == 0
    assert healthy.asked


def test_a_fault_beside_failures_never_gives_a_failed_candidate() -> None:
    table = outcomes(Outcome.COMPILE_ERROR)
    last = TABLE.measurements[14].candidate
    table.measurements[14] = Measurement(TABLE.problem.id, last, Outcome.INFRASTRUCTURE)
    with pytest.warns(UserWarning, match="nothing could be timed"):
        decision = decide(Store(None), Bench(table), policy=Exhaustive(), surrogate=Told(constant()))
    assert decision.chosen == last


def test_one_fault_is_neither_a_label_nor_an_end() -> None:
    table = Table(TABLE.problem, list(TABLE.measurements))
    table.measurements[0] = Measurement(
        TABLE.problem.id, TABLE.measurements[0].candidate, Outcome.INFRASTRUCTURE
    )
    store, bench = Store(None), Bench(table)
    decide(store, bench, policy=Exhaustive())
    assert len(bench.asked) == 15
    healthy = Bench(TABLE)
    decide(store, healthy, policy=Exhaustive(), tolerance=0.5)
    assert healthy.asked == [TABLE.measurements[0].candidate]


# --- surrogates that fail ---


def raising(query: Query) -> Forecasts:
    raise OSError("no weights")


def nan_mean(query: Query) -> Forecasts:
    made = constant()(query)
    made.mean[2] = math.nan
    return made


def short(query: Query) -> Forecasts:
    return constant()(replace(query, candidates=query.candidates[:-1]))


def wrong_shape(query: Query) -> Forecasts:
    return replace(constant()(query), sd=np.ones((len(query.candidates), 1)))


def other_order(query: Query) -> Forecasts:
    return constant()(replace(query, candidates=list(reversed(query.candidates))))


def no_probability(query: Query) -> Forecasts:
    return constant(p_fail=1.5)(query)


BAD = [raising, nan_mean, short, wrong_shape, other_order, no_probability]


@pytest.mark.parametrize("say", BAD)
def test_a_bad_surrogate_means_measuring_everything(say: Callable[[Query], Forecasts]) -> None:
    bench = Bench(TABLE)
    with pytest.warns(UserWarning, match="surrogate told failed .*measuring everything"):
        decision = decide(Store(None), bench, surrogate=Told(say))
    assert set(bench.asked) == set(TABLE.by_candidate())
    assert decision.median_ms == min(m.ms for m in TABLE.measurements if m.ok)
    assert math.isfinite(decision.stated_risk)


@pytest.mark.parametrize("say", BAD)
def test_a_bad_surrogate_without_a_clock_means_the_first_config(say: Callable[[Query], Forecasts]) -> None:
    with pytest.warns(UserWarning, match="surrogate told failed .*using the first config"):
        decision = decide(Store(None), Bench(TABLE), surrogate=Told(say), mode="skip")
    assert decision.chosen == TABLE.measurements[0].candidate


def test_a_surrogate_that_fails_half_way_keeps_what_was_measured() -> None:
    def tired(query: Query) -> Forecasts:
        return raising(query) if query.measured else constant()(query)

    bench = Bench(TABLE)
    with pytest.warns(UserWarning, match="no weights"):
        decide(Store(None), bench, surrogate=Told(tired))
    assert Counter(bench.asked) == Counter(list(TABLE.by_candidate()))


@pytest.mark.parametrize("fault", ["raises", "nan", "shape"])
def test_bad_joint_samples_are_replaced_by_independent_ones(fault: str) -> None:
    def sampler(rows: Any, count: int, generator: Any) -> Any:
        if fault == "raises":
            raise np.linalg.LinAlgError("Eigenvalues did not converge")
        return np.full((count, len(rows) + (fault == "shape")), math.nan if fault == "nan" else 0.0)

    bench = Bench(TABLE)
    with pytest.warns(UserWarning, match="joint samples failed"):
        decision = decide(
            Store(None), bench, surrogate=Told(lambda q: replace(constant()(q), sampler=sampler))
        )
    assert decision.evidence is Evidence.MEASURED


def test_a_trace_that_fails_is_survived() -> None:
    def trace(wanted: Sequence[Candidate]) -> dict[str, str]:
        raise RuntimeError("no front end")

    task = TuningTask(TABLE.problem, list(TABLE.by_candidate()), trace=trace)
    with pytest.warns(UserWarning, match="no front end"):
        decision = tune(
            task, Bench(TABLE), store=Store(None), surrogate=AnalyticSurrogate(), settings=Settings()
        )
    assert decision.evidence is Evidence.MEASURED
