"""A server that repeats the key, in any place of its reply: nothing of it is shown or kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("openai")

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS
from forecast_integrations.models.http.chat import ChatBackend, chat_generator
from forecast_integrations.models.http.client import RequestRejected
from forecast_integrations.models.http.completions import completions_generator
from tests.integrations.models import faulty_server
from tests.integrations.models.faulty_server import KINDS, PREFIX, Fault, FaultyServer, client_of

pytestmark = pytest.mark.usefixtures("short_pauses")

KEY = "sk-Zr5/Qx-7KpW+mD0vLt9~Uy2HbNc4Jg_eAf8"


def body(data: bytes, status: int = 200, **headers: str) -> Fault:
    return lambda handler, reply: handler.reply(status, data, **headers)


def raw(data: bytes) -> Fault:
    return lambda handler, reply: handler.wfile.write(data)


def said(text: str) -> Any:
    return {"choices": [{"index": 0, "text": text, "message": {"content": text}, "finish_reason": text}]}


def as_json(data: Any, status: int = 200) -> Fault:
    return body(json.dumps(data).encode(), status)


PLACES: dict[str, Callable[[str], Fault]] = {
    "an error's text": lambda text: body(text.encode(), 400),
    "an error to ask again after": lambda text: body(text.encode(), 500, Retry_After="0"),
    "an error's message": lambda text: as_json(
        {"error": {"message": text, "param": text, "code": text}}, 422
    ),
    "a reply that is not JSON": lambda text: body(text.encode()),
    "names of labels": lambda text: as_json(
        said(json.dumps({"forecasts": [{"id": 1, "distribution": [{"label": text, "percent": text}]}]}))
    ),
    "a redirect": lambda text: body(b"", 307, Location=f"http://far.example/{text.replace(' ', '')}"),
    "its headers": lambda text: body(b"", 400, Content_Type=text, Retry_After=text, Set_Cookie=text),
    "the status line": lambda text: raw(f"HTTP/1.1 500 {text}\r\nContent-Length: 0\r\n\r\n".encode()),
    "no HTTP": lambda text: raw(f"{text}\r\n\r\n".encode()),
    "a header that is none": lambda text: raw(f"HTTP/1.1 200 OK\r\n{text}\r\n\r\n".encode()),
}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", KEY)
    return KEY


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_error_holds_the_key(place: str, kind: str) -> None:
    fault = PLACES[place](f"you sent Bearer {KEY} and more")
    with FaultyServer(lambda path, asked: fault) as server:
        model = KINDS[kind](server.url, "m", client=client_of(server, attempts=2))
        with pytest.raises(LLMError) as caught:
            model.forecast(PREFIX, faulty_server.suffixes(3), BINS.labels, timeout_s=20.0)
        assert server.requests[0][2]["Authorization"] == f"Bearer {KEY}"
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 1000
    assert KEY not in f"{text} {caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"
    if "an error" in place:
        assert "you sent Bearer [the key] and more" in text, "else its own words are shown"


def test_a_text_that_repeats_the_key_is_refused() -> None:
    """What a model writes is kept, so the key must not be in it."""
    with FaultyServer(lambda path, asked: as_json(said(f"def kernel():\n    # {KEY}\n"))) as server:
        client = client_of(server, attempts=2)
        for write in (
            chat_generator(ChatBackend(server.url, "m", client=client), 20.0),
            completions_generator(client, "m", 20.0),
        ):
            with pytest.raises(LLMError, match="repeats the key"):
                write("write", 2)


def test_a_placeholder_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", "after")
    with FaultyServer() as server:
        assert completions_generator(client_of(server), "m", 20.0)("write", 1) == ["after write"]


@pytest.mark.parametrize("status", [301, 307])
def test_another_host_is_never_sent_the_key_or_the_prompt(status: int) -> None:
    with FaultyServer() as other:
        for where in (f"{other.url}/x", f"http://127.0.0.1:80@{other.url.removeprefix('http://')}"):
            fault = body(b"", status, Location=where)
            with FaultyServer(lambda path, asked, fault=fault: fault) as server:  # type: ignore[misc]
                with pytest.raises(RequestRejected, match=f"HTTP {status}.*redirects are not followed"):
                    faulty_server.ask(client_of(server, attempts=2))
                assert len(server.requests) == 1
        assert other.requests == []


# --- what commands show and keep ---
