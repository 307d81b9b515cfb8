"""How likely a language model holds texts after a common beginning, which it reads once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.tokenizer import ForecastTokenizer, Ids
from forecast_integrations.models.transformers.loading import ModelSource, load_model
from forecast_integrations.models.transformers.prefill import (
    BatchedPrefill,
    cache_from_layers,
    pad_suffixes,
)
from forecast_integrations.models.transformers.prefix_cache import EMPTY_PREFIX, Prefix

Array = npt.NDArray[np.float64]
_ROWS = 5
"""Texts in a pass: their logits take memory."""


class ContinuationScorer:
    """A model of transformers that states the likelihood of texts.

    `forecast_integrations` reads of its passes the logits after each last token only, as answers are one token;
    here every token counts. The beginning is read, kept and repeated for the rows by its code.
    """

    def __init__(self, model: str, adapter: str | None = None, *, device: str | None = None) -> None:
        """`model` and `adapter` (LoRA) are folders. Raises `LLMError` where they cannot be loaded."""
        loaded = load_model(ModelSource(model, adapter, device))
        self.model, self.tokens = loaded.model, ForecastTokenizer(loaded.tokenizer)
        self.dtype = str(self.model.dtype).removeprefix("torch.")
        self._way = BatchedPrefill(self.model)

    def length(self, text: str) -> int:
        """Tokens of a text that is no beginning."""
        return len(self.tokens.suffixes([text])[0])

    def begin(self, text: str) -> Prefix:
        """Read a beginning."""
        return self._read(EMPTY_PREFIX, self.tokens.prefix(text))

    def go_on(self, past: Prefix, text: str) -> Prefix:
        """Read on; `past` stays as it is."""
        return self._read(past, self.tokens.suffixes([text])[0]) if text else past

    def _read(self, past: Prefix, ids: Ids) -> Prefix:
        import torch

        with torch.inference_mode():
            return self._way.extend(past, ids)

    def log_likelihoods(self, past: Prefix, texts: Sequence[str], most_tokens: int = 1 << 20) -> list[Array]:
        """Natural logarithm of the probability of every token of each text after `past`; of long texts, the first ones.

        The texts and the beginning must have a token each.
        """
        rows = [ids[:most_tokens] for ids in self.tokens.suffixes(texts)]
        if not len(past) or not all(map(len, rows)):
            raise ValueError("the beginning and every text must have a token at least")
        found: list[Array] = []
        for start in range(0, len(rows), _ROWS):
            found += self._pass(past, rows[start : start + _ROWS])
        return found

    def _pass(self, past: Prefix, rows: Sequence[Ids]) -> list[Array]:
        import torch

        # The beginning's last token goes along: its logits are those of every text's first token.
        before, last = past.cropped(len(past) - 1), past.ids[-1:]
        ids, _ = pad_suffixes([np.concatenate([last, row]) for row in rows])
        device = self.model.device
        found = []
        with torch.inference_mode():
            cache = cache_from_layers(before.layers, len(rows))
            logits = self.model(
                input_ids=torch.as_tensor(ids, device=device), past_key_values=cache, use_cache=True
            ).logits
            for row, said in zip(rows, logits, strict=True):
                wide = said[: len(row)].float()
                told = wide.gather(1, torch.as_tensor(row, device=device)[:, None])[:, 0]
                found.append((told - wide.logsumexp(dim=-1)).cpu().numpy().astype(float))
        return found
