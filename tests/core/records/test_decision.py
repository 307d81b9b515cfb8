"""`Decision`: JSON both ways, and lines that are none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from forecast_autotune.errors import RecordError
from forecast_autotune.records import Candidate, Config, Decision, Evidence


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
