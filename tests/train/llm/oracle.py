"""Language models that know the answer, more or less: to test what surrounds a model without one.

An `OracleBackend` reads the question like any backend, finds the table that it is about, and answers with the true
bins, with errors of a chosen size, or with lies. It is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from forecast_autotune.llm.backend import BackendResponse, LLMError, Usage
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.llm.prompt import ProblemDescription, ReferenceTime, forecast_prompt, shown
from forecast_autotune.records import digest
from forecast_autotune.records.table import Table

OracleBehaviour = Literal["honest", "liar", "blind"]
"""What is said: the truth with errors; the truth mirrored, so that the fastest sounds slowest; the same
distribution for every candidate."""


class OracleBackend:
    """A `Backend` with `error` (log2) as the standard deviation of its mistakes, and of what it states."""

    def __init__(
        self,
        tables: Sequence[Table],
        *,
        error: float = 0.2,
        character: OracleBehaviour = "honest",
        token_s: float = 1e-5,
        seed: int = 0,
    ) -> None:
        self.name = f"oracle:{character}-{error:g}-{seed}"
        self._error, self._character, self._token_s, self._seed = error, character, token_s, seed
        self._known: Mapping[str, dict[str, float]] = {
            _subject(
                forecast_prompt(ProblemDescription(t.problem), ["x"], ReferenceTime(0.0, "x", False)).prefix
            ): {shown(c): math.log2(m.ms) if m.ok else math.nan for c, m in t.by_candidate().items()}
            for t in tables
        }
        self.asked = 0

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """The truth, or what this one makes of it. Raises `LLMError` for a table that it does not know."""
        times = self._known.get(_subject(prefix))
        if times is None:
            raise LLMError("an oracle knows its own tables only")
        self.asked += 1
        configs = [_config(s) for s in suffixes]
        true = np.array([times[c] for c in configs])
        base = times.get(_reference(prefix), math.nan)
        ratio = true - (float(np.nanmin(true)) if math.isnan(base) else base)
        if self._character == "liar":
            low, high = np.nanmin(ratio), np.nanmax(ratio)
            ratio = low + high - ratio
        if self._character == "blind":
            ratio = np.zeros_like(ratio)
        lots = [np.random.default_rng(int(digest(self._seed, prefix, c), 16)) for c in configs]
        noise = np.array([lot.standard_normal() for lot in lots])
        stated = BINS.soft_targets(ratio + self._error * noise, max(self._error, 0.02))
        tokens = (len(prefix) + sum(map(len, suffixes))) // 3
        return BackendResponse(stated, np.ones(len(stated)), Usage(1, tokens, seconds=tokens * self._token_s))

    def ready(self) -> bool:
        """Always."""
        return True

    def prepare(self) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """Nothing is held."""


def _subject(prefix: str) -> str:
    """The part of a prefix that says which problem it is about."""
    return prefix.split("\nKernel ", 1)[1].split("\nWork of one launch")[0].split("\n\nReference:")[0]


def _reference(prefix: str) -> str:
    """The config that times are compared with."""
    return prefix.split("\nReference: ", 1)[1].split("\n", 1)[0].rsplit(": ", 1)[0]


def _config(suffix: str) -> str:
    return suffix.split("\n", 1)[0].split(" | ", 1)[0]
