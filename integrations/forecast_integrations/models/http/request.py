"""One HTTP request by httpx that is over when its deadline is, whatever the server does.

httpx limits each connect, read and write by itself, so a byte now and then holds a request up for ever, and
a name server's answer has no limit at all. So the request runs in a thread of its own, and when time is up
its connection is shut down under it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from forecast_autotune.llm.backend import LLMError
from forecast_integrations.models.http.limits import Deadline

if TYPE_CHECKING:
    import httpx

LARGEST = 16 * 2**20
"""Most bytes of a reply that are read."""
_CHUNK_BYTES = 2**16
_USED_HEADERS = ("content-type", "location", "retry-after")
_PROXY_STATUS = re.compile(r"[1-5][0-9]{2}(?= )")
_SSL_REASON = re.compile(r"[A-Z0-9_]{1,64}")
_THREAD_NAME = "forecast-autotune-llm"
_LOGGERS = ("httpx", "httpcore.connection", "httpcore.http11", "httpcore.proxy")
_KEY_PATTERN = re.compile(r"[\x21-\x7e]+")
_DEFAULT_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",  # the body is read as it comes, without decompressing it
    "Connection": "close",
    "User-Agent": "forecast-autotune",
}


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
    headers: Mapping[str, str] = field(repr=False)
    """Those that are used, with names in lower case."""
    body: bytes = field(repr=False)


def send_request(
    method: str, url: str, body: bytes | None, headers: Mapping[str, str], deadline: Deadline
) -> HTTPResponse:
    """Send one request and read its reply; redirects are not followed.

    Raises `ConnectionFailed` when the server cannot be reached, its reply is cut off or larger than `LARGEST`, or
    `deadline` passes; this returns within some 50 ms of it even then. Raises `LLMError` without httpx.
    """
    _prepare_httpx()
    job = _PendingRequest(method, url, body, {**_DEFAULT_HEADERS, **headers}, deadline)
    thread = threading.Thread(target=job.run, name=_THREAD_NAME, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ConnectionFailed(f"no thread could be started for a request: {error}", sent=False) from error
    if not job.done.wait(deadline.remaining_s):
        job.abandon()
        # Normally over at once; only a name server can hold it up for longer.
        thread.join(0.05)
        raise ConnectionFailed(job.timeout_text, sent=job.sent)
    if job.reply is None:
        raise ConnectionFailed(job.trouble, sent=job.sent)
    return job.reply


def _prepare_httpx() -> None:
    try:
        import httpx  # noqa: F401
    except ImportError as error:
        raise LLMError(
            f"a server is asked with httpx, which cannot be imported ({error}): "
            "pip install 'forecast-autotune[llm]'"
        ) from error
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_logged_elsewhere)  # once, however often it is added


def _logged_elsewhere(record: logging.LogRecord) -> bool:
    """Keep what httpx logs of our requests out of the log: it holds what a server sent, perhaps the key."""
    return threading.current_thread().name != _THREAD_NAME


@dataclass
class _PendingRequest:
    """One request, made by its own thread."""

    method: str
    url: str
    body: bytes | None
    headers: Mapping[str, str] = field(repr=False)
    deadline: Deadline
    done: threading.Event = field(default_factory=threading.Event)
    reply: HTTPResponse | None = None
    trouble: str = ""
    sent: bool = False
    _mutex: threading.Lock = field(default_factory=threading.Lock)
    _socket: socket.socket | None = None
    """A duplicate of the connection's: it stays valid when TLS takes the original over."""
    _abandoned: bool = False

    @property
    def timeout_text(self) -> str:
        """The error of a request whose time is up."""
        return f"no answer within {self.deadline.seconds:.3g} s"

    def run(self) -> None:
        """Make the request; leaves a reply or what went wrong."""
        try:
            self.reply = self._exchange()
        except Exception as error:
            self.trouble = self._describe(error)
        finally:
            with self._mutex:
                if self._socket is not None:
                    self._socket.close()
                    self._socket = None
            self.done.set()

    def abandon(self) -> None:
        """Wake the thread out of whatever it waits for on the network."""
        with self._mutex:
            self._abandoned = True
            self._shut_down()

    def _shut_down(self) -> None:
        # Closing it would not wake a thread that reads from it. Closed already is fine.
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _exchange(self) -> HTTPResponse:
        with (
            _open_client(urlsplit(self.url), max(self.deadline.remaining_s, 0.001)) as client,
            client.stream(
                self.method,
                self.url,
                content=self.body,
                headers=self.headers,
                follow_redirects=False,
                extensions={"trace": self._trace},
            ) as response,
        ):
            return HTTPResponse(response.status_code, _used_headers(response), _read_body(response))

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Told by httpx of every step of the request."""
        if event == "connection.connect_tcp.complete":
            with self._mutex:
                self._socket = info["return_value"].get_extra_info("socket").dup()
                if self._abandoned:
                    self._shut_down()
        elif event == "http11.send_request_headers.started":
            # CONNECT goes to a proxy only.
            self.sent = self.sent or info["request"].method != b"CONNECT"

    def _describe(self, error: Exception) -> str:
        """What went wrong, on one line and without a word of the server's, which may have repeated the key."""
        import httpx

        if isinstance(error, _InvalidReply):
            return str(error)
        if isinstance(error, httpx.TimeoutException):
            return self.timeout_text
        for cause in _causes(error):
            if isinstance(cause, ssl.SSLCertVerificationError):
                return f"the server's certificate is not trusted: {cause.verify_message}"
        if not isinstance(error, httpx.HTTPError | httpx.InvalidURL | OSError):
            # A server may send what httpx did not expect; the text of that is not worth trusting.
            return f"the reply is not HTTP ({type(error).__name__})"
        reason = next(filter(None, map(_system_reason, _causes(error))), "")
        return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _system_reason(error: BaseException) -> str:
    """What the operating system or OpenSSL says, in their fixed words; empty for other errors."""
    if isinstance(error, ssl.SSLError):
        return f"SSL {error.reason}" if _SSL_REASON.fullmatch(error.reason or "") else "SSL"
    if isinstance(error, socket.gaierror):
        return f"the host's name cannot be looked up ({error.strerror})"
    if isinstance(error, OSError) and error.errno is not None:
        return os.strerror(error.errno)
    status = _PROXY_STATUS.match(str(error)) if type(error).__name__ == "ProxyError" else None
    return "" if status is None else f"the proxy answers HTTP {status[0]}"


