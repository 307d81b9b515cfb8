"""One request by the `openai` client that is over when its deadline is, whatever the server does.

The client limits each connect, read and write by itself, so a byte now and then would hold a request up for ever. It
runs in an event loop of its own thread, where the deadline cancels whatever it waits for. Importing this module takes
half a second, so it is imported when a model is asked.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import httpx2
import openai

from forecast_autotune.llm.backend import LLMError, Usage
from forecast_integrations.models.http.keys import api_key_for, is_local_host, shown_text
from forecast_integrations.models.http.limits import ConnectionFailed, Deadline, RequestCost

LARGEST = 16 * 2**20
"""Most bytes of a reply that are read."""
_HEADERS = {
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": "forecast-autotune",
}


@dataclass(frozen=True)
class HTTPResponse:
    """A server's last reply."""

    status: int
    body: bytes = field(repr=False)
    retry_after: str = ""


class Attempts:
    """The attempts at one request, and their costs.

    Each is charged as expected that was sent and did not end in an error's status.

    Args:
        expected: cost of one.
        reserve: takes the budget of another one.
    """

    def __init__(self, expected: Usage, reserve: Callable[[], RequestCost]) -> None:
        self._expected, self._reserve = expected, reserve
        self.bill = reserve()
        """That of the latest attempt."""
        self.count = 0
        self.status = 0
        """The latest error's."""

    async def on_request(self, request: httpx2.Request) -> None:
        """Called by the client before each attempt. Raises `BudgetExceeded` for one that may cost too much."""
        if self.count:
            self.bill = self._reserve()
        self.count += 1
        request.extensions["trace"] = self._trace

    async def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        # CONNECT goes to a proxy only.
        if event == "http11.send_request_headers.started" and info["request"].method != b"CONNECT":
            self.bill.cost = self._expected

    async def on_response(self, response: httpx2.Response) -> None:
        """Called by the client for the head of each reply."""
        if not response.is_success:
            self.bill.cost, self.status = Usage(), response.status_code
        if (
            "content-encoding" in response.headers
        ):  # none was asked for, and few bytes may unpack to gigabytes
            del response.headers["content-encoding"]
        response.stream = _LimitedStream(response.stream)


class _LimitedStream(httpx2.AsyncByteStream):
    """A reply's body, of which at most `LARGEST` bytes are read."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._stream:
            size += len(part)
            if size > LARGEST:
                raise ConnectionFailed(
                    f"the reply has more than {LARGEST} bytes, and at most {LARGEST} are read"
                )
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


def send_request(
    method: str, url: str, body: bytes | None, *, deadline: Deadline, retries: int, attempts: Attempts
) -> HTTPResponse:
    """Send a request and read its reply, by the deadline and within the budget's seconds; redirects are not followed.

    The client tries again what may pass: connections that fail, replies that are cut off, and the statuses 408, 409,
    429 and 5xx, after a pause that doubles or what Retry-After says. Raises `ConnectionFailed` when the server
    cannot be reached, its reply is cut off or larger than `LARGEST`, or the time is up, and `BudgetExceeded` for an
    attempt that may cost too much; no message holds the key.
    """
    budget_s = attempts.bill.budget_s
    exchange = _exchange(method, url, body, min(deadline.remaining_s, budget_s), retries, attempts)
    future = asyncio.run_coroutine_threadsafe(exchange, _event_loop(os.getpid()))
    try:
        return future.result()
    except TimeoutError:
        trouble = f"no answer within {min(deadline.seconds, budget_s):.3g} s"
        if attempts.status:
            trouble += f", the latest was HTTP {attempts.status}"
    except LLMError:
        raise
    except Exception as error:
        trouble = _description(error, url)
    finally:
        future.cancel()
    attempts_text = "" if attempts.count < 2 else f" after {attempts.count} attempts"
    # Out here it has no context: an error may hold what the server sent.
    raise ConnectionFailed(trouble + attempts_text)


@cache
def _event_loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of a process: a forked child has none of its parent's threads."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def _exchange(
    method: str, url: str, body: bytes | None, seconds: float, retries: int, attempts: Attempts
) -> HTTPResponse:
    address = urlsplit(url)
    key = api_key_for(address)
    headers = {**_HEADERS, "Authorization": f"Bearer {key}" if key else openai.Omit()}
    async with asyncio.timeout(seconds):
        # Requests to this machine go through no proxy.
        connections = httpx2.AsyncClient(
            verify=_ssl_context(),
            trust_env=not is_local_host(address.hostname or ""),
            event_hooks={"request": [attempts.on_request], "response": [attempts.on_response]},
        )
        async with openai.AsyncOpenAI(
            api_key="sent by each request", max_retries=retries, timeout=seconds, http_client=connections
        ) as client:
            send = client.post if method == "POST" else client.get
            content = {"content": body} if body is not None else {}
            try:
                reply = await send(url, cast_to=httpx2.Response, options={"headers": headers}, **content)
            except openai.APIStatusError as error:
                reply = error.response
            return HTTPResponse(reply.status_code, reply.content, reply.headers.get("retry-after", ""))


@cache
def _ssl_context() -> ssl.SSLContext:
    """The certificates that this machine trusts; reading them takes longer than a request."""
    return ssl.create_default_context()


# --- what went wrong ---


def _description(error: BaseException, url: str) -> str:
    """The failure on one line: what lies deepest, without the key or a proxy's password."""
    if isinstance(error, ValueError | ImportError | httpx2.InvalidURL):
        proxy = f"{urlsplit(url).scheme}_proxy"
        return f"the request cannot be sent ({type(error).__name__}): correct the address, or {proxy}"
    *_, cause = _causes(error)
    return shown_text(f"{type(cause).__name__}: {cause}", url)


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        inner = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else None
        cause = inner or cause.__cause__ or cause.__context__
