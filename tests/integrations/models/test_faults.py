"""Faults of a server: no crash, no hang, no wrong row, no key in a message."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

from forecast_autotune.llm.backend import BackendResponse, LLMError
from forecast_autotune.llm.bins import BINS
from forecast_integrations.models.http import request
from forecast_integrations.models.http.chat import ChatBackend
from forecast_integrations.models.http.client import MAX_ATTEMPTS, ServerClient
from tests.integrations.models import faulty_server
from tests.integrations.models.faults import BODIES, BROKEN, STALLS, STATUSES
from tests.integrations.models.faulty_server import MASS, PREFIX, Fault, FaultyServer, opened, truth

KEY = "sk-test-0123456789abcdefghij"
TIMEOUT_S = 0.5
MARGIN_S = 20.0
"""A machine under load may be late; a hang would last for the 30 s that the server stalls."""


def right(answer: BackendResponse, asked: list[str], honest_mass: float) -> Counter[str]:
    """Count rows that are right, missing, or say by their mass that a part is missing; fail on others."""
    found: Counter[str] = Counter()
    for row, mass, suffix in zip(answer.probabilities, answer.mass, asked, strict=True):
        if not row.any():
            found["missing"] += 1
        elif np.allclose(row, truth(suffix), atol=1e-6):
            found["right"] += 1
        else:
            assert abs(mass - honest_mass) > 1e-6, "a wrong row that looks right"
            assert abs(row.sum() - 1.0) < 1e-6
            found["partial"] += 1
    return found


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", KEY)
    monkeypatch.setattr(request, "LARGEST", 2**20)
    return KEY


def always(fault: Fault) -> faulty_server.Chooser:
    return lambda path, body: fault


def name_of(fault: Fault) -> str:
    return str(getattr(fault, "name", getattr(fault, "__name__", "")))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("fault", [*STALLS, *BROKEN, *STATUSES, *BODIES], ids=name_of)
def test_each_fault_alone_is_an_error_in_time(fault: Fault, key: str) -> None:
    """A server that does nothing else: `LLMError`, within the time, and without the key."""
    with FaultyServer(always(fault)) as server:
        backend = opened("chat", server, attempts=MAX_ATTEMPTS)
        started = time.monotonic()
        with pytest.raises(LLMError) as caught:
            backend.forecast(PREFIX, faulty_server.suffixes(2), BINS.labels, timeout_s=0.15)
        assert time.monotonic() - started < 0.15 + MARGIN_S
    text = f"{caught.value!r} {caught.value} {caught.value.__cause__!r} {caught.value.__context__!r}"
    assert key not in text
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
def test_a_server_that_cannot_be_reached(url: str, said: str, key: str) -> None:
    with FaultyServer() as server:
        address = url.format(served=server.url.removeprefix("http://"))
        backend = ChatBackend(address, "m", client=ServerClient(address, attempts=1, failures=10**9))
        with pytest.raises(LLMError, match=said):
            backend.forecast(PREFIX, faulty_server.suffixes(2), BINS.labels, timeout_s=10.0)
        assert not server.requests


def test_one_bad_row_does_not_spoil_the_others(key: str) -> None:
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
    assert right(answer, asked, MASS) == {"missing": 3, "right": 3}
    assert len(answer.trouble) == 3
    assert any("several answers" in reason for reason in answer.trouble)
