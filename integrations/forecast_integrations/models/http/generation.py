"""Texts of a language model behind a server: for kernel variants, offline, where seconds do not count."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.parallel import run_parallel
from forecast_autotune.llm.replies import InvalidResponse
from forecast_autotune.llm.writers import TextGenerator, UsageCallback, ignore_usage, require_texts
from forecast_integrations.models.http.backend import ForecastCall
from forecast_integrations.models.http.chat import ChatBackend
from forecast_integrations.models.http.limits import Deadline
from forecast_integrations.models.http.transport import Transport

MAX_TOKENS = 4096
"""Default limit of a text."""


def chat_generator(
    model: ChatBackend, timeout_s: float, *, told: UsageCallback = ignore_usage
) -> TextGenerator:
    """A writer over a chat endpoint: one request per text, side by side."""

    def write(prompt: str, n: int) -> list[str]:
        asking = ForecastCall(model.transport, Deadline(timeout_s))
        return _generate(
            [partial(model.generate_text, asking, prompt)] * n, asking, told, model.transport.concurrency
        )

    return write


def completions_generator(
    transport: Transport,
    model: str,
    timeout_s: float,
    *,
    temperature: float = 1.0,
    max_tokens: int = MAX_TOKENS,
    told: UsageCallback = ignore_usage,
) -> TextGenerator:
    """A writer over `/v1/completions`: a text is what follows the prompt."""
    body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}

    def read(data: Any) -> str:
        text = data["choices"][0]["text"]
        if not isinstance(text, str) or not text.strip():
            raise InvalidResponse("an empty text")
        return text

    def write(prompt: str, n: int) -> list[str]:
        asking = ForecastCall(transport, Deadline(timeout_s))
        url = f"{transport.base}/completions"
        one = partial(
            asking.post, url, {**body, "prompt": prompt}, read, prompt=len(prompt), output=max_tokens
        )
        return _generate([one] * n, asking, told, transport.concurrency)

    return write


def _generate(
    jobs: list[Callable[[], str]], asking: ForecastCall, told: UsageCallback, width: int
) -> list[str]:
    begin = time.monotonic()
    found = run_parallel(jobs, width)
    told(replace(asking.usage, seconds=time.monotonic() - begin))
    return require_texts(
        [t for t in found if isinstance(t, str)], [str(e) for e in found if isinstance(e, LLMError)]
    )
