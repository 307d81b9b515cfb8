"""JSON requests to a server: retried, bounded in time, number and cost, and never showing the key."""

from __future__ import annotations

import contextlib
import email.utils
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from forecast_autotune.llm.backend import LLMError, Usage
from forecast_autotune.llm.replies import InvalidResponse
from forecast_integrations.models.http.key_echo import repeats_key
from forecast_integrations.models.http.limits import (
    USAGE_LEDGER,
    CircuitBreaker,
    Deadline,
    SpendingLimits,
    TokenPrices,
    UsageLedger,
    breaker,
)
from forecast_integrations.models.http.refusals import body_text, named_fields, refusal_text
from forecast_integrations.models.http.request import (
    ConnectionFailed,
    HTTPResponse,
    api_key_for,
    send_request,
)

T = TypeVar("T")

MAX_ATTEMPTS = 4
"""Most attempts at one request."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 8.0
"""Pause before the second attempt, doubled before each further one up to the longest."""
MAX_REDIRECTS = 3
_RETRYABLE_STATUSES = frozenset({408, 409, 425, 429})
_CLIENT_ERROR_STATUSES = frozenset({400, 404, 405, 413, 414, 415, 422, 501})
"""Answers of a healthy server to a request it does not like."""
_MOST_TOKENS = 10**8
"""Of one request; a server that says more is not believed."""
_NO_USAGE = Usage()
MALFORMED_ERRORS = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What reading a reply of another shape runs into."""


class RequestRejected(LLMError):
    """The server answered with an error that asking again will not change."""

    def __init__(self, text: str, status: int, fields: frozenset[str] = frozenset()) -> None:
        super().__init__(text)
        self.status = status
        self.fields = fields
        """Which of `refusals.FIELDS` it named."""


