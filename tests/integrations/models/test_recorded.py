"""`recorded:FILE`: what a file may say, what is refused and how, and that an answer is found by its question."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forecast_autotune.errors import SettingsError
from forecast_autotune.llm.backend import Backend, LLMError, Usage
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.open_question import question_key
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.llm.providers import provider
from forecast_autotune.llm.spec import parsed
from forecast_integrations.models.recorded import (
    RecordedAnswer,
    RecordedAnswers,
    RecordedBackend,
    read_questions,
)

HEADER = {
    "type": "answers",
    "schema": 1,
    "model": "opus-9",
    "provenance": {"author": "a", "how": "by hand", "date": "2026-01-31", "blind": True},
}
SUFFIXES = ("one\nBin:", "two\nBin:", "drei äöü\nBin:")
KEY = question_key(FORECAST_VERSION, "prefix", SUFFIXES)


def answer(**more: Any) -> dict[str, Any]:
    return {"type": "answer", "key": KEY, "version": FORECAST_VERSION, "kernel": "k", **more}


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def test_listwise_forecasts_become_probabilities_of_the_bins(tmp_path: Path) -> None:
    stated = answer(log2_slowdown=[0.0, 1.0, -0.2], sd=[0.1, 0.3, 0.05], p_fail=[0.0, 0.25, 1.0])
    backend = RecordedBackend(str(written(tmp_path / "a.jsonl", HEADER, stated)))
    assert isinstance(backend, Backend)
    assert backend.name == "recorded:opus-9"
    assert backend.ready()
    found = backend.forecast("prefix", SUFFIXES, BINS.labels, timeout_s=1.0)
    assert found.usage == Usage()
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1.0)
    np.testing.assert_allclose(found.probabilities[0], BINS.soft_targets(0.0, 0.1)[0], atol=1e-12)
    mean, sd, p_fail = BINS.moments(found.probabilities)
    np.testing.assert_allclose(p_fail, [0.0, 0.25, 1.0])
    assert mean[1] == pytest.approx(1.0, abs=0.05)
    assert sd[1] == pytest.approx(0.3, abs=0.1)


def test_a_text_is_written_once_and_never_executed(tmp_path: Path) -> None:
    lines = [
        {"type": "answer", "key": question_key("", "write"), "text": "def f(): ..."},
        {"type": "answer", "key": question_key("advice-1", "advise"), "version": "advice-1", "text": "cost"},
    ]
    path = written(tmp_path / "a.jsonl", HEADER, *lines)
    write = provider().text_generator(f"recorded:{path}")
    assert write("write", 4) == ["def f(): ..."]
    assert write("advise", 1) == ["cost"]
    with pytest.raises(LLMError, match="llm ask --export"):
        write("something else", 1)


def test_open_questions_of_decisions_can_be_kept(tmp_path: Path) -> None:
    """So that they are answered for the next time; each once."""
    path, left = written(tmp_path / "a.jsonl", HEADER), tmp_path / "open.jsonl"
    backend = provider().backend(f"recorded:{path}?open={left}")
    for _ in range(2):
        said = rf"no recorded answer for this question \(key {KEY[:12]}.*llm ask --export"
        with pytest.raises(LLMError, match=said):
            backend.forecast("prefix", SUFFIXES, BINS.labels, timeout_s=1.0)
    (question,) = read_questions(left).values()
    assert (question.key, question.suffixes) == (KEY, SUFFIXES)
    (tmp_path / "nowhere").touch()
    elsewhere = provider().backend(f"recorded:{path}?open={tmp_path}/nowhere/open.jsonl")
    with pytest.raises(LLMError, match="cannot be kept"):
        elsewhere.forecast("prefix", SUFFIXES, BINS.labels, timeout_s=1.0)


def test_a_file_that_grows_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", HEADER)
    backend = RecordedBackend(str(path))
    kept = RecordedAnswers.read(str(path))
    added = RecordedAnswer.from_json(answer(log2_slowdown=[0, 1, 2], sd=0.2))
    RecordedAnswers(kept.model, kept.provenance, {KEY: added}).write(path)
    assert backend.forecast("prefix", SUFFIXES, BINS.labels, timeout_s=1.0).answered.all()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    lines = [answer(log2_slowdown=[0, 1, 2], sd=0.2), {**answer(text="t"), "key": "f" * 64}]
    made = RecordedAnswers("m", {"author": "a"}, {d["key"]: RecordedAnswer.from_json(d) for d in lines})
    made.write(tmp_path / name)
    assert RecordedAnswers.read(str(tmp_path / name)) == made
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2"),
        ("[]", "JSON object"),
        ({"type": "problem"}, "'answer'"),
        (answer(), "one of log2_slowdown, probabilities, text"),
        (answer(text="t", probabilities=[[1.0]]), "one of"),
        (answer(text=3), "text"),
        ({**answer(text="t"), "key": "short"}, "64"),
        (answer(log2_slowdown=[0, 1], sd=[0.1]), "2 numbers"),
        (answer(log2_slowdown=[0, 1]), "sd"),
        (answer(log2_slowdown=[0, 1], sd=0.0), "sd"),
        (answer(log2_slowdown=[0.0], sd=[math.ulp(1.0)]), "from 0.01"),
        (answer(log2_slowdown=[0, "1"], sd=0.1), "log2_slowdown"),
        (answer(log2_slowdown=[0, True], sd=0.1), "log2_slowdown"),
        (answer(log2_slowdown=[], sd=0.1), "log2_slowdown"),
        (answer(log2_slowdown=[0, 1e9], sd=0.1), "from -64 to 64"),
        (answer(log2_slowdown=[0, 1], sd=0.1, p_fail=[0.1, 2]), "p_fail"),
        (answer(probabilities=[[0.5, 0.4]]), "sum to 1"),
        (answer(probabilities=[[0.5, 0.5], [1.0]]), "same length"),
        (json.dumps(answer(log2_slowdown=[math.nan], sd=1)), "NaN"),
    ],
)
def test_a_bad_line_is_named_with_the_remedy(line: Any, complaint: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", HEADER, line)
    with pytest.raises(SettingsError, match=r"a\.jsonl, line 2.*llm ask --import") as error:
        RecordedBackend(str(path))
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    "header",
    [
        {**HEADER, "schema": 2},
        {**HEADER, "model": ""},
        {**HEADER, "provenance": {}},
        {**HEADER, "type": "answer"},
        {k: v for k, v in HEADER.items() if k != "provenance"},
    ],
)
def test_answers_without_provenance_are_refused(header: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="line 1"):
        RecordedAnswers.read(str(written(tmp_path / "a.jsonl", header)))


def test_the_specification(tmp_path: Path) -> None:
    spec = parsed("recorded:answers.jsonl?weight=0.25")
    assert (spec.kind, spec.location, spec.options["weight"]) == ("recorded", "answers.jsonl", 0.25)
    assert spec.shown == "recorded:answers.jsonl"
    for text in ("recorded:", "recorded:a.jsonl?weight=2", "recorded:a.jsonl?device=cuda"):
        with pytest.raises(SettingsError):
            parsed(text)
