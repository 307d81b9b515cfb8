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
    said = Said(favours(64), cold=True, hold=held)
    made = ensemble(said, patient=False, gate=lambda s: GateDecision(True, 20.0, 15.0, "cold"))
    first = made.forecast(growing([]))
    equal(first, plain(QUERY))
    assert "not answered yet" in first.reason
    again = made.forecast(growing([]))  # more IR was traced: the same round
    equal(again, plain(QUERY))
    held.set()
    rows = TABLE.measurements[:3]
    second = made.forecast(growing(rows))
    assert second.consultation is not None
    assert second.consultation.weight > 0
    assert len(said.questions) == said.prepared == 1, "asked and loaded once per decision"
    assert not np.array_equal(second.mean, plain(growing(rows)).mean)


def test_a_warm_and_quick_model_is_waited_for_at_once() -> None:
    made = ensemble(Said(favours(64)), patient=False, gate=lambda s: GateDecision(True, 20.0, 0.05, "warm"))
    found = made.forecast(growing([]))
    assert found.consultation is not None
    assert found.consultation.weight == pytest.approx(0.6 * HEARD)


def test_nobody_waits_for_what_takes_longer_than_it_is_worth(held: threading.Event) -> None:
    said = Said(favours(64), cold=True, hold=held)
    made = ensemble(said, patient=False, gate=lambda s: GateDecision(True, 0.5, 60.0, "slow"))
    made.forecast(growing([]))
    begin = time.perf_counter()
    equal(made.forecast(growing(TABLE.measurements[:3])), plain(growing(TABLE.measurements[:3])))
    assert time.perf_counter() - begin < 25.0, "it waited for the model, which nobody lets go"


def test_a_model_that_hangs_is_given_up_and_not_asked_again(held: threading.Event) -> None:
    said = Said(favours(64), hold=held)
    made = ensemble(said, patient=True, timeout_s=0.05)
    with pytest.warns(UserWarning, match=r"no answer within 0\.05 s.*FORECAST_AUTOTUNE_LLM_TIMEOUT"):
        found = made.forecast(growing([]))
    equal(found, plain(QUERY))
    assert found.consultation is not None
    assert "no answer" in found.consultation.trouble
    other = made.forecast(query_of(TABLE))  # another decision, while it still hangs
    assert "still busy" in other.reason
    assert len(said.questions) == 1


def test_questions_do_not_pile_up_behind_a_model_that_loads(held: threading.Event) -> None:
    said = Said(favours(64), cold=True, hold=held)
    made = ensemble(said, patient=False, gate=lambda s: GateDecision(True, 0.5, 60.0, "slow"))
    for _ in range(5):
        equal(made.forecast(query_of(TABLE)), plain(query_of(TABLE)))
    held.set()
    again = made.forecast(query_of(TABLE))
    for _ in range(100):
        if "still busy" not in again.reason:
            break
        time.sleep(0.05)
        again = made.forecast(query_of(TABLE))
    assert len(said.questions) <= 2


def test_where_nothing_will_be_measured_the_answer_is_waited_for() -> None:
    made = ensemble(
        Said(favours(64), cold=True), patient=False, gate=lambda s: GateDecision(True, 0.0, 60.0, "slow")
    )
    found = made.forecast(replace(growing([]), once=True))
    assert found.consultation is not None
    assert found.consultation.weight == pytest.approx(0.6 * HEARD)


def test_own_measurements_are_not_shown_to_a_model_that_they_correct() -> None:
    said = Said(favours(64))
    made = ensemble(said)
    made.forecast(query_of(TABLE, 12))
    made.forecast(query_of(TABLE))
    assert said.questions[0] == said.questions[1]


def test_threads_of_one_decision_ask_once(held: threading.Event) -> None:
    said = Said(favours(64), hold=held)
    made = ensemble(said)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(made.forecast(growing([])))) for _ in range(4)]
    for thread in threads:
        thread.start()
    held.set()
    for thread in threads:
        thread.join(30.0)
    assert len(said.questions) == 1
    for one in found[1:]:
        equal(found[0], one)
