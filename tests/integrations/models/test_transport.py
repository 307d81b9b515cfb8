"""Requests to a server: deadline, retries, keys, redirects, breaker, budgets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.parallel import run_parallel
from forecast_autotune.llm.replies import InvalidResponse
from forecast_integrations.models.http import request
from forecast_integrations.models.http.limits import CircuitBreaker, Deadline, UsageLedger
from forecast_integrations.models.http.request import api_key_for
from forecast_integrations.models.http.transport import RequestRejected, Transport
from tests.integrations.models import faults
from tests.integrations.models.faults import ERROR, OK, saying, script
from tests.integrations.models.faulty_server import Fault, FaultyServer, Handler, ask, transport_to

KEY = "sk-test-0123456789abcdefghij"

pytestmark = pytest.mark.usefixtures("short_pauses")


# --- retries ---


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_passing_trouble_is_retried(status: int) -> None:
    with FaultyServer(script(saying({}, status), saying({}, status), OK)) as server:
        assert ask(transport_to(server))["fine"]
        assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 418, 422, 501])
def test_a_refusal_is_not_retried(status: int) -> None:
    with FaultyServer(script(saying({"error": "because"}, status))) as server:
        with pytest.raises(
            RequestRejected, match=f"HTTP {status} with 20 bytes of application/json"
        ) as caught:
            ask(transport_to(server))
        assert caught.value.status == status
        assert len(server.requests) == 1


def test_attempts_are_limited() -> None:
    with FaultyServer(script(ERROR)) as server:
        with pytest.raises(LLMError, match=r"HTTP 500.* after 3 attempts"):
            ask(transport_to(server, attempts=3), 30.0)
        assert len(server.requests) == 3


def test_a_server_that_asks_for_more_time_than_there_is_gets_no_second_request() -> None:
    with FaultyServer(script(saying({}, 429, Retry_After="3000"), OK)) as server:
        started = time.monotonic()
        with pytest.raises(LLMError, match="HTTP 429"):
            ask(transport_to(server), 60.0)
        assert time.monotonic() - started < 40.0, "it waited although that was in vain"
        assert len(server.requests) == 1


def test_retry_after_is_obeyed() -> None:
    times: list[float] = []

    def choose(path: str, body: Any) -> Fault:
        times.append(time.monotonic())
        return saying({}, 503, Retry_After="0.6") if len(times) == 1 else OK

    with FaultyServer(choose) as server:
        ask(transport_to(server))
    assert times[1] - times[0] >= 0.6


def test_what_the_reader_cannot_use_is_retried_and_what_it_refuses_is_not() -> None:
    calls: list[Any] = []

    def picky(data: Any) -> Any:
        calls.append(data)
        if len(calls) == 1:
            raise InvalidResponse("not this one")
        if len(calls) == 2:
            return data["absent"]
        return "at last"

    def refusing(data: Any) -> Any:
        raise LLMError("never")

    with FaultyServer(script(OK)) as server:
        it = transport_to(server)
        found, usage = it.ask(f"{it.base}/x", {}, picky, deadline=Deadline(9.0))
        assert found == "at last"
        assert usage.requests == 1
        assert usage.prompt_tokens == 10
        assert it.ledger.spent.prompt_tokens == 30, "the useless ones were paid for, too"
        with pytest.raises(LLMError, match="never"):
            it.ask(f"{it.base}/x", {}, refusing, deadline=Deadline(9.0))
        assert len(server.requests) == 4


# --- time ---


@pytest.mark.parametrize("fault", faults.STALLS, ids=lambda f: str(f.__name__))
def test_the_deadline_holds_and_nothing_is_left_behind(fault: Fault) -> None:
    with FaultyServer(script(fault)) as server:
        started = time.monotonic()
        with pytest.raises(LLMError, match="no answer within"):
            ask(transport_to(server), 0.3)
        assert 0.25 < time.monotonic() - started < 20.0
        for thread in threading.enumerate():
            if thread.name.startswith("forecast-autotune-llm"):
                thread.join(2.0)
                assert not thread.is_alive(), "the request goes on"


def test_more_requests_than_slots_wait_for_each_other() -> None:
    under_way, most = [0], [0]
    mutex = threading.Lock()

    def slow(handler: Handler, reply: Any) -> None:
        with mutex:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.05)
        with mutex:
            under_way[0] -= 1
        OK(handler, reply)

    with FaultyServer(script(slow)) as server:
        it = transport_to(server, concurrency=2)
        found = run_parallel([lambda: ask(it)] * 8, 8)
        assert [r["fine"] for r in found if not isinstance(r, LLMError)] == [True] * 8
        assert most[0] == 2
        server.choose = script(faults.stall)
        so_far = len(server.requests)
        with ThreadPoolExecutor(2) as pool:
            held = [pool.submit(ask, it, 2.0) for _ in range(2)]
            while len(server.requests) < so_far + 2:
                time.sleep(0.01)
            with pytest.raises(LLMError, match="2 requests were under way for all of"):
                ask(it, 0.2)
            assert all(isinstance(future.exception(), LLMError) for future in held)


def test_a_reply_beyond_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "LARGEST", 1000)
    with FaultyServer(script(saying("x" * 2000))) as server:
        with pytest.raises(LLMError, match="at most 1000 are read"):
            ask(transport_to(server, attempts=1))
        server.choose = script(faults.huge_body)
        with pytest.raises(LLMError, match="more than 1000 bytes"):
            ask(transport_to(server, attempts=1))


# --- keys and redirects ---


def test_which_key_goes_where(monkeypatch: pytest.MonkeyPatch) -> None:
    from urllib.parse import urlsplit

    remote, secure, here = map(
        urlsplit, ("http://far.example/v1", "https://far.example/v1", "http://127.0.0.9:1")
    )
    assert api_key_for(secure) == ""
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    assert [api_key_for(url) for url in (remote, secure, here)] == ["", "of-openai", "of-openai"]
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", " ours\n")
    assert [api_key_for(url) for url in (remote, secure, here)] == ["ours"] * 3
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", "se\ncret")
    with pytest.raises(LLMError, match="FORECAST_AUTOTUNE_LLM_KEY") as caught:
        api_key_for(remote)
    assert "cret" not in str(caught.value)


def test_the_key_is_in_the_header_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", KEY)

    def repeats_it(handler: Handler, reply: Any) -> None:
        handler.reply(401, b"x" * 190 + handler.headers["Authorization"].encode() * 40)

    with FaultyServer(script(repeats_it)) as server:
        it = transport_to(server)
        with pytest.raises(RequestRejected) as caught:
            ask(it)
        (path, body, headers) = server.requests[0]
    assert headers["Authorization"] == f"Bearer {KEY}"
    for text in (
        path,
        json.dumps(body),
        repr(it),
        str(vars(it)),
        repr(caught.value),
        str(vars(caught.value)),
    ):
        assert KEY[:12] not in text


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_neither_key_nor_prompt_goes_to_another_server(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORECAST_AUTOTUNE_LLM_KEY", KEY)
    with (
        FaultyServer() as other,
        FaultyServer(script(saying({}, status, Location=f"{other.url}/echo"))) as server,
    ):
        with pytest.raises(RequestRejected, match=r"redirects.*within the server"):
            ask(transport_to(server))
        assert other.requests == []


def test_a_redirect_within_the_server_is_followed_but_not_for_ever() -> None:
    with FaultyServer(script(saying({}, 307, Location="/v2/echo"), OK)) as server:
        assert ask(transport_to(server))["fine"]
        assert [path for path, _, _ in server.requests] == ["/v1/echo", "/v2/echo"]
    with FaultyServer(script(faults.redirect_loop)) as server:
        with pytest.raises(RequestRejected, match="redirects more than 3 times"):
            ask(transport_to(server))
        assert len(server.requests) == 4


def test_a_proxy_is_used_for_other_machines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyServer(script(OK)) as proxy, FaultyServer(script(OK)) as server:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1").replace("//", "//user:pass%21@"))
        monkeypatch.delenv("no_proxy", raising=False)
        assert ask(transport_to(server))["fine"]
        assert len(server.requests) == 1
        it = Transport("http://far.example/v1", shared_breaker=CircuitBreaker("it"), ledger=UsageLedger())
        assert ask(it)["fine"]
        ((path, _, headers),) = proxy.requests
    assert path == "http://far.example/v1/echo"
    assert headers["Proxy-Authorization"] == "Basic dXNlcjpwYXNzIQ=="


def test_jobs_side_by_side_keep_their_order_and_their_errors() -> None:
    def failing() -> int:
        raise LLMError("no")

    jobs: Sequence[Callable[[], int]] = [lambda: 1, failing, lambda: 3]
    for width in (1, 3):
        first, second, third = run_parallel(jobs, width)
        assert (first, third) == (1, 3)
        assert isinstance(second, LLMError)
    assert run_parallel([], 4) == []
