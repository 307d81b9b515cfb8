"""What a trace shows of a decision that is really compiled."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune import autotune
from forecast_autotune.telemetry import spans
from tests.integrations.null import configs, double, fresh, launch


@pytest.mark.parametrize("compiler", ["fork", "threads"])
def test_a_trace_shows_each_compilation_and_measurement_and_no_launch(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str
) -> None:
    place = tmp_path / "trace.json"
    monkeypatch.setenv("FORECAST_AUTOTUNE_TRACE", str(place))
    monkeypatch.setenv("FORECAST_AUTOTUNE_COMPILER", compiler)
    tuner = autotune(configs=configs(stages=(2, 3)), key=["n"], store=False)(fresh(double))
    try:
        launch(tuner)
        decided = place.read_bytes()
        for _ in range(50):
            launch(tuner)
        assert place.read_bytes() == decided  # a key that is decided says nothing
    finally:
        spans.close()
    decision = tuner.decision
    events = json.loads(place.read_text(encoding="utf-8"))
    begun = [e for e in events if e["ph"] == "B"]
    timed = [e for e in begun if e["name"] == "measure" and "candidate" in e["args"]]
    assert len(timed) == decision.measured > 0
    assert Counter(e["name"] for e in begun).keys() >= {"decide", "forecast", "trace", "measure"}
    compiled = [e for e in events if e["ph"] == "X"]
    assert all(e["dur"] > 0 and e["args"]["outcome"] in ("ok", "given up") for e in compiled)
    assert {e["args"]["candidate"] for e in timed} <= {
        e["args"]["candidate"] for e in compiled if e["args"]["outcome"] == "ok"
    }
    decide = next(e for e in begun if e["name"] == "decide")
    assert decide["args"]["kernel"] == "double"
    ended = [e["ts"] for e in events if e["ph"] == "E"][-1]
    assert all(decide["ts"] <= e["ts"] <= e["ts"] + e["dur"] <= ended for e in compiled)
    assert {e["tid"] for e in compiled}.isdisjoint({decide["tid"]})
    counters = {e["name"]: e["args"][e["name"]] for e in events if e["ph"] == "C"}
    assert counters["measured"] == decision.measured
    assert counters["seconds_saved"] == round(decision.saved_s, 3)
