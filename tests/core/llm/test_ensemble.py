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
from forecast_autotune.llm.calibration import BlendWeight, LLMCalibration, ModelLatency
from forecast_autotune.llm.gate import GateDecision, GateInputs
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records import LLMConsultation
from forecast_autotune.store import Store
from forecast_autotune.surrogates.blend import (
    PRIOR_LOG_ODDS,
    BlendedSurrogate,
    disagreement,
    mix_forecasts,
)
from forecast_autotune.surrogates.covariance import Hyperparameters
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate
from forecast_autotune.surrogates.protocol import Forecasts, Query, Relative
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


def test_draws_come_from_one_belief_or_the_other_as_a_whole() -> None:
    """So what is measured next hedges between the two, and a risk is that of both."""
    candidates = list(TABLE.by_candidate())[:2]

    def certain(a: float, b: float) -> Forecasts:
        values = np.array([a, b])
        return Forecasts(
            candidates,
            values,
            np.full(2, 1e-9),
            np.array([a, b]) / 4,
            lambda rows, k, g: np.tile(values[rows], (k, 1)),
        )

    both = mix_forecasts(certain(0.0, 1.0), certain(3.0, 1.5), 0.25)
    drawn = both.samples(np.arange(2), 4000, 1)
    assert {tuple(d) for d in drawn.tolist()} == {(0.0, 1.0), (3.0, 1.5)}
    assert (drawn[:, 0] == 0.0).mean() == pytest.approx(0.25, abs=0.03)
    np.testing.assert_allclose(both.mean, [2.25, 1.375])
    np.testing.assert_allclose(both.sd, [3.0 * math.sqrt(0.1875), 0.5 * math.sqrt(0.1875)], atol=1e-6)
    np.testing.assert_allclose(both.p_fail, both.mean / 4)
    np.testing.assert_allclose(both.optimistic(), [0.0, 1.0], atol=1e-6)


def test_only_asked_candidates_are_moved() -> None:
    mute = Said(lambda s: nothing(s) if "BLOCK=16 " in s else favours(128)(s))
    result = ensemble(mute).forecast(query_of(TABLE))
    gone = np.array(["BLOCK=16 " in f"{c.config} " for c in TABLE.by_candidate()])
    assert np.ptp(result.mean[gone]) < 1e-9
    assert np.ptp(result.mean[~gone]) > 0.3


def test_relatives_are_seen_through_the_same_belief() -> None:
    """A correction that a relative confirms must not be applied twice: its belief is moved as well."""
    moved = {c: (0.5 if "BLOCK=16 " in f"{c.config} " else 0.0) for c in TABLE.by_candidate()}
    blend = BlendedSurrogate(AnalyticSurrogate(), False, moved, BlendWeight(0.6, 0.3))
    here = blend.prior(query_of(TABLE))
    there = blend.prior(replace(query_of(TABLE), candidates=list(TABLE.by_candidate())[:3]))
    np.testing.assert_allclose(there.mean, here.mean[:3])
    assert here.parts.shape[1] == AnalyticSurrogate().prior(query_of(TABLE)).parts.shape[1] + 1
    known = Relative(TABLE.problem, TABLE.measurements[:20])
    assert np.isfinite(
        ensemble(Said(favours(64))).forecast(replace(query_of(TABLE), relatives=[known])).mean
    ).all()


def test_levels_do_not_matter_and_slow_ends_are_compressed() -> None:
    h, n = Hyperparameters(), 6
    learned, trust = np.linspace(0.0, 1.0, n), np.full(n, 0.5)
    shape = np.linspace(1.0, 0.0, n)
    one, two = (disagreement(learned + a, shape + b, trust, h) for a, b in ((0.0, 0.0), (5.0, -3.0)))
    np.testing.assert_allclose(one, two, atol=1e-12)
    np.testing.assert_allclose(disagreement(learned, learned, trust, h), 0.0, atol=1e-12)
    assert (disagreement(learned, shape, np.zeros(n), h) == 0.0).all()
    far = disagreement(learned, np.array([*learned[:-1], 50.0]), trust, h)
    assert far[-1] < 0.5 * (h.knee + h.beyond * 50.0)


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


def test_one_that_cannot_be_loaded_is_contained() -> None:
    class Unloadable(Said):
        def prepare(self) -> None:
            raise OSError("no such folder")

    result = ensemble(Unloadable(same, cold=True))
    with pytest.warns(UserWarning, match="no such folder"):
        equal(result.forecast(query_of(TABLE)), plain(query_of(TABLE)))


