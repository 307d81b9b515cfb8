"""Language models beside live decisions: what they are asked, told and shown, and what their absence costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton

from forecast_autotune.llm.calibration import calibration_path, write
from forecast_autotune.llm.gate import GateDecision, GateInputs
from forecast_autotune.surrogates.default import DefaultSurrogate
from forecast_autotune.surrogates.factory import open_backend, with_language_model
from forecast_autotune.surrogates.protocol import Forecasts, Query
from forecast_integrations.models.recorded import RecordedAnswers, read_answers, read_questions
from forecast_integrations.triton.problem import describe
from tests.core.llm.words import calibrated
from tests.integrations.models.faulty_server import FaultyServer
from tests.integrations.null import double, fresh, twice
from tests.integrations.triton.test_variants_live import FAST, call, checked, record, tuned

MANY = [triton.Config({"BLOCK": 128}, num_warps=w, num_stages=s) for w in (1, 2, 4, 8) for s in (1, 2, 3, 4)]


def decided(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str) -> Any:
    monkeypatch.setenv("FORECAST_AUTOTUNE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM", model)
    tuner = tuned(None, MANY, mode="tune")
    call(tuner)
    return tuner.decision


def test_what_a_decision_asked_is_answered_for_the_next_one(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers, left, got = (tmp_path / f"{name}.jsonl" for name in ("answers", "open", "got"))
    kept = RecordedAnswers("m-1", {"author": "a"})
    kept.write(answers)
    spec = f"recorded:{answers}?weight=0.5&open={left}"
    with pytest.warns(UserWarning, match="no recorded answer"):
        missed = decided(monkeypatch, tmp_path, spec)
    assert missed.llm.asked
    assert "no recorded answer" in missed.llm.trouble
    (question,) = read_questions(left).values()
    reply = {"key": question.key, "log2_slowdown": [0.1 * i for i in range(len(MANY))], "sd": 0.2}
    got.write_text(json.dumps(reply) + "\n")
    (answer,) = read_answers(got, read_questions(left)).taken
    RecordedAnswers(kept.model, kept.provenance, {answer.key: answer}).write(answers)
    heard = decided(monkeypatch, tmp_path, spec)
    assert heard.llm.asked
    assert not heard.llm.trouble
    assert heard.llm.weight > 0.0
    assert "recorded:m-1 at weight" in heard.reason


def test_a_model_that_does_not_exist_is_said_and_the_call_launches(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_SUMMARY", "1")
    model = tmp_path / "nowhere"
    with pytest.warns(UserWarning, match="does not exist"):
        decision = decided(monkeypatch, tmp_path, f"transformers:{model}")
    assert decision.candidates == len(MANY)
    assert not decision.llm.asked
    assert f"{model} does not exist" in decision.llm.why
    assert f"{model} does not exist" in capsys.readouterr().err


class Curious:
    """Keeps the queries that it answers."""

    name, version = "curious", "1"

    def __init__(self) -> None:
        self.queries: list[Query] = []

    def forecast(self, query: Query) -> Forecasts:
        self.queries.append(query)
        return DefaultSurrogate().forecast(query)


def test_a_live_query_has_the_source_of_every_variant(device: Any) -> None:
    variant, base = record(FAST, checked()), describe.kernel_record(double).source
    assert base.startswith("def double(")
    own = {"mine": describe.kernel_record(twice).source}
    for given, more in ((None, {}), ([variant], {variant.name: FAST}), ({"mine": fresh(twice)}, own)):
        surrogate = Curious()
        call(tuned(given, mode="tune", surrogate=surrogate))
        assert dict(surrogate.queries[0].sources) == {"base": base, **more}


def test_a_real_server_is_shown_what_a_variant_changes(device: Any, tmp_path: Path) -> None:
    def always(situation: GateInputs) -> GateDecision:
        return GateDecision(True, 1e6, "always")

    with FaultyServer() as server:
        spec = f"{server.url}?model=m&kind=completions&attempts=1"
        name = open_backend(spec, tmp_path).name
        scope = replace(calibrated().scope, mass=0.0)
        write(calibration_path(name, tmp_path), replace(calibrated(saved=1.0), scope=scope))
        surrogate = with_language_model(DefaultSurrogate(), spec, cache=tmp_path, patient=True, gate=always)
        variant = record(FAST, checked())
        call(tuned([variant], MANY, mode="tune", surrogate=surrogate))
        asked = json.dumps([body for _, body, _ in server.requests])
    assert "Changed kernel:" in asked or "Other kernel:" in asked
    assert "value + value" in asked
    assert "2 * tl.load(x + i, mask=i < n)" in asked, "and the base itself, in the part that all share"
