"""What is told of a server's error: never its own words, which may repeat the key it was sent.

A status, a length and a type out of a list say enough to look it up in the server's log. Its text is searched
for a few words, and what those mean is told in ours.
"""

from __future__ import annotations

from forecast_integrations.models.http.request import HTTPResponse

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
_TYPES = ("application/json", "application/problem+json", "text/event-stream", "text/html", "text/plain")
_HINTS = (
    (
        ("context length", "context_length", "too long", "too many tokens"),
        "the prompt may be too long for the model",
    ),
    (
        ("model_not_found", "does not exist", "model not found", "no such model"),
        "it may not serve this model",
    ),
    (("quota", "billing", "credit", "balance"), "the account may have nothing left to spend"),
    (("rate limit", "rate_limit", "too many requests", "overloaded"), "it may be asked too often"),
    (("api key", "api_key", "unauthorized", "authentication"), "it may not know the key"),
)
_SEARCHED_BYTES = 2**16


def refusal_text(reply: HTTPResponse) -> str:
    """An answer with an error status, in words of ours."""
    said = _searched(reply.body)
    hints = [hint for words, hint in _HINTS if any(word in said for word in words)]
    return f"HTTP {reply.status} with {body_text(reply)}" + "".join(f"; {hint}" for hint in hints[:1])


def body_text(reply: HTTPResponse) -> str:
    """Length and type of a reply's body."""
    kind = reply.headers.get("content-type", "").partition(";")[0].strip().lower()
    shown = f" of {kind}" if kind in _TYPES else ""
    return f"{len(reply.body)} bytes{shown}"


def named_fields(reply: HTTPResponse) -> frozenset[str]:
    """Which of `FIELDS` an answer names."""
    said = _searched(reply.body)
    return frozenset(name for name in FIELDS if name in said)


def _searched(body: bytes) -> str:
    return body[:_SEARCHED_BYTES].decode("utf-8", "replace").lower()
