"""Readers of a model's reply: the JSON in a text, and a distribution over labels in that JSON."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from forecast_autotune.llm.backend import LLMError
from forecast_autotune.llm.bins import AnswerLabel

MIN_TOTAL, MAX_TOTAL = 0.5, 1.5
"""Sums of a verbalised distribution that are taken for carelessness; others for a misunderstanding."""
_FENCE = re.compile(r"```(?:json)?(.*?)```", re.DOTALL)


class InvalidResponse(LLMError):
    """A whole reply that is no answer to the question; asking again may help."""


def weights(distribution: Any, *, labels: Sequence[AnswerLabel]) -> list[Any]:
    """One weight per label; weight on anything else counts for nothing.

    Raises `InvalidResponse` for numbers that are no probabilities, and as Python does for another shape.
    """
    if isinstance(distribution, dict):
        pairs = list(distribution.items())
    else:
        pairs = [
            (entry["label"], entry["percent"] if "percent" in entry else entry["probability"])
            for entry in distribution
        ]
    if any(isinstance(value, bool) for _, value in pairs):
        raise InvalidResponse("numbers that are no probabilities")
    try:
        numbers = [(str(name).strip().upper(), float(value)) for name, value in pairs]
    except OverflowError:  # an integer of 310 digits
        raise InvalidResponse("numbers that are no probabilities") from None
    if len({name for name, _ in numbers}) < len(numbers):
        raise InvalidResponse("a letter given twice")
    if not all(0.0 <= value <= 150.0 for _, value in numbers):
        raise InvalidResponse("numbers that are no probabilities")
    total = math.fsum(value for _, value in numbers)
    percent = 100.0 if total > 100.0 * MIN_TOTAL else 1.0
    results = dict(numbers)
    return [results.get(label.token, 0.0) / percent for label in labels]


def extract_json(text: str) -> Any:
    """The JSON value in a reply: all of it, or what follows the thoughts, or what stands in a fence."""
    text = text.rpartition("</think>")[2].strip()
    fences = _FENCE.findall(text)
    first = min((place for mark in "{[" if (place := text.find(mark)) >= 0), default=len(text))
    for part in (text, *fences[-1:]):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(part)
    with contextlib.suppress(ValueError, RecursionError):
        return json.JSONDecoder().raw_decode(text, first)[0]
    # Out here it has no context: a decoding error holds the whole text.
    raise InvalidResponse("an answer that is not JSON, or was cut off")
