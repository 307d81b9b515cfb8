"""One HTTP request that is over when its deadline is, whatever the server does; standard library only.

A socket's own timeout starts anew with every byte, and a name server's answer has none at all. So the
request runs in a thread of its own, and when time is up its connection is shut down under it.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import ipaddress
import os
import re
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import SplitResult, unquote, urlsplit

from forecast_autotune.llm.backend import LLMError
from forecast_integrations.models.http.limits import Deadline

LARGEST = 16 * 2**20
"""Most bytes of a reply that are read."""
_CHUNK_BYTES = 2**16
_KEY_PATTERN = re.compile(r"[\x21-\x7e]+")


class ConnectionFailed(LLMError):
    """The connection failed, or the reply did not arrive whole; asking again may help."""

    def __init__(self, text: str, *, sent: bool) -> None:
        super().__init__(text)
        self.sent = sent
        """Whether the server may have done, and charged for, the work."""


@dataclass(frozen=True)
class HTTPResponse:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


def send_request(
    method: str, url: str, body: bytes | None, headers: Mapping[str, str], deadline: Deadline
) -> HTTPResponse:
    """Send one request and read its reply; redirects are not followed.

    Raises `ConnectionFailed` when the server cannot be reached, its reply is cut off or larger than `LARGEST`, or
    `deadline` passes; this returns within some 50 ms of it even then.
    """
    job = _PendingRequest(method, urlsplit(url), body, headers, deadline)
    thread = threading.Thread(target=job.run, name="forecast-autotune-llm", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ConnectionFailed(f"no thread could be started for a request: {error}", sent=False) from error
    if not job.done.wait(deadline.remaining_s):
        job.abandon()
        # Normally over at once; only a name server can hold it up for longer.
        thread.join(0.05)
        raise ConnectionFailed(f"no answer within {deadline.seconds:.3g} s", sent=job.sent)
    if job.reply is None:
        raise ConnectionFailed(job.trouble, sent=job.sent)
    return job.reply


@dataclass
class _PendingRequest:
    """One request, made by its own thread."""

    method: str
    url: SplitResult
    body: bytes | None
    headers: Mapping[str, str] = field(repr=False)
    deadline: Deadline
    done: threading.Event = field(default_factory=threading.Event)
    reply: HTTPResponse | None = None
    trouble: str = ""
    sent: bool = False
    _socket: socket.socket | None = None
    """Kept here: the connection forgets it as soon as the reply says that it will be closed."""
    _abandoned: bool = False

    def run(self) -> None:
        """Make the request; leaves a reply or what went wrong."""
        try:
            self.reply = self._exchange()
        except _InvalidReply as error:
            self.trouble = str(error)
        except ssl.SSLCertVerificationError as error:
            self.trouble = f"the server's certificate is not trusted: {error.verify_message}"
        except (OSError, http.client.HTTPException) as error:
            self.trouble = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        except Exception as error:
            # A server may send what the standard library did not expect; its text is not worth trusting.
            self.trouble = f"the reply is not HTTP ({type(error).__name__})"
        finally:
            self.done.set()

    def abandon(self) -> None:
        """Wake the thread out of whatever it waits for on the network."""
        self._abandoned = True
        if self._socket is not None:
            # Closed already is fine. Not an SSL socket's own method: it would take the session from
            # under the reader.
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _exchange(self) -> HTTPResponse:
        link, target, more = open_connection(self.url, max(self.deadline.remaining_s, 0.001))
        with contextlib.closing(link):
            link.connect()
            self._socket = link.sock
            if self._abandoned:
                raise _InvalidReply("the time was up before the connection stood")
            self.sent = True
            link.request(self.method, target, self.body, {**self.headers, **more})
            with contextlib.closing(link.getresponse()) as response:
                body = _read_body(response)
                headers = {name.lower(): value for name, value in response.getheaders()}
                return HTTPResponse(response.status, headers, body)


def _read_body(response: http.client.HTTPResponse) -> bytes:
    declared = response.length
    if declared is not None and declared > LARGEST:
        raise _InvalidReply(f"the reply has {declared} bytes, and at most {LARGEST} are read")
    parts: list[bytes] = []
    size = 0
    while part := response.read(_CHUNK_BYTES):
        size += len(part)
        if size > LARGEST:
            raise _InvalidReply(f"the reply has more than {LARGEST} bytes")
        parts.append(part)
    if response.length:  # read(n) does not say that the server stopped early
        raise _InvalidReply(f"the reply ends {response.length} bytes early")
    return b"".join(parts)


class _InvalidReply(Exception):
    """A reply that is of no use."""


# --- where to, and with which key ---


def is_local_host(host: str) -> bool:
    """Whether a host name means this machine."""
    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def open_connection(
    url: SplitResult, timeout_s: float
) -> tuple[http.client.HTTPConnection, str, dict[str, str]]:
    """An unconnected connection, the request target, and headers for a proxy in between.

    Proxies come from the usual variables (https_proxy, http_proxy, no_proxy), never for this machine.
    """
    from urllib.request import getproxies, proxy_bypass

    host = url.hostname or ""
    secure = url.scheme == "https"
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    proxy = getproxies().get(url.scheme, "")
    if not proxy or is_local_host(host) or proxy_bypass(host):
        if secure:
            return (
                http.client.HTTPSConnection(host, url.port, timeout=timeout_s, context=_ssl_context()),
                target,
                {},
            )
        return http.client.HTTPConnection(host, url.port, timeout=timeout_s), target, {}
    via = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    more: dict[str, str] = {}
    if via.username is not None:
        login = f"{unquote(via.username)}:{unquote(via.password or '')}".encode()
        more["Proxy-Authorization"] = "Basic " + base64.b64encode(login).decode()
    if not secure:
        through = http.client.HTTPConnection(via.hostname or "", via.port or 80, timeout=timeout_s)
        return through, f"{url.scheme}://{url.netloc}{target}", more
    tunnel = http.client.HTTPSConnection(
        via.hostname or "", via.port or 80, timeout=timeout_s, context=_ssl_context()
    )
    tunnel.set_tunnel(host, url.port or 443, more)
    return tunnel, target, {}


@cache
def _ssl_context() -> ssl.SSLContext:
    """The certificates that this machine trusts; reading them takes longer than a request."""
    return ssl.create_default_context()


def api_key_for(url: SplitResult) -> str:
    """The key to send to a server: FORECAST_AUTOTUNE_LLM_KEY, else OPENAI_API_KEY; empty without one.

    OPENAI_API_KEY is not meant for any server in particular, so it is not sent to another machine in the
    clear. Read for every request and kept nowhere. Raises `LLMError` for a key that no header can hold.
    """
    name, key = "FORECAST_AUTOTUNE_LLM_KEY", os.environ.get("FORECAST_AUTOTUNE_LLM_KEY", "").strip()
    if not key and (url.scheme == "https" or is_local_host(url.hostname or "")):
        name, key = "OPENAI_API_KEY", os.environ.get("OPENAI_API_KEY", "").strip()
    if key and not _KEY_PATTERN.fullmatch(key):
        raise LLMError(f"the key in {name} has spaces or characters beyond ASCII: set it anew, by itself")
    return key
