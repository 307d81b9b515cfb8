"""Asking a model beside other work: who waits, for how long, and what happens to those that hang."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.gate import GateDecision
from forecast_autotune.surrogates.blend import PRIOR_LOG_ODDS
from forecast_autotune.surrogates.protocol import Query
from forecast_autotune.testing import query_of
from tests.core.llm.words import TABLE, Said, ensemble, equal, favours, plain

HEARD = 1 / (1 + math.exp(-PRIOR_LOG_ODDS))
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
    assert second.consultation is not None
    assert second.consultation.weight > 0
    assert len(answer.questions) == answer.prepared == 1, "asked and loaded once per decision"
    assert not np.array_equal(second.mean, plain(growing(rows)).mean)


def test_a_warm_and_quick_model_is_waited_for_at_once() -> None:
    value = ensemble(Said(favours(64)), patient=False, gate=lambda s: GateDecision(True, 20.0, 0.05, "warm"))
    result = value.forecast(growing([]))
    assert result.consultation is not None
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
    assert result.consultation is not None
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
    assert result.consultation is not None
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
