"""One request by httpx: over in time in every phase, over the way and with the trust that are meant."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forecast_autotune.llm.backend import LLMError
from forecast_integrations.models.http import request
from forecast_integrations.models.http.limits import Deadline
from forecast_integrations.models.http.request import ConnectionFailed, HTTPResponse, send_request
from tests.integrations.models.faults import OK, saying, script
from tests.integrations.models.faulty_server import FaultyServer, Handler, ask, transport_to

KEY = "sk-test-0123456789abcdefghij"
CERTIFICATE = Path(__file__).with_name("localhost.pem")
"""For 127.0.0.1, signed by itself, with its key; valid until 2126:

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 -subj /CN=127.0.0.1 \\
    -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out certificate.pem
"""
LATE_S = 20.0
"""A machine under load may be late; what these servers do lasts until the end of the test."""

Conversation = Callable[[socket.socket, threading.Event], None]
"""What a server says on one connection; the event is set at the end of the test."""


@contextlib.contextmanager
def talking(conversation: Conversation) -> Iterator[int]:
    """A server of bytes, for what happens below HTTP; gives its port."""
    over = threading.Event()

    def serve(link: socket.socket) -> None:
        with link, contextlib.suppress(OSError):
            conversation(link, over)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                link, _ = listener.accept()
                threading.Thread(target=serve, args=(link,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)


def silent(link: socket.socket, over: threading.Event) -> None:
    over.wait()


def dripping_tls(link: socket.socket, over: threading.Event) -> None:
    """A handshake record of 16 KB, one byte at a time: every read of the client succeeds."""
    link.sendall(b"\x16\x03\x03\x40\x00")
    while not over.wait(0.02):
        link.sendall(b"\x02")


def stalling_tunnel(link: socket.socket, over: threading.Event) -> None:
    """A proxy that agrees to CONNECT and then passes nothing on."""
    link.recv(65536)
    link.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
    over.wait()


def refusing_tunnel(link: socket.socket, over: threading.Event) -> None:
    link.recv(65536)
    link.sendall(b"HTTP/1.1 407 Login\r\nContent-Length: 0\r\n\r\n")


def post(url: str, seconds: float = 10.0, **headers: str) -> HTTPResponse:
    return send_request("POST", url, b"{}", headers, Deadline(seconds))


def failure(url: str, seconds: float = 10.0, **headers: str) -> ConnectionFailed:
    """What a request that cannot succeed raises, at the latest with its deadline."""
    started = time.monotonic()
    with pytest.raises(ConnectionFailed) as caught:
        post(url, seconds, **headers)
    assert time.monotonic() - started < seconds + LATE_S
    return caught.value


def request_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("forecast-autotune-llm")]


# --- the deadline, where no reply has begun ---


@pytest.mark.parametrize("conversation", [silent, dripping_tls])
def test_the_deadline_holds_while_tls_is_set_up(conversation: Conversation) -> None:
    with talking(conversation) as port:
        error = failure(f"https://127.0.0.1:{port}/v1/x", 0.3)
        assert str(error) == "no answer within 0.3 s"
        assert not error.sent
        for thread in request_threads():
            thread.join(2.0)
            assert not thread.is_alive(), "the request goes on"


def test_the_deadline_holds_in_a_proxys_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(stalling_tunnel) as port:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        error = failure("https://far.example/v1/x", 0.3)
    assert str(error) == "no answer within 0.3 s"
    assert not error.sent, "the server has seen nothing of it"


def test_the_deadline_holds_while_nobody_accepts() -> None:
    """A full queue: the connection is never made."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as held:
        address = listener.getsockname()
        for _ in range(4):
            link = held.enter_context(socket.socket())
            link.setblocking(False)
            link.connect_ex(address)
        error = failure(f"http://127.0.0.1:{address[1]}/v1/x", 0.3)
    assert str(error) == "no answer within 0.3 s"


def test_the_deadline_holds_while_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def never(*_: Any, **__: Any) -> Any:
        over.wait(30.0)
        raise OSError("at last")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    error = failure("http://far.example/v1/x", 0.3)
    over.set()
    assert (str(error), error.sent) == ("no answer within 0.3 s", False)


# --- the way ---


