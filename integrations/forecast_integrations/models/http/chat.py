"""Verbalised distributions from `/v1/chat/completions`: for models that only chat, reasoning ones included.

Many candidates share one request, so that the prompt is paid for once; each answer carries its candidate's
number. The reply's form is a JSON schema where the server knows schemas. The reply is read leniently
(fences, thoughts, percentages, sums that are not 1) but never silently: rows are made to sum to 1, and the
sum that the model gave is kept as the answer's mass.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from forecast_autotune.llm.backend import LLMError, TextGenerator, UsageCallback, ignore_usage
from forecast_autotune.llm.bins import AnswerLabel
from forecast_autotune.llm.replies import MAX_TOTAL, MIN_TOTAL, InvalidResponse, extract_json, weights
from forecast_integrations.models.http.backend import (
    ForecastCall,
    HTTPBackend,
    LabelRows,
    generate_texts,
    rows,
)
from forecast_integrations.models.http.client import RequestRejected, ServerClient
from forecast_integrations.models.http.limits import Deadline

T = TypeVar("T")

PROMPT_VERSION = "chat-1"
"""Version of the texts below; part of the backend's name."""
SYSTEM_PROMPT = "You are a careful forecaster of GPU kernel run times. You reply with JSON and nothing else."
TASK_PROMPT = """\
Do this for every numbered candidate below. For each, say how probable each letter is, in percent; leave out
letters below 1. The percentages of one candidate sum to 100: put them on one or two neighbouring letters
only if you would bet on it, and spread them as wide as you are unsure. Reply with JSON of this form:
{"forecasts": [{"id": 1, "distribution": [{"label": "C", "percent": 60}, ...]}, ...]}
"""
TOKENS_PER_CANDIDATE = 200
"""Output tokens per candidate: some fifteen letters with their percentages."""
REASONING_TOKENS = 16384
"""Output tokens that a reasoning model may need before its answer."""
_MAX_FIELD_FALLBACKS = 6
"""Most ways to put one request: fields that a server may not take are left out one by one."""
_QUESTION = re.compile(r"\n[^\n]{1,40}:\s*$")


class ChatBackend(HTTPBackend):
    """A model that is asked in words; see the module.

    Args:
        url, model, batch, client: see `HTTPBackend`.
        temperature: by default 0, and the server's where `effort` is set.
        effort: `reasoning_effort` for models that have it: low, medium, high, ...
        max_tokens: most output tokens per request, thoughts included; by default by need.
    """

    kind = "chat"

    def __init__(
        self,
        url: str,
        model: str,
        *,
        batch: int = 16,
        temperature: float | None = None,
        effort: str = "",
        max_tokens: int | None = None,
        client: ServerClient | None = None,
    ) -> None:
        super().__init__(url, model, batch=batch, client=client)
        if temperature is None and not effort:
            temperature = 0.0
        self._max_tokens = max_tokens
        self._options: dict[str, float | str] = {}
        if temperature is not None:
            self._options["temperature"] = temperature
        if effort:
            self._options["reasoning_effort"] = effort
        # All that changes an answer, so that answers can be kept under this name.
        how = [f"{name}={value}" for name, value in sorted(self._options.items())]
        self.name = ",".join([f"{self.kind}:{model}", PROMPT_VERSION, "samples=1", f"batch={batch}", *how])
        self._mutex = threading.Lock()
        self._field_substitutes: dict[str, str | None] = {}
        """Fields that this server does not take, and what is sent instead."""

    def batch_function(
        self, call: ForecastCall, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel]
    ) -> Callable[[Sequence[str]], LabelRows]:
        """A batch is one request."""
        return partial(self._batch, call, prefix, labels)

    def generate_text(self, call: ForecastCall, prompt: str) -> str:
        """One reply to a prompt, as text. Raises `LLMError`."""
        messages = [{"role": "user", "content": prompt}]
        return self._request(
            call, messages, {}, len(prompt), self._max_tokens or REASONING_TOKENS, _whole_text
        )

    def _batch(
        self, call: ForecastCall, prefix: str, labels: Sequence[AnswerLabel], suffixes: Sequence[str]
    ) -> LabelRows:
        lines = [f"{n}. {_QUESTION.sub('', suffix)}" for n, suffix in enumerate(suffixes, start=1)]
        question = "\n".join([prefix.rstrip(), "", TASK_PROMPT, *lines])
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        fields: dict[str, object] = {"response_format": _response_schema(labels, len(suffixes))}
        thoughts = REASONING_TOKENS if "reasoning_effort" in self._options else 0
        most = self._max_tokens or TOKENS_PER_CANDIDATE * (len(suffixes) + 1) + thoughts

        def read(data: Any) -> LabelRows:
            return _parse_rows(_content(data), labels, len(suffixes))

        return self._request(call, messages, fields, len(question), most, read)

    def _request(
        self,
        call: ForecastCall,
        messages: Sequence[Mapping[str, str]],
        fields: Mapping[str, object],
        size: int,
        max_tokens: int,
        read: Callable[[Any], T],
    ) -> T:
        """Ask, leaving out or renaming what the server says that it does not take."""
        all_fields = {"max_tokens": max_tokens, **fields, **self._options}
        if "reasoning_effort" in all_fields:
            self._field_substitutes.setdefault("max_tokens", "max_completion_tokens")
        for _ in range(_MAX_FIELD_FALLBACKS):
            body: dict[str, object] = {"model": self.model, "messages": messages}
            body |= self._body_fields(all_fields)
            try:
                url = f"{self.client.base}/chat/completions"
                return call.post(url, body, read, prompt=size, output=max_tokens)
            except RequestRejected as error:
                if error.status not in (400, 422) or not self._drop_field(error.fields, body):
                    raise
        raise LLMError(f"{self.client.base} takes none of the ways to ask {self.model} for an answer")

    def _body_fields(self, fields: Mapping[str, object]) -> dict[str, object]:
        body: dict[str, object] = {}
        for name, value in fields.items():
            substitute = self._field_substitutes.get(name, name)
            if name == "response_format" and substitute == "json_object":
                body[name] = {"type": "json_object"}
            elif substitute is not None:
                body[substitute] = value
        return body

    def _drop_field(self, names: frozenset[str], body: Mapping[str, object]) -> bool:
        """Remember a field that the server complains of; whether there is anything new to try."""
        form_field = body.get("response_format")
        form = form_field.get("type") if isinstance(form_field, dict) else None
        with self._mutex:
            if form and names & {"response_format", "json_schema", "schema"}:
                self._field_substitutes["response_format"] = "json_object" if form == "json_schema" else None
                return True
            if "max_tokens" in body and "max_completion_tokens" in names:
                self._field_substitutes["max_tokens"] = "max_completion_tokens"
                return True
            for name in ("temperature", "reasoning_effort"):
                if name in body and name in names:
                    self._field_substitutes[name] = None
                    return True
        return False


