"""Texts to token numbers: prefix and suffixes apart, so that a prefix's computation can be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import AnswerLabel

Ids = npt.NDArray[np.int64]

_CACHE_SIZE = 20_000
"""Most texts whose tokens are remembered: later rounds ask about the same candidates again."""


class ForecastTokenizer:
    """A tokenizer of transformers, asked for what a forecast needs."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # a saved tokenizer cuts and pads as it did when it was saved
            self._fast.no_truncation()
            self._fast.no_padding()
        self._cache: dict[tuple[bool, str], Ids] = {}
        self._labels: dict[tuple[str, ...], list[int]] = {}

    def prefix(self, text: str) -> Ids:
        """Tokens of a prompt's beginning, with those that the model's prompts start with."""
        ids = self._encoded([text], opening=True)[0]
        # Some tokenizers close every text as well; this one goes on.
        is_closed = (
            len(ids) > 1
            and ids[-1] == self._tokenizer.eos_token_id
            and not _appends_end_token(self._tokenizer, text)
        )
        return ids[:-1] if is_closed else ids

    def suffixes(self, texts: Sequence[str]) -> list[Ids]:
        """Tokens of what follows a prefix, one array per text."""
        return self._encoded(texts, opening=False)

    def labels(self, suffixes: Sequence[str], labels: Sequence[AnswerLabel]) -> list[int]:
        """The token of every label after these suffixes.

        Raises `LLMError` where a label, with a space before it, is not exactly one token of its own.
        """
        results: list[int] = []
        for tail in dict.fromkeys(text.rpartition("\n")[2] for text in suffixes):
            ids = self._labels_after(tail, [label.token for label in labels])
            if results and ids != results:
                raise LLMError(
                    "the suffixes of one forecast must end alike, but a label's token depends on which of "
                    f"them it follows (one ends in {tail!r}): ask for them apart"
                )
            results = ids
        return results

    def _labels_after(self, tail: str, words: list[str]) -> list[int]:
        key = (tail, *words)
        if key in self._labels:
            return self._labels[key]
        (before, *after) = self._encoded([tail, *(f"{tail} {word}" for word in words)], opening=False)
        results = []
        for word, ids in zip(words, after, strict=True):
            if len(ids) != len(before) + 1 or not np.array_equal(ids[:-1], before):
                tokens = [int(i) for i in ids[len(before) :]]
                raise LLMError(
                    f"the label {word!r} must be one token after {tail!r}, but this model's tokenizer makes "
                    f"{tokens} of it: choose labels that are single tokens, such as capital letters, or "
                    "another model"
                )
            results.append(int(ids[-1]))
        if len(set(results)) < len(results):
            raise LLMError(
                f"labels must be told apart, but this model's tokenizer maps {words} to the tokens {results}: "
                "choose other labels or another model"
            )
        self._labels[key] = results
        return results

    def _encoded(self, texts: Sequence[str], opening: bool) -> list[Ids]:
        missing = [text for text in dict.fromkeys(texts) if (opening, text) not in self._cache]
        if len(self._cache) + len(missing) > _CACHE_SIZE:
            self._cache.clear()
            missing = list(dict.fromkeys(texts))
        if missing:
            if self._fast is not None:  # without what a model's call wraps around it: half the time
                rows = self._fast.encode_batch_fast(missing, add_special_tokens=opening)
                results = [row.ids for row in rows]
            else:
                results = self._tokenizer(missing, add_special_tokens=opening)["input_ids"]
            for text, ids in zip(missing, results, strict=True):
                self._cache[opening, text] = np.asarray(ids, np.int64)
        return [self._cache[opening, text] for text in texts]


def _appends_end_token(tokenizer: Any, text: str) -> bool:
    return bool(tokenizer.eos_token) and text.endswith(tokenizer.eos_token)
