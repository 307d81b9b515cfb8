"""A named model in decorated calls on the null device: heard from a file, missed loudly, and never in the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import triton

from forecast_integrations.models.recorded import RecordedAnswers, read_answers, read_questions
from tests.integrations.triton.test_variants_live import call, tuned

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
