"""Backends behind HTTP against a server that answers truly: rows, masses, batches, and what servers lack."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.llm.probe import Probe, ProbeMismatch, ProbeQuestion
from forecast_integrations.models.http.chat import chat_generator
from tests.integrations.models.faulty_server import (
    KINDS,
    MASS,
    PREFIX,
    FaultyServer,
    Handler,
    honest,
    opened,
    suffixes,
    tokenized,
    truth,
)

PAIR_LABELS = (AnswerLabel("A", "the first"), AnswerLabel("B", "the second"))

pytestmark = pytest.mark.usefixtures("short_pauses")


def ask(it: Backend, asked: list[str] | None = None, labels: Any = BINS.labels) -> BackendResponse:
    return it.forecast(PREFIX, suffixes(3) if asked is None else asked, labels, timeout_s=20.0)


def replying(make: Callable[[Any, Any], Any]) -> Any:
    """A server whose replies are `make(body, honest reply)`."""

    def choose(path: str, body: Any) -> Any:
        def answer(handler: Handler, reply: Any) -> None:
            made = make(body, reply) if path != "/tokenize" else reply
            status, data = made if isinstance(made, tuple) else (200, made)
            handler.reply(status, json.dumps(data).encode())

        return answer

    return choose


def says(content: Any, finish: str = "stop") -> Any:
    """A chat reply."""
    text = content if isinstance(content, str) or content is None else json.dumps(content)
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_servers_in_the_order_asked(kind: str) -> None:
    asked = suffixes(11)
    with FaultyServer() as server:
        it = opened(kind, server, batch=4)
        answer = ask(it, asked)
        paths = [path for path, _, _ in server.requests if path != "/tokenize"]
    assert np.allclose(answer.probabilities, [truth(s) for s in asked], atol=1e-9)
    assert np.allclose(answer.mass, 1.0 if kind == "chat" else MASS)
    assert answer.trouble == ()
    assert len(paths) == 3, "batches of four"
    assert answer.usage.requests == len(server.requests)
    assert answer.usage.prompt_tokens > 0
    assert isinstance(it, Backend)
    assert it.ready()
    assert it.name.startswith(f"{kind}:m")


# --- completions ---


def test_texts_are_tokenized_once_and_apart() -> None:
    with FaultyServer() as server:
        it = opened("completions", server)
        ask(it)
        ask(it, suffixes(4))
        texts = [body["prompt"] for path, body, _ in server.requests if path == "/tokenize"]
        sent = [body for path, body, _ in server.requests if path == "/v1/completions"]
    assert len(texts) == len(set(texts)) == 1 + 4 + 1 + len(BINS.labels)
    assert PREFIX in texts
    assert sent[0]["prompt"][1] == tokenized(PREFIX) + tokenized(suffixes(3)[1])
    assert sent[0]["logprob_token_ids"] == [1000 + ord(label.token) for label in BINS.labels]
    assert (sent[0]["max_tokens"], sent[0]["logprobs"]) == (1, 20)


def test_a_server_of_other_weights_than_the_probes_is_refused() -> None:
    """Asked once; and nothing is forecast by it."""
    texts = tuple(suffixes(2))
    right = [tuple(float(x) for x in np.log(truth(text))) for text in texts]
    ids = ((1,), (1, 2), (3,))
    for rows, refused in ((right, False), (right[::-1], True)):
        question = ProbeQuestion(PREFIX, texts, ids[0], ids[1:], tuple(rows))
        with FaultyServer() as server:
            it = opened("completions", server, probe=Probe("float32", (1,), (question,)))
            if not refused:
                assert ask(it).answered.all()
                continue
            for _ in range(2):
                with pytest.raises(ProbeMismatch, match="2 recorded prompts differ by up to"):
                    ask(it)
            assert len([path for path, _, _ in server.requests if path == "/v1/completions"]) == 1


def test_a_batch_that_fails_leaves_the_others() -> None:
    asked = suffixes(6)

    def make(body: Any, reply: Any) -> Any:
        return (500, {}) if len(body["prompt"]) == 2 else reply

    with FaultyServer(replying(make)) as server:
        answer = ask(opened("completions", server, batch=4), asked)
    assert answer.answered.tolist() == [True] * 4 + [False] * 2
    assert answer.mass[4:].tolist() == [0, 0]
    assert "HTTP 500" in answer.trouble[0]


def test_a_server_without_logprobs_is_told_apart() -> None:
    """As `transformers serve` does: it takes the parameter and says nothing of it."""

    def make(body: Any, reply: Any) -> Any:
        for choice in reply["choices"]:
            choice["logprobs"] = None
        return reply

    with FaultyServer(replying(make)) as server:
        with pytest.raises(LLMError, match=r"no log-probabilities.*use kind=chat"):
            ask(opened("completions", server))
        assert server.count("/v1/completions") == 1, "asking again is in vain"


def test_a_server_without_a_tokenizer_gets_text() -> None:
    def choose(path: str, body: Any) -> Any:
        return (lambda handler, _: handler.reply(404, b"{}")) if path == "/tokenize" else None

    asked = suffixes(3)
    with FaultyServer(choose) as server:
        it = opened("completions", server)
        for _ in range(2):
            answer = ask(it, asked)
            assert np.allclose(answer.probabilities, [truth(s) for s in asked])
        assert server.count("/tokenize") == 1
        assert server.requests[-1][1]["prompt"] == [PREFIX + s for s in asked]


def test_labels_are_summed_over_the_ways_to_write_them() -> None:
    """Likely tokens as text: with a space before, as sentencepiece and GPT-2 write it, or without."""
    top = {" A": -1.0, "A": -2.0, "\u2581B": -1.5, "\u0120C": -3.0, "the": -0.9}

    def choose(path: str, body: Any) -> Any:
        data = {"choices": [{"index": 0, "logprobs": {"top_logprobs": [top]}}]}
        return lambda handler, _: handler.reply(
            404 if path == "/tokenize" else 200, json.dumps(data).encode()
        )

    with FaultyServer(choose) as server:
        answer = ask(opened("completions", server), ["x\nBin:"], [AnswerLabel(c, c) for c in "ABCD"])
    weights = np.array([np.exp(-1) + np.exp(-2), np.exp(-1.5), np.exp(-3), 0.0])
    assert answer.mass[0] == pytest.approx(weights.sum())
    assert np.allclose(answer.probabilities[0], weights / weights.sum())


def test_fewer_likely_tokens_where_a_server_allows_no_more() -> None:
    def make(body: Any, reply: Any) -> Any:
        many = body["logprobs"] > 5
        return (400, {"error": {"message": "logprobs must be at most 5"}}) if many else reply

    with FaultyServer(replying(make)) as server:
        it = opened("completions", server)
        assert ask(it).answered.all()
        assert ask(it).answered.all()
        assert [b["logprobs"] for p, b, _ in server.requests if p == "/v1/completions"] == [20, 5, 5]


def test_labels_that_are_not_single_tokens_are_an_error() -> None:
    with FaultyServer() as server, pytest.raises(LLMError, match="one token each after 'Bin:'"):
        ask(opened("completions", server), labels=[AnswerLabel("AB", "x"), AnswerLabel("C", "y")])


# --- chat ---


def dist(**percent: float) -> list[dict[str, Any]]:
    return [{"label": label, "percent": value} for label, value in percent.items()]


GOOD = {"forecasts": [{"id": 1, "distribution": dist(A=75, B=25)}]}


@pytest.mark.parametrize(
    ("content", "expected", "mass"),
    [
        (GOOD, [0.75, 0.25], 1.0),
        (f"<think>{{hm}} [1]</think>\n{json.dumps(GOOD)}", [0.75, 0.25], 1.0),
        (f"Here you are:\n```json\n{json.dumps(GOOD)}\n```\nGood luck!", [0.75, 0.25], 1.0),
        (f"My answer: {json.dumps(GOOD)} as you wished", [0.75, 0.25], 1.0),
        (GOOD["forecasts"], [0.75, 0.25], 1.0),
        ({"forecasts": [{"id": "1", "distribution": dist(A=0.6, B=0.2)}]}, [0.75, 0.25], 0.8),
        ({"forecasts": [{"id": 1, "distribution": {"a": 90, " B ": 30}}]}, [0.75, 0.25], 1.2),
        ({"forecasts": [{"id": 1, "distribution": [{"label": "B", "probability": 1}]}]}, [0.0, 1.0], 1.0),
        ({"forecasts": [{"id": 1, "distribution": dist(A=60, B=20, Z=20)}]}, [0.75, 0.25], 0.8),
    ],
)
def test_what_is_read_leniently(content: Any, expected: list[float], mass: float) -> None:
    with FaultyServer(replying(lambda body, reply: says(content))) as server:
        answer = ask(opened("chat", server), suffixes(1), PAIR_LABELS)
    assert np.allclose(answer.probabilities, [expected])
    assert np.allclose(answer.mass, [mass])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"forecasts": [{"id": 1, "distribution": dist(A=0.3, B=0.1)}]}, "do not sum to 1 but to 0.4"),
        ({"forecasts": [{"id": 1, "distribution": dist(A=100, B=90)}]}, "do not sum to 1 but to 1.9"),
        ({"forecasts": [{"id": 1, "distribution": dist(A=-0.5, B=1.5)}]}, "no probabilities"),
        ({"forecasts": [{"id": 1, "distribution": dist(A=1e300)}]}, "no probabilities"),
        ({"forecasts": [{"id": 1, "distribution": dist(A=True)}]}, "no probabilities"),
        ({"forecasts": [{"id": 1, "distribution": dist(A=60) + dist(A=40)}]}, "given twice"),
        ({"forecasts": [{"id": 1, "distribution": dist(Y=60, Z=40)}]}, "do not sum to 1 but to 0"),
        ({"forecasts": [{"id": 1, "distribution": []}]}, "do not sum to 1"),
        ({"forecasts": [{"id": 1, "distribution": "A"}]}, "another shape"),
        ({"forecasts": [*GOOD["forecasts"], *GOOD["forecasts"]]}, "several answers"),
        ({"forecasts": [{"id": 2, "distribution": dist(A=100)}]}, "no answer"),
        ({"forecasts": [{"id": True, "distribution": dist(A=100)}]}, "no answer"),
        ({"forecasts": None}, "another shape"),
        ("A, I think.", "not JSON"),
        (json.dumps(GOOD)[:-9], "cut off"),
        ("", "empty answer"),
        (None, "empty answer"),
    ],
)
def test_what_is_not_read_at_all(content: Any, reason: str) -> None:
    with (
        FaultyServer(replying(lambda body, reply: says(content))) as server,
        pytest.raises(LLMError, match=reason),
    ):
        ask(opened("chat", server, attempts=1), suffixes(1), PAIR_LABELS)


def test_a_text_that_is_cut_off_is_none_unless_its_code_is_whole() -> None:
    for text, whole in (("def f(", False), ("```python\nx = 1", False), ("```\nx = 1\n```\nIt is", True)):
        with FaultyServer(replying(lambda body, reply, text=text: says(text, "length"))) as server:
            write = chat_generator(opened("chat", server), 20.0)
            if whole:
                assert write("go", 1) == [text]
                continue
            with pytest.raises(LLMError, match="raise max_tokens"):
                write("go", 1)


def test_the_form_is_a_schema_that_bounds_everything() -> None:
    with FaultyServer() as server:
        ask(opened("chat", server))
        (_, body, _) = server.requests[0]
    schema = body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["forecasts"]["maxItems"] == 3
    one = schema["properties"]["forecasts"]["items"]["properties"]
    assert one["distribution"]["items"]["properties"]["label"]["enum"] == [b.token for b in BINS.labels]
    assert one["id"]["maximum"] == 3
    question = body["messages"][-1]["content"]
    assert question.startswith(PREFIX.rstrip())
    assert "\n1. BLOCK=16 num_warps=1 try=0\n2. BLOCK=32" in question
    assert "Bin:" not in question, "the question of the other backends"


def refusing(*names: str) -> Any:
    """A server that refuses fields, one after another."""

    def make(body: Any, reply: Any) -> Any:
        for name in names:
            if name == "json_schema" and body.get("response_format", {}).get("type") == name:
                return 400, {"error": {"message": "response_format of type json_schema is not supported"}}
            if name in body:
                hint = " Use 'max_completion_tokens' instead." if name == "max_tokens" else ""
                return 400, {"error": {"message": f"Unsupported parameter: '{name}'.{hint}"}}
        return honest("/v1/chat/completions", body | {"response_format": {"type": "any"}})

    return replying(make)


@pytest.mark.parametrize(
    ("refused", "kept"),
    [
        (("json_schema",), {"max_tokens", "temperature", "response_format"}),
        (("response_format",), {"max_tokens", "temperature"}),
        (("temperature", "max_tokens"), {"max_completion_tokens", "response_format"}),
        (("temperature", "max_tokens", "response_format"), {"max_completion_tokens"}),
    ],
)
def test_what_a_server_does_not_take_is_left_out(refused: tuple[str, ...], kept: set[str]) -> None:
    with FaultyServer(refusing(*refused)) as server:
        it = opened("chat", server)
        assert ask(it).answered.all()
        tried = len(server.requests)
        assert ask(it).answered.all()
        assert len(server.requests) == tried + 1, "it remembers"
        (_, body, _) = server.requests[-1]
    assert set(body) - {"model", "messages"} == kept


def test_reasoning_models_get_room_for_their_thoughts() -> None:
    with FaultyServer() as server:
        it = opened("chat", server, effort="low")
        ask(it)
        (_, body, _) = server.requests[0]
    assert body["reasoning_effort"] == "low"
    assert body["max_completion_tokens"] > 16000
    assert not {"max_tokens", "temperature"} & set(body)
    assert "reasoning_effort=low" in it.name


def test_the_name_tells_all_that_changes_an_answer() -> None:
    with FaultyServer() as server:
        names = {
            opened("chat", server, **options).name
            for options in ({}, {"temperature": 0.5}, {"effort": "high"}, {"batch": 2})
        }
    assert len(names) == 4
    assert all("chat-1" in name for name in names)
