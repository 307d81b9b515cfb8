"""JSON requests to a server: bounded in time, number and cost, and never showing the key."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from forecast_autotune.llm.backend import LLMError, Usage
from forecast_autotune.llm.replies import InvalidResponse
from forecast_integrations.models.http.keys import repeats_key, shown_text
from forecast_integrations.models.http.limits import (
    USAGE_LEDGER,
    ConnectionFailed,
    Deadline,
    SpendingLimits,
    TokenPrices,
    UsageLedger,
)

if TYPE_CHECKING:
    from forecast_integrations.models.http.request import HTTPResponse

T = TypeVar("T")

MAX_ATTEMPTS = 4
"""Most attempts at one request."""
MAX_FAILURES, PAUSE_S = 5, 15.0
"""After so many failed requests in a row a server is left alone for so long."""
FIELDS = (
    "response_format",
    "json_schema",
    "schema",
    "max_completion_tokens",
    "max_tokens",
    "temperature",
    "reasoning_effort",
    "logprobs",
)
"""Fields of a request that a server may complain of by name."""
_SEARCHED_BYTES = 2**16
_PASSING_STATUSES = frozenset({408, 409, 429})
_MOST_TOKENS = 10**8
"""Most tokens of one request; a server that states more is not believed."""
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
"""Errors of reading a reply of another shape."""
_FAILURES: dict[str, tuple[int, float]] = {}
"""Servers of this process that failed: how often in a row, and when the last time was."""


class RequestRejected(LLMError):
    """The server answered with an error's status."""

    def __init__(self, text: str, status: int, fields: frozenset[str] = frozenset()) -> None:
        super().__init__(text)
        self.status = status
        self.fields = fields
        """Those of `FIELDS` that it named."""


class ServerClient:
    """Requests to one server. Safe to share between threads.

    Args:
        url: where the API starts, with its version: `http://127.0.0.1:8000/v1`.
        concurrency: most requests under way at a time.
        attempts: most attempts at one request.
        prices: money per million tokens, for usage and the money limit.
        limits: what this process may spend; see `UsageLedger`.
        ledger: by default the process's.
        failures: failed requests in a row after which the server is left alone for a while.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 8,
        attempts: int = MAX_ATTEMPTS,
        prices: TokenPrices | None = None,
        limits: SpendingLimits | None = None,
        ledger: UsageLedger = USAGE_LEDGER,
        failures: int = MAX_FAILURES,
    ) -> None:
        parts = urlsplit(url)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.base = self.origin + (parts.path.rstrip("/") or "/v1")
        self.concurrency = concurrency
        self.attempts = attempts
        self.prices = prices or TokenPrices()
        self.limits = limits or SpendingLimits()
        self.ledger = ledger
        self._most_failures = failures
        self._slots = threading.BoundedSemaphore(concurrency)

    def __repr__(self) -> str:
        return f"ServerClient({self.base})"

    @property
    def root(self) -> str:
        """Where a vLLM server keeps what is not part of OpenAI's API."""
        return self.base.removesuffix("/v1")

    def ask(
        self,
        url: str,
        body: Mapping[str, object] | None,
        read: Callable[[Any], T],
        *,
        deadline: Deadline,
        expected: Usage = _NO_USAGE,
    ) -> tuple[T, Usage]:
        """POST `body` as JSON (GET without one); returns what `read` makes of the reply, and what it cost.

        The `openai` client tries again what may pass, within `deadline`. A reply that is no JSON, or that `read`
        cannot use (it raises `InvalidResponse`, or fails as on another shape), is asked for once more. `expected` is
        reserved of the budget for every attempt, and charged where the reply does not say what was used.

        Raises `LLMError`, of which `RequestRejected` carries the server's status. No message holds the key, and a text
        that repeats it is none that `read` can use.
        """
        payload = None if body is None else json.dumps(body, allow_nan=False).encode()
        expected = self.prices.of(expected)
        trouble = ""
        for _ in range(min(self.attempts, 2)):
            failures, since = _FAILURES.get(self.origin, (0, 0.0))
            if failures >= self._most_failures and (wait := since + PAUSE_S - time.monotonic()) > 0:
                raise LLMError(
                    f"{self.origin} failed {failures} times in a row: it is tried again in {wait:.0f} s"
                )
            try:
                answer = self._ask_once(url, payload, read, deadline, expected)
            except (ConnectionFailed, InvalidResponse) as error:
                trouble, again = str(error), isinstance(error, InvalidResponse)
            except RequestRejected as error:
                if _is_passing(error.status):
                    _FAILURES[self.origin] = failures + 1, time.monotonic()
                raise
            else:
                _FAILURES.pop(self.origin, None)
                return answer
            _FAILURES[self.origin] = failures + 1, time.monotonic()
            if not again:
                break
        raise LLMError(f"{self.base}: {trouble}")

    def _ask_once(
        self, url: str, payload: bytes | None, read: Callable[[Any], T], deadline: Deadline, expected: Usage
    ) -> tuple[T, Usage]:
        with self._slot(deadline), contextlib.ExitStack() as stack:
            request = _request_module()
            attempts = request.Attempts(
                expected, lambda: stack.enter_context(self.ledger.reserve(expected, self.limits))
            )
            started = time.monotonic()
            reply = request.send_request(
                "GET" if payload is None else "POST",
                url,
                payload,
                deadline=deadline,
                retries=self.attempts - 1,
                attempts=attempts,
            )
            if not 200 <= reply.status < 300:
                raise RequestRejected(
                    f"{self.base}: {_refusal_text(reply, attempts.count, url)}",
                    reply.status,
                    _named_fields(reply),
                )
            data = _parse_json(reply, url)
            attempts.bill.cost = usage = self.prices.of(_usage(data, expected))
            answer = _read_reply(read, data)
            if isinstance(answer, str) and repeats_key(answer, url):
                raise InvalidResponse("a text that repeats the key")
        return answer, replace(usage, seconds=time.monotonic() - started)

    @contextlib.contextmanager
    def _slot(self, deadline: Deadline) -> Iterator[None]:
        if not self._slots.acquire(timeout=deadline.remaining_s):
            raise LLMError(
                f"{self.base}: {self.concurrency} requests were under way for all of {deadline.seconds:.3g} s"
            )
        try:
            yield
        finally:
            self._slots.release()