def test_readiness_that_raises_is_contained() -> None:
    class Moody(Said):
        def ready(self) -> bool:
            raise RuntimeError("driver gone")

    result = ensemble(Moody(same), patient=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        equal(result.forecast(query_of(TABLE)), plain(query_of(TABLE)))


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
    value = ensemble(answer, gate=lambda s: GateDecision(False, 0.0, 1.0, "six configs are measured sooner"))
    result = value.forecast(query_of(TABLE))
    equal(result, plain(query_of(TABLE)))
    assert result.reason.endswith("language model not asked: six configs are measured sooner")
    assert result.consultation == LLMConsultation(
        "said", FORECAST_VERSION, asked=False, why="six configs are measured sooner"
    )
    assert answer.questions == []


def test_the_gate_sees_the_problem_as_it_is() -> None:
    seen: list[GateInputs] = []

    def gate(situation: GateInputs) -> GateDecision:
        seen.append(situation)
        return GateDecision(False, 0.0, 0.0, "no")

    known = Relative(TABLE.problem, TABLE.measurements)
    result = ensemble(Said(same), gate=gate, patient=False, workers=7)
    result.forecast(
        replace(query_of(TABLE, 5), relatives=[replace(known, measurements=TABLE.measurements[:9])])
    )
    (s,) = seen
    assert (s.candidates, s.workers, s.asked, s.saved) == (30, 7, 35, 0.3)
    assert s.compile_s == 0.5  # as the relative's measurements say
    assert s.load_s == 0.0
    assert s.answer_s is None


def test_the_gate_goes_by_the_latency_that_was_measured() -> None:
    seen: list[GateInputs] = []

    def gate(situation: GateInputs) -> GateDecision:
        seen.append(situation)
        return GateDecision(True, 30.0, 0.0, "yes")

    calibration = replace(calibrated(saved=0.07), pace=ModelLatency(answer_s=0.4))
    result = ensemble(Said(same), calibration, gate=gate, patient=False)
    for _ in range(2):
        result.forecast(replace(query_of(TABLE), once=True))
    first, later = seen
    assert (first.saved, first.answer_s) == (0.07, 0.4)
    assert later.answer_s == 0.01, "as its answers have taken in this process"


def test_a_guess_in_passing_is_not_asked_about() -> None:
    answer = Said(favours(16))
    equal(ensemble(answer).forecast(replace(query_of(TABLE), provisional=True)), plain(query_of(TABLE)))
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
    result = ensemble(answer, patient=False, gate=lambda s: GateDecision(s.once, 9.0, 9.0, "once"))
    decision = decide(Store(None), Bench(TABLE), table=TABLE, surrogate=result, mode="deterministic")
    assert dict(decision.chosen.config.kwargs)["BLOCK"] == 64
    assert decision.cost.llm_tokens > 100
    assert "said at weight" in decision.reason


# --- who waits, for how long, and what happens to those that hang ---


"""Probability that a model's part belongs into a forecast, before anything was measured."""


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
    result = ensemble(answer, patient=False, gate=lambda s: GateDecision(True, 20.0, 15.0, "cold"))
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


def test_a_warm_and_quick_model_is_waited_for_at_once() -> None:
    value = ensemble(Said(favours(64)), patient=False, gate=lambda s: GateDecision(True, 20.0, 0.05, "warm"))
    result = value.forecast(growing([]))
    assert result.consultation.weight == pytest.approx(0.6 * HEARD)


def test_nobody_waits_for_what_takes_longer_than_it_is_worth(held: threading.Event) -> None:
    answer = Said(favours(64), cold=True, hold=held)
    result = ensemble(answer, patient=False, gate=lambda s: GateDecision(True, 0.5, 60.0, "slow"))
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


def test_questions_do_not_pile_up_behind_a_model_that_loads(held: threading.Event) -> None:
    answer = Said(favours(64), cold=True, hold=held)
    result = ensemble(answer, patient=False, gate=lambda s: GateDecision(True, 0.5, 60.0, "slow"))
    for _ in range(5):
        equal(result.forecast(query_of(TABLE)), plain(query_of(TABLE)))
    held.set()
    again = result.forecast(query_of(TABLE))
    for _ in range(100):
        if "still busy" not in again.reason:
            break
        time.sleep(0.05)
        again = result.forecast(query_of(TABLE))
    assert len(answer.questions) <= 2


def test_where_nothing_will_be_measured_the_answer_is_waited_for() -> None:
    value = ensemble(
        Said(favours(64), cold=True), patient=False, gate=lambda s: GateDecision(True, 0.0, 60.0, "slow")
    )
    result = value.forecast(replace(growing([]), once=True))
    assert result.consultation.weight == pytest.approx(0.6 * HEARD)


def test_own_measurements_are_not_shown_to_a_model_that_they_correct() -> None:
    answer = Said(favours(64))
    result = ensemble(answer)
    result.forecast(query_of(TABLE, 12))
    result.forecast(query_of(TABLE))
    assert answer.questions[0] == answer.questions[1]


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
