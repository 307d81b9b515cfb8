"""The learned surrogate and a model together: what the model may change, and what it must never."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.gate import GateDecision
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records import LLMConsultation
from forecast_autotune.store import Store
from forecast_autotune.surrogates.blend import (
    PRIOR_LOG_ODDS,
)
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.protocol import Query, Relative
from forecast_autotune.testing import SurrogateContract, query_of
from tests.core.llm.words import (
    TABLE,
    Said,
    block,
    calibrated,
    ensemble,
    equal,
    favours,
    nothing,
    plain,
    same,
)
from tests.core.tuning.loop import Bench, decide

HEARD = 1 / (1 + math.exp(-PRIOR_LOG_ODDS))
BEST = 91  # the table's optimum lies at 2^6.4, between its sizes of 64 and 128


class TestEnsemble(SurrogateContract):
    def make(self) -> EnsembleSurrogate:
        return ensemble(Said(favours(128)))


class TestEnsembleOfASilentModel(SurrogateContract):
    def make(self) -> EnsembleSurrogate:
        return ensemble(Said(nothing))


# --- what a model may change ---


def test_its_opinion_moves_the_forecast_by_the_calibrated_weight() -> None:
    """Without IR and measurements the plain forecast is flat: what is left is the model's."""
    query = query_of(TABLE)
    low, high = (ensemble(Said(favours(64)), calibrated(w, 0.1)).forecast(query).mean for w in (0.25, 0.5))
    assert np.ptp(plain(query).mean) == 0.0
    np.testing.assert_allclose(high - high.mean(), 2 * (low - low.mean()), atol=1e-9)
    sizes = np.array([dict(c.config.kwargs)["BLOCK"] for c in query.candidates])
    assert set(sizes[np.argsort(high)[:5]]) == {64}


def test_disagreement_widens_the_forecast() -> None:
    """So that the clock decides, and not the louder of the two."""
    gently = Said(lambda s: BINS.soft_targets(0.1 * np.log2(block(s) / 16), 0.15)[0])
    sure, unsure = (ensemble(gently, calibrated(0.5, sd)).forecast(query_of(TABLE)) for sd in (0.0, 0.6))
    np.testing.assert_allclose(sure.mean, unsure.mean, atol=1e-9)
    away, wider = np.abs(sure.mean - sure.mean.mean()), unsure.sd - sure.sd
    assert wider.min() > -1e-9
    assert np.corrcoef(away, wider)[0, 1] > 0.9


def test_measurements_correct_a_model_that_is_wrong() -> None:
    """It says that the largest are fastest. After a dozen measurements its word weighs less than before."""
    wrong, known = ensemble(Said(favours(1024))), replace(query_of(TABLE), measured=TABLE.measurements[::3])
    first, later = wrong.forecast(query_of(TABLE)), wrong.forecast(known)
    assert first.consultation.weight == pytest.approx(0.6 * HEARD)
    assert later.consultation.weight < first.consultation.weight
    assert later.consultation.weight < 0.2
    right = ensemble(Said(favours(BEST))).forecast(known)
    assert right.consultation.weight > later.consultation.weight


# --- what it must never change ---


def test_without_weight_it_is_the_plain_surrogate() -> None:
    query = query_of(TABLE, 5)
    equal(ensemble(Said(favours(16)), calibrated(0.0)).forecast(query), plain(query))