def test_a_tunnel_that_is_refused_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with talking(refusing_tunnel) as port:
        monkeypatch.setenv("https_proxy", f"127.0.0.1:{port}")
        error = failure("https://far.example/v1/x")
    assert "407" in str(error)
    assert not error.sent


def test_a_proxy_of_no_use_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("ftp://me:pass-word@127.0.0.1", "http://me:pass-word@127.0.0.1:port"):
        monkeypatch.setenv("http_proxy", address)
        error = failure("http://far.example/v1/x")
        assert "http_proxy" in str(error)
        assert "pass-word" not in str(error)


def test_hosts_of_no_proxy_are_reached_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    far, near = (request.urlsplit(url) for url in ("http://far.example/v1", "http://near.example/v1"))
    monkeypatch.setenv("http_proxy", "proxy.example:3128")
    monkeypatch.setenv("no_proxy", "near.example")
    assert request.proxy_for(far) == "http://proxy.example:3128"
    assert request.proxy_for(near) == ""
    monkeypatch.delenv("http_proxy")
    monkeypatch.setenv("all_proxy", "http://proxy.example:3128")
    assert request.proxy_for(far) == ""


# --- trust ---


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
        url = f"{server.url.replace('http:', 'https:')}/x"
        error = failure(url, Authorization=f"Bearer {KEY}")
        assert str(error).startswith("the server's certificate is not trusted: self")
        assert not error.sent
        assert server.requests == [], "neither prompt nor key"
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        request._ssl_context.cache_clear()
        assert post(url).status == 200


# --- what is said ---


def test_the_key_is_neither_logged_nor_shown(caplog: pytest.LogCaptureFixture) -> None:
    def repeats_it(handler: Handler, reply: Any) -> None:
        handler.wfile.write(handler.headers["Authorization"].encode() * 100 + b"\r\n\r\n")

    for name in ("", "httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, name)
    with FaultyServer(script(OK, repeats_it)) as server:
        assert post(f"{server.url}/x", Authorization=f"Bearer {KEY}").status == 200
        error = failure(f"{server.url}/x", Authorization=f"Bearer {KEY}")
        assert [headers["Authorization"] for _, _, headers in server.requests] == [f"Bearer {KEY}"] * 2
    assert KEY[:12] not in f"{error!r} {error.__cause__!r} {error.__context__!r}"
    assert len(str(error)) < 400
    assert not caplog.records, "httpx logs what a server sends"


def test_what_others_do_with_httpx_is_logged_as_ever(caplog: pytest.LogCaptureFixture) -> None:
    import httpx

    caplog.set_level(logging.INFO, "httpx")
    with FaultyServer(script(OK)) as server:
        post(f"{server.url}/x")
        httpx.post(f"{server.url}/x", json={}, trust_env=False)
    assert [record.name for record in caplog.records] == ["httpx"]


def test_headers_have_names_in_lower_case() -> None:
    with FaultyServer(script(saying({}, 503, Retry_After="7"))) as server:
        reply = post(f"{server.url}/x")
    assert (reply.status, reply.headers["retry-after"], reply.body) == (503, "7", b"{}")


def test_a_compressed_reply_is_not_unpacked() -> None:
    """A few bytes may unpack to gigabytes, so none is asked for, and none is unpacked."""
    with FaultyServer(script(saying({}, Content_Encoding="gzip"))) as server:
        assert post(f"{server.url}/x").body == b"{}"
        ((_, _, headers),) = server.requests
    assert headers["Accept-Encoding"] == "identity"


# --- httpx ---


def test_without_httpx_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with FaultyServer(script(OK)) as server:
        with pytest.raises(LLMError, match=r"httpx.*pip install 'forecast-autotune\[llm\]'") as caught:
            ask(transport_to(server))
        assert "attempts" not in str(caught.value), "trying again is in vain"
        assert server.requests == []


def test_httpx_is_loaded_when_a_server_is_asked() -> None:
    program = (
        "import sys\nfrom forecast_integrations.models.factory import backend\n"
        "it = backend('http://127.0.0.1:9/v1?model=m', cached=False)\nprint('httpx' in sys.modules)\n"
        "try: it.forecast('a', ['b'], [], timeout_s=5.0)\nexcept Exception: pass\nprint('httpx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
