"""Texts of a language model: for kernel variants, offline, where seconds do not count."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from forecast_autotune.llm.backend import LLMError, Usage
from forecast_autotune.llm.backends.chat import Chat
from forecast_autotune.llm.backends.served import Asking
from forecast_autotune.llm.guards import Deadline
from forecast_autotune.llm.transport import Transport, Unusable, side_by_side

Writer = Callable[[str, int], list[str]]
"""(prompt, n) -> up to n texts; raises `LLMError` when there is none."""
Told = Callable[[Usage], None]
"""Is told what one call of a writer cost, in the caller's thread, whether or not there was a text."""

TOKENS = 4096
"""Default limit of a text."""


def untold(usage: Usage) -> None:
    """Nobody asked; the ledger knows all the same."""


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


def local(
    model: str,
    *,
    timeout_s: float,
    adapter: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    temperature: float = 1.0,
    max_tokens: int = TOKENS,
    told: Told = untold,
) -> Writer:
    """A writer by transformers in this process, loaded when it first writes.

    A model with a chat template answers the prompt, one without continues it.
    """
    loaded: list[Any] = []
    mutex = threading.Lock()

    def write(prompt: str, n: int) -> list[str]:
        from forecast_autotune.llm.backends.loading import Source, load

        with mutex:
            if not loaded:
                loaded.append(load(Source(model, adapter, device, dtype)))
            it = loaded[0]
            begin = time.monotonic()
            texts, usage = _generated(it.model, it.tokenizer, prompt, n, timeout_s, temperature, max_tokens)
        told(replace(usage, seconds=time.monotonic() - begin))
        return _some([text for text in texts if text.strip()], ["only empty texts"])

    return write


def _generated(
    model: Any, tokenizer: Any, prompt: str, n: int, timeout_s: float, temperature: float, max_tokens: int
) -> tuple[list[str], Usage]:
    import torch

    if chats := bool(getattr(tokenizer, "chat_template", None)):
        messages = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not chats).to(model.device)
    start = inputs["input_ids"].shape[1]
    how = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    try:
        with torch.inference_mode():
            found = model.generate(
                **inputs,
                **how,
                num_return_sequences=n if temperature > 0 else 1,
                max_new_tokens=max_tokens,
                max_time=timeout_s,
                pad_token_id=tokenizer.eos_token_id,
            )
    except RuntimeError as error:
        raise LLMError(
            f"the model failed to write on {model.device} ({str(error)[:300]}): ask for fewer texts, or use "
            "a smaller model"
        ) from error
    texts = [tokenizer.decode(ids[start:], skip_special_tokens=True) for ids in found]
    written = int((found[:, start:] != tokenizer.eos_token_id).sum())
    return texts, Usage(1, start, 0, written)


def _texts(jobs: list[Callable[[], str]], asking: Asking, told: Told, width: int) -> list[str]:
    begin = time.monotonic()
    found = side_by_side(jobs, width)
    told(replace(asking.usage, seconds=time.monotonic() - begin))
    return _some([t for t in found if isinstance(t, str)], [str(e) for e in found if isinstance(e, LLMError)])


def _some(texts: list[str], trouble: list[str]) -> list[str]:
    if not texts and trouble:
        raise LLMError(f"no text was written: {'; '.join(dict.fromkeys(trouble))}")
    return texts
