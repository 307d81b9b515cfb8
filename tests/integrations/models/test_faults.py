"""Faults of a server: no crash, no hang, no wrong row."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import BINS
from forecast_integrations.models.http import request
from forecast_integrations.models.http.chat import ChatBackend
from forecast_integrations.models.http.client import MAX_ATTEMPTS, ServerClient
from tests.integrations.models import faulty_server
from tests.integrations.models.faults import BODIES, BROKEN
from tests.integrations.models.faulty_server import PREFIX, Fault, FaultyServer, opened, truth

TIMEOUT_S = 0.5
MARGIN_S = 20.0
"""A machine under load may be late; a hang would last for the 30 s that the server stalls."""


@pytest.fixture(autouse=True)
def _megabyte(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is read of a reply."""
    monkeypatch.setattr(request, "LARGEST", 2**20)


def always(fault: Fault) -> faulty_server.Chooser:
    return lambda path, body: fault


def name_of(fault: Fault) -> str:
    return str(getattr(fault, "name", getattr(fault, "__name__", "")))


@pytest.mark.parametrize("fault", [*BROKEN, *BODIES], ids=name_of)
def test_each_fault_alone_is_an_error_in_time(fault: Fault) -> None:
    """A server that does nothing else: `LLMError`, within the time."""
    with FaultyServer(always(fault)) as server:
        backend = opened("chat", server, attempts=MAX_ATTEMPTS)
        started = time.monotonic()
        with pytest.raises(LLMError) as caught:
            backend.forecast(PREFIX, faulty_server.suffixes(2), BINS.labels, timeout_s=0.15)
        assert time.monotonic() - started < 0.15 + MARGIN_S
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9/v1", "Connect call failed"),
        ("https://{served}", "SSL"),
        ("http://no-such-host.invalid/v1", "no-such-host"),
    ],
    ids=["nobody listens", "no TLS", "no such name"],
)
def test_a_server_that_cannot_be_reached(url: str, said: str) -> None:
    with FaultyServer() as server:
        address = url.format(served=server.url.removeprefix("http://"))
        backend = ChatBackend(address, "m", client=ServerClient(address, attempts=1, failures=10**9))
        with pytest.raises(LLMError, match=said):
            backend.forecast(PREFIX, faulty_server.suffixes(2), BINS.labels, timeout_s=10.0)
        assert not server.requests


def test_one_bad_row_does_not_spoil_the_others() -> None:
    def spoil(handler: faulty_server.Handler, reply: Any) -> None:
        if "choices" in reply:
            reply["choices"][1]["logprobs"]["top_logprobs"][0]["token_id:1065"] = float("nan")
            del reply["choices"][3]
            reply["choices"].append(reply["choices"][0])
        handler.reply(200, json.dumps(reply).encode())

    asked = faulty_server.suffixes(6)
    with FaultyServer(always(spoil)) as server:
        answer = opened("completions", server, attempts=MAX_ATTEMPTS).forecast(
            PREFIX, asked, BINS.labels, timeout_s=5
        )
    assert answer.answered.tolist() == [False, False, True, False, True, True]
    assert not answer.probabilities[~answer.answered].any()
    rows = [truth(suffix) for suffix, answered in zip(asked, answer.answered, strict=True) if answered]
    np.testing.assert_allclose(answer.probabilities[answer.answered], rows, atol=1e-6)
    assert len(answer.trouble) == 3
    assert any("several answers" in reason for reason in answer.trouble)
