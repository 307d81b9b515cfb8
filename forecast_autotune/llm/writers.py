"""What every writer of texts is: a function from a prompt to several texts, and to whom it tells its cost."""

from __future__ import annotations

from collections.abc import Callable

from forecast_autotune.llm.backend import LLMError, Usage

TextGenerator = Callable[[str, int], list[str]]
"""(prompt, n) -> up to n texts; raises `LLMError` when there is none."""
UsageCallback = Callable[[Usage], None]
"""Is told what one call of a writer cost, in the caller's thread, whether or not there was a text."""


def ignore_usage(usage: Usage) -> None:
    """Nobody asked; the ledger knows all the same."""


def require_texts(texts: list[str], trouble: list[str]) -> list[str]:
    """The texts. Raises `LLMError` telling the trouble where there are none."""
    if not texts and trouble:
        raise LLMError(f"no text was written: {'; '.join(dict.fromkeys(trouble))}")
    return texts
