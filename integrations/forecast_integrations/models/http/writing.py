"""Texts of a language model behind a server: for kernel variants, offline, where seconds do not count."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.parallel import side_by_side
from forecast_autotune.llm.replies import Unusable
from forecast_autotune.llm.writers import Told, Writer, some, untold
from forecast_integrations.models.http.chat import Chat
from forecast_integrations.models.http.guards import Deadline
from forecast_integrations.models.http.served import Asking
from forecast_integrations.models.http.transport import Transport

TOKENS = 4096
"""Default limit of a text."""


def chat(model: Chat, timeout_s: float, *, told: Told = untold) -> Writer:
    """A writer over a chat endpoint: one request per text, side by side."""

    def write(prompt: str, n: int) -> list[str]:
        asking = Asking(model.transport, Deadline(timeout_s))
        return _texts([partial(model.say, asking, prompt)] * n, asking, told, model.transport.concurrency)

    return write


def completions(
    transport: Transport,
    model: str,
    timeout_s: float,
    *,
    temperature: float = 1.0,
    max_tokens: int = TOKENS,
    told: Told = untold,
) -> Writer:
    """A writer over `/v1/completions`: a text is what follows the prompt."""
    body = {"model": model, "max_tokens": max_tokens, "temperature": temperature}

    def read(data: Any) -> str:
        text = data["choices"][0]["text"]
        if not isinstance(text, str) or not text.strip():
            raise Unusable("an empty text")
        return text

    def write(prompt: str, n: int) -> list[str]:
        asking = Asking(transport, Deadline(timeout_s))
        url = f"{transport.base}/completions"
        one = partial(
            asking.post, url, {**body, "prompt": prompt}, read, prompt=len(prompt), output=max_tokens
        )
        return _texts([one] * n, asking, told, transport.concurrency)

    return write


def _texts(jobs: list[Callable[[], str]], asking: Asking, told: Told, width: int) -> list[str]:
    begin = time.monotonic()
    found = side_by_side(jobs, width)
    told(replace(asking.usage, seconds=time.monotonic() - begin))
    return some([t for t in found if isinstance(t, str)], [str(e) for e in found if isinstance(e, LLMError)])