def _request_module() -> ModuleType:
    try:
        from forecast_integrations.models.http import request
    except ImportError as error:
        raise LLMError(
            f"a server is asked with the openai package, which cannot be imported ({error}): "
            "pip install 'forecast-autotune[llm]'"
        ) from error
    return request


def _is_passing(status: int) -> bool:
    """Whether an error says something of the server rather than of the request."""
    return status in _PASSING_STATUSES or (status >= 500 and status != 501)


# --- an error's status ---


def _refusal_text(reply: HTTPResponse, attempts: int, url: str) -> str:
    text = f"HTTP {reply.status}"
    if words := shown_text(_error_message(reply), url):
        text += f": {words}"
    if reply.status in (401, 403):
        text += " (the key comes from FORECAST_AUTOTUNE_LLM_KEY, else OPENAI_API_KEY)"
    if reply.status == 429:
        wait = f" for {reply.retry_after[:9]} s" if reply.retry_after.isdecimal() else ""
        text += f" (a limit of the account or server: wait{wait}, or ask for less)"
    if 300 <= reply.status < 400:
        text += " (redirects are not followed: give the address that answers)"
    return text if attempts < 2 else f"{text} after {attempts} attempts"


def _error_message(reply: HTTPResponse) -> str:
    """A server's words of an error: its `message` where the body has one, else the body's begin."""
    text = reply.body[:_SEARCHED_BYTES].decode("utf-8", "replace")
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        data = _decode(text)
        error = data.get("error", data)
        text = str(error.get("message", text) if isinstance(error, dict) else error)
    return text


def _named_fields(reply: HTTPResponse) -> frozenset[str]:
    """Return those of `FIELDS` that an answer names."""
    words = _lower_body(reply)
    return frozenset(name for name in FIELDS if name in words)


def _lower_body(reply: HTTPResponse) -> str:
    return reply.body[:_SEARCHED_BYTES].decode("utf-8", "replace").lower()


# --- a reply ---


def _reject_constant(_: str) -> None:
    """NaN and infinity are no JSON, yet some servers send them: they become null, which no reader takes."""


_decode = json.JSONDecoder(parse_constant=_reject_constant).decode


def _parse_json(reply: HTTPResponse, url: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return _decode(reply.body.decode("utf-8"))
    # Out here it has no context: a decoding error holds the whole text.
    begin = shown_text(reply.body[:_SEARCHED_BYTES].decode("utf-8", "replace"), url)[:40]
    raise InvalidResponse(
        f"{len(reply.body)} bytes that are not JSON, {begin!r}: give the address where the API starts"
    )


def _read_reply(read: Callable[[Any], T], data: Any) -> T:
    try:
        return read(data)
    except MALFORMED_ERRORS as error:
        kind = type(error).__name__
    # Out here it has no context: such an error may hold what the server sent.
    raise InvalidResponse(f"a reply of another shape ({kind})")


def _usage(data: object, expected: Usage) -> Usage:
    """The usage that a reply states; a missing or wrong part is taken as expected."""
    usage = data.get("usage") if isinstance(data, dict) else None
    if not isinstance(usage, dict):
        return expected

    def count(fallback: int, value: object) -> int:
        whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS
        return value if whole and isinstance(value, int) else fallback

    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    prompt = count(expected.prompt_tokens, usage.get("prompt_tokens", usage.get("input_tokens")))
    output = count(expected.output_tokens, usage.get("completion_tokens", usage.get("output_tokens")))
    return Usage(1, prompt, min(count(0, cached), prompt), output)