def test_a_model_without_calibration_is_not_asked_and_that_is_said_once() -> None:
    answer = Said(favours(16))
    value = ensemble(answer, LLMCalibration("said", "forecast-2"))
    with pytest.warns(UserWarning, match="calibrate-llm"):
        result = value.forecast(query_of(TABLE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        value.forecast(query_of(TABLE))
    equal(result, plain(query_of(TABLE)))
    assert answer.questions == []
    assert value.version == DefaultSurrogate(AnalyticSurrogate()).version, (
        "verdicts of the plain surrogate stay its own"
    )


@pytest.mark.parametrize("error", [LLMError("no answer"), RuntimeError("CUDA out of memory"), KeyError("x")])
def test_a_model_that_fails_costs_a_warning_and_nothing_else(error: Exception) -> None:
    value = ensemble(Said(same, error=error))
    query = query_of(TABLE, 5)
    with pytest.warns(UserWarning, match="goes on without|go on without"):
        result = value.forecast(query)
    equal(result, plain(query))
    assert isinstance(result.consultation, LLMConsultation)
    assert "it failed" in result.consultation.trouble


def test_a_model_that_keeps_failing_is_not_asked_any_more() -> None:
    answer = Said(same, error=LLMError("no answer"))
    result = ensemble(answer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(5):
            result.forecast(query_of(TABLE))
    assert len(answer.questions) == 2
    assert "failed 2 times in a row" in result.forecast(query_of(TABLE)).reason


def test_what_is_out_of_scope_is_the_plain_forecast_with_a_reason() -> None:
    value = ensemble(Said(favours(16)))
    query = query_of(TABLE, 3)
    strange = replace(
        query, problem=replace(query.problem, kernel=replace(query.problem.kernel, language="cuda"))
    )
    result = value.forecast(strange)
    equal(result, plain(strange))
    assert "calibrated on kernels in triton" in result.consultation.trouble


def test_a_closed_gate_asks_nothing_and_says_why() -> None:
    answer = Said(favours(16))
    value = ensemble(answer, gate=lambda s: GateDecision(False, 0.0, "six configs are measured sooner"))
    result = value.forecast(query_of(TABLE))
    equal(result, plain(query_of(TABLE)))
    assert result.reason.endswith("language model not asked: six configs are measured sooner")
    assert result.consultation == LLMConsultation(
        "said", FORECAST_VERSION, asked=False, why="six configs are measured sooner"
    )
    assert answer.questions == []


def test_dense_tables_of_relatives_outdo_a_model() -> None:
    answer = Said(favours(16))
    dense = replace(query_of(TABLE), relatives=[Relative(TABLE.problem, tuple(TABLE.measurements))])
    equal(ensemble(answer).forecast(dense), plain(dense))
    assert answer.questions == []


# --- decisions ---


def test_a_decision_says_and_records_what_the_model_did() -> None:
    store, bench = Store(None), Bench(TABLE)
    decision = decide(store, bench, table=TABLE, surrogate=ensemble(Said(favours(64))))
    assert "said at weight" in decision.reason
    assert decision.cost.llm_tokens > 100
    assert decision.cost.llm_s == 0.01
    noted = [m.extra["forecast"] for m in store.measurements(TABLE.problem)]
    assert len(noted) == decision.measured
    for note in noted:
        assert isinstance(note, dict)
        assert note["llm"]["model"] == "said"
        assert math.isfinite(note["learned_log2_ms"])


def test_a_decision_without_a_clock_waits_for_the_model() -> None:
    answer = Said(favours(64), cold=True)
    result = ensemble(answer, patient=False, gate=lambda s: GateDecision(s.once, 9.0, "once"))
    decision = decide(Store(None), Bench(TABLE), table=TABLE, surrogate=result, mode="deterministic")
    assert dict(decision.chosen.config.kwargs)["BLOCK"] == 64
    assert decision.cost.llm_tokens > 100
    assert "said at weight" in decision.reason


# --- who waits, for how long, and what happens to those that hang ---


@pytest.fixture
def held() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def growing(rows: list[Any]) -> Query:
    """The query of one decision: its parts are the same objects from round to round."""
    return replace(QUERY, measured=rows)


QUERY = replace(query_of(TABLE), candidates=CandidateList(TABLE.by_candidate()))


def test_a_cold_model_is_asked_while_the_first_candidates_compile(held: threading.Event) -> None:
    answer = Said(favours(64), cold=True, hold=held)
    result = ensemble(answer, patient=False, gate=lambda s: GateDecision(True, 20.0, "cold"))
    first = result.forecast(growing([]))
    equal(first, plain(QUERY))
    assert "not answered yet" in first.reason
    again = result.forecast(growing([]))  # more IR was traced: the same round
    equal(again, plain(QUERY))
    held.set()
    rows = TABLE.measurements[:3]
    second = result.forecast(growing(rows))
    assert second.consultation.weight > 0
    assert len(answer.questions) == answer.prepared == 1, "asked and loaded once per decision"
    assert not np.array_equal(second.mean, plain(growing(rows)).mean)


def test_nobody_waits_for_what_takes_longer_than_it_is_worth(held: threading.Event) -> None:
    answer = Said(favours(64), cold=True, hold=held)
    result = ensemble(answer, patient=False, gate=lambda s: GateDecision(True, 0.5, "slow"))
    result.forecast(growing([]))
    begin = time.perf_counter()
    equal(result.forecast(growing(TABLE.measurements[:3])), plain(growing(TABLE.measurements[:3])))
    assert time.perf_counter() - begin < 25.0, "it waited for the model, which nobody lets go"


def test_a_model_that_hangs_is_given_up_and_not_asked_again(held: threading.Event) -> None:
    answer = Said(favours(64), hold=held)
    value = ensemble(answer, patient=True, timeout_s=0.05)
    with pytest.warns(UserWarning, match=r"no answer within 0\.05 s.*FORECAST_AUTOTUNE_LLM_TIMEOUT"):
        result = value.forecast(growing([]))
    equal(result, plain(QUERY))
    assert "no answer" in result.consultation.trouble
    other = value.forecast(query_of(TABLE))  # another decision, while it still hangs
    assert "still busy" in other.reason
    assert len(answer.questions) == 1


def test_threads_of_one_decision_ask_once(held: threading.Event) -> None:
    answer = Said(favours(64), hold=held)
    result = ensemble(answer)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(result.forecast(growing([])))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    held.set()
    for thread in threads:
        thread.join(30.0)
    assert len(answer.questions) == 1
    for one in results[1:]:
        equal(results[0], one)
