"""What telemetry shows of a decision that is really compiled."""

from __future__ import annotations

from typing import Any

import pytest

from forecast_autotune import autotune
from forecast_autotune.telemetry import spans
from tests.core.telemetry.recorder import Recorder
from tests.integrations.null import configs, double, fresh, launch


@pytest.mark.parametrize("compiler", ["fork", "threads"])
def test_each_compilation_and_measurement_is_shown_and_no_launch(
    device: Any, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(spans._state, "exporter", recorder)
    monkeypatch.setenv("FORECAST_AUTOTUNE_COMPILER", compiler)
    tuner = autotune(configs=configs(stages=(2, 3)), key=["n"], store=False)(fresh(double))
    launch(tuner)
    shown, counted = len(recorder.spans), dict(recorder.counted)
    for _ in range(50):
        launch(tuner)
    assert (len(recorder.spans), recorder.counted) == (shown, counted), "a key that is decided says nothing"
    decision = tuner.decision
    assert decision is not None
    timed = [attributes for attributes in recorder.named("measure") if "candidate" in attributes]
    assert len(timed) == decision.measured > 0
    assert {name for name, _, _ in recorder.spans} >= {"decide", "forecast", "trace", "measure"}
    compiled = recorder.named("compile")
    assert {attributes["outcome"] for attributes in compiled} <= {"ok", "given up"}
    assert {a["candidate"] for a in timed} <= {a["candidate"] for a in compiled if a["outcome"] == "ok"}
    (decide,) = recorder.named("decide")
    assert decide["kernel"] == "double"
    assert counted["measured"] == decision.measured
    assert counted["seconds_saved"] == decision.saved_s
