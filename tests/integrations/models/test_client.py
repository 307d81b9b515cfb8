"""Requests to a server by the openai client: over in time in every phase, retried, paid for, the key never shown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("openai")

from forecast_autotune.llm.backend import LLMError, Usage, run_parallel
from forecast_autotune.llm.replies import InvalidResponse
from forecast_integrations.models.http import request
from forecast_integrations.models.http.client import RequestRejected, ServerClient
from forecast_integrations.models.http.keys import api_key_for
from forecast_integrations.models.http.limits import (
    BudgetExceeded,
    Deadline,
    SpendingLimits,
    TokenPrices,
    UsageLedger,
)
from tests.integrations.models import faults
from tests.integrations.models.faults import ERROR, OK, saying, script
from tests.integrations.models.faulty_server import Fault, FaultyServer, Handler, ask, client_of

pytestmark = pytest.mark.usefixtures("short_pauses")

CERTIFICATE = Path(__file__).with_name("localhost.pem")
"""For 127.0.0.1, signed by itself, with its key; valid until 2126:

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=127.0.0.1 \\
    -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out certificate.pem
"""
LATE_S = 20.0
"""A machine under load may be late; what these servers do lasts until the end of the test."""


def failure(url: str, seconds: float = 10.0) -> tuple[str, int]:
    """What a request that cannot succeed says, at the latest with its deadline, and the tokens it is charged."""
    it = ServerClient(url, attempts=1, failures=10**9, ledger=UsageLedger())
    started = time.monotonic()
    with pytest.raises(LLMError) as caught:
        ask(it, seconds, Usage(1, 10))
    assert time.monotonic() - started < seconds + LATE_S
    assert caught.value.__context__ is None
    return str(caught.value).removeprefix(f"{it.base}: "), it.ledger.spent.prompt_tokens


def assert_nothing_goes_on() -> None:
    """No request is left in the event loop."""
    until = time.monotonic() + LATE_S
    while tasks := asyncio.all_tasks(request._event_loop(os.getpid())):
        assert time.monotonic() < until, tasks
        time.sleep(0.01)


# --- retries ---


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
def test_passing_trouble_is_retried(status: int) -> None:
    with FaultyServer(script(saying({}, status, Retry_After="soon"), saying({}, status), OK)) as server:
        assert ask(client_of(server))["fine"]
        assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 418, 422])
def test_a_refusal_is_not_retried(status: int) -> None:
    with FaultyServer(script(saying({"error": "because"}, status))) as server:
        with pytest.raises(RequestRejected, match=f"HTTP {status}: because") as caught:
            ask(client_of(server))
        assert caught.value.status == status
        assert len(server.requests) == 1


def test_a_server_that_asks_for_more_time_than_there_is_gets_no_second_request() -> None:
    with FaultyServer(script(saying({}, 429, Retry_After="3000"), OK)) as server:
        started = time.monotonic()
        with pytest.raises(LLMError, match="HTTP 429"):
            ask(client_of(server), 60.0)
        assert time.monotonic() - started < 40.0, "it waited although that was in vain"
        assert len(server.requests) == 1


def test_what_the_reader_cannot_use_is_asked_for_once_more_and_what_it_refuses_is_not() -> None:
    calls: list[Any] = []

    def picky(data: Any) -> Any:
        calls.append(data)
        if len(calls) % 2:
            raise InvalidResponse("not this one")
        return "at last" if len(calls) == 2 else data["absent"]

    def refusing(data: Any) -> Any:
        raise LLMError("never")

    with FaultyServer(script(OK)) as server:
        it = client_of(server)
        answer, usage = it.ask(f"{it.base}/x", {}, picky, deadline=Deadline(9.0))
        assert (answer, usage.requests, usage.prompt_tokens) == ("at last", 1, 10)
        assert it.ledger.spent.prompt_tokens == 20, "the useless one was paid for, too"
        with pytest.raises(LLMError, match=r"another shape \(KeyError\)"):
            it.ask(f"{it.base}/x", {}, picky, deadline=Deadline(9.0))
        assert len(server.requests) == 4
        with pytest.raises(LLMError, match="never"):
            it.ask(f"{it.base}/x", {}, refusing, deadline=Deadline(9.0))
        assert len(server.requests) == 5


# --- time ---


@pytest.mark.parametrize("fault", faults.STALLS, ids=lambda f: str(f.__name__))
def test_the_deadline_holds_and_nothing_is_left_behind(fault: Fault) -> None:
    with FaultyServer(script(fault)) as server:
        started = time.monotonic()
        with pytest.raises(LLMError, match="no answer within"):
            ask(client_of(server), 0.3)
        assert 0.25 < time.monotonic() - started < LATE_S
        assert_nothing_goes_on()


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
        it = client_of(server, concurrency=2)
        assert run_parallel([lambda: threading.current_thread().daemon] * 2, 2) == [True, True]
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
            ask(client_of(server, attempts=1))
        server.choose = script(faults.huge_body)
        with pytest.raises(LLMError, match="more than 1000 bytes"):
            ask(client_of(server, attempts=1))


def test_a_compressed_reply_is_not_unpacked() -> None:
    """A few bytes may unpack to gigabytes, so none is asked for, and none is unpacked."""
    with FaultyServer(script(saying({"fine": True}, Content_Encoding="gzip"))) as server:
        assert ask(client_of(server))["fine"]
        ((_, _, headers),) = server.requests
    assert headers["Accept-Encoding"] == "identity"


# --- keys, proxies and trust ---


def test_which_key_goes_where(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_proxy_is_used_for_other_machines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with FaultyServer(script(OK)) as proxy, FaultyServer(script(OK)) as server:
        monkeypatch.setenv("http_proxy", proxy.url.removesuffix("/v1").replace("//", "//user:pass%21@"))
        monkeypatch.delenv("no_proxy", raising=False)
        assert ask(client_of(server))["fine"]
        assert len(server.requests) == 1
        assert ask(ServerClient("http://far.example/v1", ledger=UsageLedger()))["fine"]
        ((path, _, headers),) = proxy.requests
    assert path == "http://far.example/v1/echo"
    assert headers["Proxy-Authorization"] == "Basic dXNlcjpwYXNzIQ=="


def test_a_proxy_of_no_use_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("ftp://me:pass-word@127.0.0.1", "http://me:pass-word@127.0.0.1:port"):
        monkeypatch.setenv("http_proxy", address)
        text, _ = failure("http://far.example/v1")
        assert "http_proxy" in text
        assert "pass-word" not in text


@pytest.fixture
def fresh_trust() -> Iterator[None]:
    """The list of trusted certificates is read once per process."""
    request._ssl_context.cache_clear()
    yield
    request._ssl_context.cache_clear()


@pytest.mark.usefixtures("fresh_trust")
def test_certificates_are_those_that_this_machine_trusts(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with FaultyServer(script(OK)) as server:
        # The handshake in the handler's thread: one that fails must not stop the server.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        url = server.url.replace("http:", "https:")
        text, charged = failure(url)
        assert "CERTIFICATE_VERIFY_FAILED" in text
        assert charged == 0
        assert server.requests == [], "neither prompt nor key"
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        request._ssl_context.cache_clear()
        assert ask(ServerClient(url, ledger=UsageLedger()))["fine"]


# --- a server that fails ---


def test_a_server_that_keeps_failing_is_left_alone() -> None:
    with FaultyServer(script(ERROR)) as server:
        it = client_of(server, failures=5, attempts=2)
        for _ in range(5):
            with pytest.raises(LLMError, match="HTTP 500"):
                ask(it)
        with pytest.raises(LLMError, match=r"failed 5 times in a row: it is tried again in 1[0-5] s"):
            ask(client_of(server, failures=5), 30.0)
        assert len(server.requests) == 10


def test_refusals_of_a_request_are_no_failures_and_an_answer_ends_them() -> None:
    with FaultyServer(script(saying({}, 400), saying({}, 400), ERROR, OK, ERROR)) as server:
        it = client_of(server, failures=2, attempts=1)
        for refused in (True, True, True, False, True):
            with pytest.raises(LLMError, match="HTTP") if refused else contextlib.nullcontext():
                ask(it)
        assert len(server.requests) == 5


# --- budgets ---


def limited(server: FaultyServer, **limits: Any) -> ServerClient:
    return client_of(server, limits=SpendingLimits(**limits), prices=TokenPrices(prompt=1.0, output=10.0))


def test_money_is_counted_and_limited() -> None:
    with FaultyServer(script(OK)) as server:
        it = limited(server, money=70e-6)
        found, usage = it.ask(f"{it.base}/x", {}, dict, deadline=Deadline(5.0), expected=Usage(1, 10, 0, 2))
        assert found["fine"]
        assert usage.money == pytest.approx((10 * 1.0 + 2 * 10.0) / 1e6)
        ask(it, expected=Usage(1, 10, 0, 2))
        with pytest.raises(BudgetExceeded, match="LLM_MAX_MONEY"):
            ask(it, expected=Usage(1, 10, 0, 2))
        assert it.ledger.spent.money == pytest.approx(60e-6)


def test_requests_side_by_side_cannot_overrun_a_limit_together() -> None:
    with FaultyServer(script(OK)) as server:
        it = limited(server, tokens=60)
        found = run_parallel([lambda: ask(it, expected=Usage(1, 10, 0, 2))] * 20, 8)
        assert sum(isinstance(r, dict) for r in found) == len(server.requests) == 5
        assert it.ledger.spent.prompt_tokens + it.ledger.spent.output_tokens == 60


class Clock:
    """A clock that is told the time."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_seconds_are_those_in_which_anything_was_under_way() -> None:
    clock = Clock()
    ledger = UsageLedger(clock)
    with ledger.reserve(Usage(), SpendingLimits()):
        clock.now += 1.0
        with ledger.reserve(Usage(), SpendingLimits()):
            clock.now += 2.0
        assert ledger.spent.seconds == 3.0
    clock.now += 50.0
    assert ledger.spent.seconds == 3.0
    with (
        pytest.raises(BudgetExceeded, match="LLM_MAX_SECONDS"),
        ledger.reserve(Usage(), SpendingLimits(seconds=3.0)),
    ):
        pass
    with ledger.reserve(Usage(), SpendingLimits(seconds=10.0)) as bill:
        assert bill.budget_s == 7.0


