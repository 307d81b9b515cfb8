"""`Decision`: JSON both ways, and lines that are none."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Config, Cost, Decision, Evidence

TEXT = st.text(max_size=20)
COUNT = st.integers(0, 10**6)
SECONDS = st.floats(0, 1e6)
VALUE = st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), TEXT)
CONFIGS = st.builds(
    Config.of,
    st.dictionaries(TEXT, VALUE, max_size=4),
    num_warps=st.sampled_from([1, 2, 4, 8]),
    num_stages=st.integers(0, 7),
    num_ctas=st.integers(1, 2),
    maxnreg=st.one_of(st.none(), st.integers(16, 255)),
)
DECISIONS = st.builds(
    Decision,
    problem=TEXT,
    chosen=st.builds(Candidate, CONFIGS, TEXT),
    evidence=st.sampled_from(Evidence),
    reason=TEXT,
    stated_risk=st.floats(0, 1),
    tolerance=st.floats(0, 10),
    candidates=COUNT,
    measured=COUNT,
    known=COUNT,
    trusted=COUNT,
    refused=COUNT,
    median_ms=st.one_of(st.none(), st.floats(1e-6, 1e6)),
    saved_s=SECONDS,
    cost=st.builds(Cost, SECONDS, SECONDS, SECONDS, SECONDS, COUNT),
    settings=TEXT,
    at=TEXT,
    rounds=st.lists(TEXT, max_size=3).map(tuple),
)


@given(decision=DECISIONS)
def test_a_decision_survives_json(decision: Decision) -> None:
    text = json.dumps(decision.to_json(), allow_nan=False)
    again = Decision.from_json(json.loads(text))
    assert again == decision
    assert json.dumps(again.to_json()) == text
    assert hash(again.chosen) == hash(decision.chosen)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "measurement"},
        {"schema": 99},
        {"evidence": "guessed"},
        {"config": None},
        {"config": {"kwargs": 3}},
        {"cost": {"no_such_cost": 1}},
        {"rounds": 3},
    ],
)
def test_what_is_no_decision_is_refused(change: dict[str, Any]) -> None:
    decision = Decision("p", Candidate(Config()), Evidence.ONLY, "r", 0.0, 0.02, 1, 0)
    with pytest.raises(RecordError):
        Decision.from_json({**decision.to_json(), **change})
    missing = replace(decision).to_json()
    del missing["reason"]
    with pytest.raises(RecordError):
        Decision.from_json(missing)
