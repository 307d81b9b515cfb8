"""FORECAST_AUTOTUNE_ADVICE=background on the null device: written beside the program, never in its way."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import triton

from forecast_autotune.llm.advice.question import advice_prompt
from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.open_question import question_key
from forecast_autotune.settings import Settings
from forecast_autotune.store import Store
from forecast_autotune.tuning.advice_samples import stored_samples
from forecast_integrations.models import factory
from forecast_integrations.triton.background_advice import WRITER
from forecast_integrations.triton.problem import describe
from forecast_integrations.triton.problem.source import standalone_source
from tests.integrations.triton.test_variants_live import call, double, tuned
from tests.waiting import eventually

MANY = [triton.Config({"BLOCK": 128}, num_warps=w, num_stages=s) for w in (1, 2, 4, 8) for s in (1, 2)]
ANSWER = 'SUMMARY = "few warps"\ndef cost(config, args, device, launch):\n    return config.num_warps\n'
CHAT = "http://localhost:9/v1?model=m-1&kind=chat"


@pytest.fixture(autouse=True)
def alone(device: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A writer that has seen nothing; nobody is asked for forecasts."""
    WRITER.reset()
    monkeypatch.setenv("FORECAST_AUTOTUNE_ADVICE", "background")
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM", CHAT)
    yield
    wait(lambda: not WRITER._working)
    WRITER.reset()


def wait(done: Callable[[], bool]) -> None:
    assert eventually(done, 20.0)


def decide(store: Store, name: str = "exhaustive") -> Any:
    from forecast_autotune.surrogates.default import default_surrogate

    tuner = tuned(None, MANY, store=store, mode=name, surrogate=default_surrogate())
    call(tuner)
    return tuner.decision


def test_advice_is_there_for_the_next_decision(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    may_answer = threading.Event()

    def writer(*_: Any, **__: Any) -> Any:
        def write(prompt: str, n: int) -> list[str]:
            asked.append(threading.current_thread().name)
            may_answer.wait(20)
            return [ANSWER]

        return write

    monkeypatch.setattr(factory, "text_generator", writer)
    store = Store(tmp_path)
    assert not decide(store).advice, "the decision did not wait"
    assert store.advice_of() == []
    decide(Store(tmp_path / "2"))
    may_answer.set()
    wait(lambda: bool(store.advice_of()))
    (advice,) = store.advice_of()
    assert (advice.kernel, advice.model) == ("double", "m-1")
    assert advice.source_sha256 == describe.kernel_record(double).source_sha256
    wait(lambda: not WRITER._working)
    assert asked == ["forecast-advice"], "once per source"
    store.clear()
    assert decide(store).advice.startswith("advice at weight")


def test_a_recorded_model_answers_and_a_missing_answer_is_said_once(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, store = tmp_path / "answers.jsonl", Store(tmp_path / "store")
    head = {"type": "answers", "schema": 1, "model": "m-1", "provenance": {"author": "a"}}
    path.write_text(json.dumps(head) + "\n")
    settings = Settings(advice="background", llm=f"recorded:{path}")
    monkeypatch.setenv("FORECAST_AUTOTUNE_ADVICE", "stored")
    decide(store)
    (table,) = store.tables()
    kernel = table.problem.kernel
    with pytest.warns(UserWarning, match="advice was not written: no recorded answer"):
        offered(settings, store, kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        offered(settings, store, kernel)
    prompt = advice_prompt(stored_samples([table]), standalone_source(double))
    line = {"type": "answer", "key": question_key("", prompt), "text": ANSWER}
    path.write_text(f"{json.dumps(head)}\n{json.dumps(line)}\n")
    WRITER.reset()
    offered(settings, store, kernel)
    (advice,) = store.advice_of()
    assert (advice.text, advice.model) == (ANSWER, "m-1")


def offered(settings: Settings, store: Store, kernel: Any) -> None:
    WRITER.offer(settings, store, kernel, double)
    wait(lambda: not WRITER._working)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"llm": ""}, "names none: name a server with kind=chat"),
        ({"llm": "transformers:some/model"}, "names transformers"),
        ({"llm": "http://localhost:9/v1?model=m"}, "names completions"),
    ],
)
def test_a_model_that_cannot_write_is_said(
    setting: dict[str, str], said: str, device: Any, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    kernel = describe.kernel_record(double)
    with pytest.warns(UserWarning, match=said):
        offered(Settings(advice="background", **setting), store, kernel)  # type: ignore[arg-type]


def test_nobody_is_asked_where_that_is_not_wanted(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def writer(*_: Any, **__: Any) -> Any:
        raise LLMError("asked all the same")

    monkeypatch.setattr(factory, "text_generator", writer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv("FORECAST_AUTOTUNE_ADVICE", "stored")
        decide(Store(tmp_path / "1"))
        monkeypatch.setenv("FORECAST_AUTOTUNE_ADVICE", "background")
        decide(Store(tmp_path / "2"), "skip")
        monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_TRUST", "never")
        decide(Store(tmp_path / "3"))
        assert not WRITER._working
    assert not WRITER._seen