def _used_headers(response: httpx.Response) -> dict[str, str]:
    return {name: response.headers[name] for name in _USED_HEADERS if name in response.headers}


def _read_body(response: httpx.Response) -> bytes:
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > LARGEST:
        raise _InvalidReply(f"the reply has more than {LARGEST} bytes, and at most {LARGEST} are read")
    parts: list[bytes] = []
    size = 0
    for part in response.iter_raw(_CHUNK_BYTES):
        size += len(part)
        if size > LARGEST:
            raise _InvalidReply(f"the reply has more than {LARGEST} bytes, and at most {LARGEST} are read")
        parts.append(part)
    return b"".join(parts)


class _InvalidReply(Exception):
    """A reply that is of no use."""


# --- by which way ---


def _open_client(url: SplitResult, timeout_s: float) -> httpx.Client:
    """A client for one request; nothing is connected yet. Raises `_InvalidReply` for a proxy of no use.

    It takes nothing from the environment by itself (`trust_env`): httpx would send requests to this machine
    through a proxy, and trust a list of certificates of its own instead of this machine's.
    """
    import httpx

    try:
        proxy = httpx.Proxy(address) if (address := proxy_for(url)) else None
        if proxy is not None and proxy.url.scheme == "https":
            proxy.ssl_context = _ssl_context()
        return httpx.Client(verify=_ssl_context(), proxy=proxy, trust_env=False, timeout=timeout_s)
    except (ValueError, ImportError, httpx.InvalidURL) as error:
        raise _InvalidReply(f"the proxy that {url.scheme}_proxy names cannot be used: {error}") from None


def proxy_for(url: SplitResult) -> str:
    """The address of the proxy on the way to a server; empty without one.

    Proxies come from the usual variables (https_proxy, http_proxy, no_proxy), never for this machine.
    """
    from urllib.request import getproxies, proxy_bypass

    host = url.hostname or ""
    proxy = getproxies().get(url.scheme, "")
    if not proxy or is_local_host(host) or proxy_bypass(host):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def is_local_host(host: str) -> bool:
    """Whether a host name means this machine."""
    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@cache
def _ssl_context() -> ssl.SSLContext:
    """The certificates that this machine trusts; reading them takes longer than a request."""
    return ssl.create_default_context()


# --- with which key ---


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
