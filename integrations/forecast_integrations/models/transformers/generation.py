"""Texts of a model in this process, those of one prompt in one pass: each token costs a reading of all weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from forecast_autotune.llm.backend import LLMError, Usage, UsageCallback, ignore_usage, require_texts
from forecast_integrations.models.http.completions import MAX_TOKENS
from forecast_integrations.models.transformers.loading import (
    LoadedModel,
    ModelSource,
    load_model,
    out_of_memory,
    unless_out_of_memory,
)


class LocalGenerator:
    """Writes by transformers; loaded when it first writes. Threads may share one: they take turns.

    A model with a chat template answers the prompt, one without continues it. `timeout_s` limits a pass, and
    `on_usage` gets the cost of each call.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        timeout_s: float,
        temperature: float = 1.0,
        max_tokens: int = MAX_TOKENS,
        on_usage: UsageCallback = ignore_usage,
    ) -> None:
        self._source, self._timeout_s, self._on_usage = source, timeout_s, on_usage
        self._temperature, self._max_tokens = temperature, max_tokens
        self._loaded: LoadedModel | None = None
        self._turn = threading.Lock()

    def __call__(self, prompt: str, n: int) -> list[str]:
        """Up to `n` texts, a single one where nothing is drawn. Raises `LLMError`."""
        with self._turn:
            loaded = self._loaded = self._loaded or load_model(self._source)
            begin = time.monotonic()
            rows = self._rows(loaded, [prompt] * (n if self._temperature > 0 else 1))
        # The prompt is read once for each text, and told once: no server charges it again.
        tokens = sum(count for _, _, count in rows)
        self._on_usage(Usage(1, rows[0][1], 0, tokens, time.monotonic() - begin))
        return require_texts([text for text, _, _ in rows if text.strip()], ["only empty texts"])

    def _rows(self, loaded: LoadedModel, prompts: Sequence[str]) -> list[tuple[str, int, int]]:
        """A text for every prompt, with the tokens of both; in halves where memory is missing."""
        texts = unless_out_of_memory(lambda: self.run_pass(loaded, prompts))
        if texts is not None:
            return texts
        if len(prompts) == 1:
            raise LLMError(
                f"there was not enough memory on {loaded.model.device} to write a text: use a smaller "
                "model, or a smaller max_tokens"
            )
        half = len(prompts) // 2
        return [*self._rows(loaded, prompts[:half]), *self._rows(loaded, prompts[half:])]

    def run_pass(self, loaded: LoadedModel, prompts: Sequence[str]) -> list[tuple[str, int, int]]:
        """A text for every prompt, with the tokens of both; the subclass of another model replaces this.

        Raises `LLMError` where the model fails, and torch's own error where memory is missing.
        """
        import torch

        model, tokenizer = loaded.model, loaded.tokenizer
        if chats := bool(getattr(tokenizer, "chat_template", None)):
            prompts = [
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
                )
                for prompt in prompts
            ]
        end = tokenizer.eos_token_id
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
        # On the left: a text goes on where its prompt ends.
        tokenizer.padding_side = "left"
        inputs = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=not chats)
        inputs = inputs.to(model.device)
        width = inputs["input_ids"].shape[1]
        drawn = {"do_sample": True, "temperature": self._temperature}
        how = drawn if self._temperature > 0 else {"do_sample": False}
        try:
            with torch.inference_mode():
                tokens = model.generate(
                    **inputs,
                    **how,
                    max_new_tokens=self._max_tokens,
                    max_time=self._timeout_s,
                    pad_token_id=end,
                )
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            raise LLMError(
                f"the model failed to write on {model.device} ({str(error)[:300]}): use another device, or a "
                "smaller model"
            ) from error
        read = inputs["attention_mask"].sum(1).tolist()
        written = (tokens[:, width:] != end).sum(1).tolist()
        texts = [tokenizer.decode(ids[width:], skip_special_tokens=True) for ids in tokens]
        return list(zip(texts, read, written, strict=True))