def test_the_budget_of_seconds_is_a_deadline_as_well() -> None:
    with FaultyServer(script(faults.stall)) as server:
        it = limited(server, seconds=0.3)
        started = time.monotonic()
        with pytest.raises(LLMError):
            ask(it, 20.0)
        assert time.monotonic() - started < 15.0
        with pytest.raises(BudgetExceeded):
            ask(it, 20.0)


@pytest.mark.parametrize(
    "usage",
    [
        None,
        [],
        {"prompt_tokens": -5, "completion_tokens": "2"},
        {"prompt_tokens": 1e400, "completion_tokens": True},
        {"prompt_tokens_details": 7},
    ],
)
def test_a_usage_that_cannot_be_is_replaced_by_what_was_expected(usage: Any) -> None:
    with FaultyServer(script(saying({"usage": usage}))) as server:
        it = client_of(server)
        ask(it, expected=Usage(1, 10, 0, 2))
        spent = it.ledger.spent
    assert (spent.prompt_tokens, spent.cached_tokens, spent.output_tokens) == (10, 0, 2)


@pytest.mark.parametrize(
    ("fault", "charged"),
    [(faults.stall_in_body, 10), (faults.truncate, 10), (faults.stall, 10), (ERROR, 0), (saying({}, 429), 0)],
)
def test_work_that_was_perhaps_done_is_charged(fault: Fault, charged: int) -> None:
    with FaultyServer(script(fault)) as server:
        it = client_of(server, attempts=1)
        with pytest.raises(LLMError):
            ask(it, 0.4, Usage(1, 10, 0, 2))
        assert it.ledger.spent.prompt_tokens == charged


def test_every_attempt_is_paid_for() -> None:
    with FaultyServer(script(faults.truncate, faults.truncate, OK)) as server:
        it = limited(server, tokens=36)
        ask(it, expected=Usage(1, 10, 0, 2))
        assert (it.ledger.spent.prompt_tokens, it.ledger.spent.output_tokens) == (30, 6)
        server.choose = script(faults.truncate)
        it = limited(server, tokens=24)
        with pytest.raises(BudgetExceeded, match="12 tokens, and 24 of 24"):
            ask(it, expected=Usage(1, 10, 0, 2))
        assert len(server.requests) == 5


# --- openai ---


def test_without_openai_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "forecast_integrations.models.http.request")
    monkeypatch.delattr("forecast_integrations.models.http.request")
    monkeypatch.setitem(sys.modules, "openai", None)
    with FaultyServer(script(OK)) as server:
        with pytest.raises(LLMError, match=r"openai.*pip install 'forecast-autotune\[llm\]'"):
            ask(client_of(server))
        assert server.requests == []