class _RetryableError(Exception):
    """One attempt failed; the next may not."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s
        """What the server asked us to wait."""


class Transport:
    """Requests to one server. Safe to share between threads.

    Args:
        url: where the API starts, with its version: `http://127.0.0.1:8000/v1`.
        concurrency: most requests under way at a time.
        attempts: most attempts at one request.
        prices: money per million tokens, for usage and the money limit.
        limits: what this process may spend; see `UsageLedger`.
        shared_breaker: by default the process's breaker for this server.
        ledger: by default the process's.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 8,
        attempts: int = MAX_ATTEMPTS,
        prices: TokenPrices | None = None,
        limits: SpendingLimits | None = None,
        shared_breaker: CircuitBreaker | None = None,
        ledger: UsageLedger = USAGE_LEDGER,
    ) -> None:
        parts = urlsplit(url)
        self.host = parts.netloc
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.base = self.origin + (parts.path.rstrip("/") or "/v1")
        self.concurrency = concurrency
        self.attempts = attempts
        self.prices = prices or TokenPrices()
        self.limits = limits or SpendingLimits()
        self.breaker = shared_breaker or breaker(self.origin)
        self.ledger = ledger
        self._slots = threading.BoundedSemaphore(concurrency)
        # Only spreads retries of many processes over time, so it needs no seed.
        self._chance = random.Random()

    def __repr__(self) -> str:
        return f"Transport({self.base})"

    @property
    def root(self) -> str:
        """Where a vLLM server keeps what is not part of OpenAI's API."""
        return self.base.removesuffix("/v1")

    def ask(
        self,
        url: str,
        body: Mapping[str, object],
        read: Callable[[Any], T],
        *,
        deadline: Deadline,
        expected: Usage = _NO_USAGE,
    ) -> tuple[T, Usage]:
        """POST `body` as JSON; returns what `read` makes of the reply, and what it cost.

        Connection errors, replies that are cut off, no JSON or that `read` cannot use (it raises
        `InvalidResponse`, or fails as on another shape), and the statuses 408, 409, 425, 429 and 5xx are retried
        within `deadline`, after a jittered, doubling pause or what Retry-After says. `expected` is
        reserved of the budget, and charged where the reply does not say what was used.

        Raises `LLMError`, of which `RequestRejected` carries the server's status. No message holds a word of the
        server's, which may repeat the key, and a text that repeats it is none that `read` can use.
        """
        payload = json.dumps(body, allow_nan=False).encode()
        for attempt in range(1, self.attempts + 1):
            try:
                return self._attempt(url, payload, read, deadline, expected)
            except _RetryableError as failure:
                wait = failure.wait_s
                if wait is None:
                    longest = min(FIRST_WAIT_S * 2 ** (attempt - 1), LONGEST_WAIT_S)
                    wait = longest * self._chance.uniform(0.5, 1.0)
                if attempt == self.attempts or wait >= deadline.remaining_s:
                    tried = "" if attempt == 1 else f" after {attempt} attempts"
                    raise LLMError(f"{self.base}: {failure}{tried}") from None
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(
        self, url: str, payload: bytes, read: Callable[[Any], T], deadline: Deadline, expected: Usage
    ) -> tuple[T, Usage]:
        expected = self.prices.of(expected)
        with self._slot(deadline), self.ledger.reserve(expected, self.limits) as bill:
            self.breaker.admit()
            started = time.monotonic()
            try:
                reply = self._send(url, payload, deadline.capped_at(bill.budget_s))
                if not 200 <= reply.status < 300:
                    raise self._refusal(reply)
                # From here on the work was done, whatever the reply looks like.
                bill.cost = expected
                data = _parse_json(reply)
                bill.cost = usage = self.prices.of(_usage(data, expected))
                found = _read_reply(read, data)
                if isinstance(found, str) and repeats_key(found, api_key_for(urlsplit(self.base))):
                    raise InvalidResponse("a text that repeats the key")
            except (ConnectionFailed, InvalidResponse) as error:
                if isinstance(error, ConnectionFailed) and error.sent:
                    bill.cost = expected
                self.breaker.failed(str(error))
                raise _RetryableError(str(error)) from None
            except _RetryableError as failure:
                self.breaker.failed(str(failure))
                raise
            except RequestRejected as error:
                if error.status in _CLIENT_ERROR_STATUSES:
                    self.breaker.succeeded()
                else:
                    self.breaker.failed(str(error))
                raise
            except BaseException:
                self.breaker.cancelled()
                raise
            self.breaker.succeeded()
        return found, replace(usage, seconds=time.monotonic() - started)

    @contextmanager
    def _slot(self, deadline: Deadline) -> Iterator[None]:
        if not self._slots.acquire(timeout=deadline.remaining_s):
            raise LLMError(
                f"{self.base}: {self.concurrency} requests were under way for all of {deadline.seconds:.3g} s"
            )
        try:
            yield
        finally:
            self._slots.release()

    def _send(self, url: str, payload: bytes, deadline: Deadline) -> HTTPResponse:
        """POST, following redirects within the server: elsewhere neither key nor prompt is sent."""
        headers = {"Content-Type": "application/json"}
        if key := api_key_for(urlsplit(url)):
            headers["Authorization"] = f"Bearer {key}"
        for _ in range(MAX_REDIRECTS + 1):
            reply = send_request("POST", url, payload, headers, deadline)
            if not 300 <= reply.status < 400:
                return reply
            where = reply.headers.get("location", "")
            try:
                url = urljoin(url, where)
            except ValueError:
                url = ""
            if not url.startswith(self.origin + "/") or reply.status not in (307, 308):
                raise RequestRejected(
                    f"{self.base}: HTTP {reply.status} to {'elsewhere' if where else 'nowhere'}, and only redirects "
                    "(307, 308) within the server are followed: give the address that answers",
                    reply.status,
                )
        raise RequestRejected(f"{self.base}: redirects more than {MAX_REDIRECTS} times", 310)

    def _refusal(self, reply: HTTPResponse) -> Exception:
        text = refusal_text(reply)
        if reply.status in _RETRYABLE_STATUSES or (
            reply.status >= 500 and reply.status not in _CLIENT_ERROR_STATUSES
        ):
            return _RetryableError(text, _retry_after(reply.headers.get("retry-after", "")))
        if reply.status in (401, 403):
            text += " (the key comes from FORECAST_AUTOTUNE_LLM_KEY, else OPENAI_API_KEY)"
        return RequestRejected(f"{self.base}: {text}", reply.status, named_fields(reply))


def _reject_constant(_: str) -> None:
    """NaN and infinity are no JSON, yet some servers send them: they become null, which no reader takes."""


_decode = json.JSONDecoder(parse_constant=_reject_constant).decode


def _parse_json(reply: HTTPResponse) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return _decode(reply.body.decode("utf-8"))
    # Out here it has no context: a decoding error holds the whole text.
    raise InvalidResponse(f"{body_text(reply)} that are not JSON")


def _read_reply(read: Callable[[Any], T], data: Any) -> T:
    try:
        return read(data)
    except MALFORMED_ERRORS as error:
        kind = type(error).__name__
    # Out here it has no context: such an error may hold what the server sent.
    raise InvalidResponse(f"a reply of another shape ({kind})")


def _usage(data: object, expected: Usage) -> Usage:
    """What a reply says was used; what it does not say, or says wrongly, is taken as expected."""
    said = data.get("usage") if isinstance(data, dict) else None
    if not isinstance(said, dict):
        return expected

    def count(fallback: int, value: object) -> int:
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS
        return value if whole and isinstance(value, int) else fallback

    details = said.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt = count(expected.prompt_tokens, said.get("prompt_tokens", said.get("input_tokens")))
    output = count(expected.output_tokens, said.get("completion_tokens", said.get("output_tokens")))
    return Usage(1, prompt, min(count(0, cached), prompt), output)


def _retry_after(text: str) -> float | None:
    """Seconds to wait, from a number or a date; None where the header says nothing usable."""
    try:
        wait = float(text)
    except ValueError:
        try:
            wait = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return wait if 0 <= wait < float("inf") else None