def _response_schema(labels: Sequence[AnswerLabel], n: int) -> dict[str, object]:
    """Everything is bounded: a small model that is held to a form goes on for as long as the form lets it."""

    def closed_object(**properties: object) -> dict[str, object]:
        required = list(properties)
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    letter = {"type": "string", "enum": [label.token for label in labels]}
    percent = {"type": "integer", "minimum": 0, "maximum": 100}
    several = {"type": "array", "items": closed_object(label=letter, percent=percent)}
    number = {"type": "integer", "minimum": 1, "maximum": n}
    entry = closed_object(id=number, distribution=several | {"minItems": 1, "maxItems": len(labels)})
    schema = closed_object(forecasts={"type": "array", "items": entry, "minItems": n, "maxItems": n})
    return {"type": "json_schema", "json_schema": {"name": "forecasts", "strict": True, "schema": schema}}


# --- reading ---


def _content(data: Any) -> str:
    choice = data["choices"][0]
    message = choice["message"]
    text = message.get("content")
    if isinstance(text, list):  # parts, as some servers send them
        text = "".join(part.get("text", "") for part in text)
    if not isinstance(text, str) or not text.strip():
        if choice.get("finish_reason") == "length":
            raise InvalidResponse(
                "no answer within max_tokens, perhaps for all the thoughts: raise max_tokens"
            )
        raise InvalidResponse(
            "an empty answer" if not message.get("refusal") else "the model refuses to answer"
        )
    return text


def _whole_text(data: Any) -> str:
    text = _content(data)
    if data["choices"][0].get("finish_reason") == "length" and text.count("```") < 2:
        raise InvalidResponse("a text that max_tokens has cut off: raise max_tokens")
    return text


def _parse_rows(text: str, labels: Sequence[AnswerLabel], n: int) -> LabelRows:
    answer = extract_json(text)
    entries = answer["forecasts"] if isinstance(answer, dict) else answer
    distributions: list[list[object]] = [[] for _ in range(n)]
    for entry in (entry for entry in entries if isinstance(entry, dict)):
        number = entry.get("id")
        number = int(number) if isinstance(number, str) and number.strip().isdecimal() else number
        if isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= n:
            distributions[number - 1].append(entry.get("distribution"))
    return rows(distributions, partial(weights, labels=labels), len(labels), least=MIN_TOTAL, most=MAX_TOTAL)


# --- texts ---


def chat_generator(
    model: ChatBackend, timeout_s: float, *, on_usage: UsageCallback = ignore_usage
) -> TextGenerator:
    """A writer over a chat endpoint: one request per text, side by side."""

    def write(prompt: str, n: int) -> list[str]:
        call = ForecastCall(model.client, Deadline(timeout_s))
        return generate_texts(
            [partial(model.generate_text, call, prompt)] * n, call, on_usage, model.client.concurrency
        )

    return write
