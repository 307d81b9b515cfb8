"""Forecasts as a dialogue: what a chatting or reasoning model is asked, and how its reply is read.

For models that speak: they name a bin and state a distribution in JSON, after thinking if they do. The
tokenizer's own chat template puts it into tokens, so Qwen, SmolLM2 and gpt-oss need nothing special but the
place where an answer stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.replies import MAX_TOTAL, MIN_TOTAL, InvalidResponse, extract_json, weights
from forecast_train.llm.data.examples import Example, ExampleCandidate
from forecast_train.llm.rewards import StatedDistribution

DIALOGUE_VERSION = "dialogue-1"
ANSWER_INSTRUCTION = """\
Name the most probable letter, and say how probable each is; leave out letters below 0.01. Reply with JSON:
{"label": "F", "distribution": {"E": 0.2, "F": 0.6, "G": 0.2}}
"""
ORDER_INSTRUCTION = """\
Say which of the numbered candidates is the fastest. Reply with JSON:
{"fastest": 3}
"""
THINK_INSTRUCTION = (
    "Think about memory traffic, occupancy, pipelining and the last wave first, in a few sentences.\n"
)
_CLOSING_QUESTION = re.compile(r"\n[^\n]{1,40}:\s*$")
_FINAL_CHANNEL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)(?:<\|end\|>|<\|return\|>|$)", re.DOTALL)
"""Where gpt-oss puts its answer; a reply without this channel has none."""


def forecast_messages(example: Example, asked: ExampleCandidate, *, think: bool) -> list[dict[str, str]]:
    """Messages that ask for one candidate."""
    candidate = _CLOSING_QUESTION.sub("", asked.suffix)
    text = (
        f"{example.prefix}Candidate: {candidate}\n\n{THINK_INSTRUCTION if think else ''}{ANSWER_INSTRUCTION}"
    )
    return [{"role": "user", "content": text}]


def order_messages(
    example: Example, asked: Sequence[ExampleCandidate], *, think: bool
) -> list[dict[str, str]]:
    """Messages that ask which of several candidates is the fastest."""
    listed = "\n".join(f"{n}. {_CLOSING_QUESTION.sub('', a.suffix)}" for n, a in enumerate(asked, start=1))
    return [
        {
            "role": "user",
            "content": f"{example.prefix}{listed}\n\n{THINK_INSTRUCTION if think else ''}{ORDER_INSTRUCTION}",
        }
    ]


def parse_distribution(text: str) -> StatedDistribution | None:
    """What a reply states; None where it cannot be read: no JSON, no letters, or sums far from 1."""
    answer = _answer(text)
    if answer is None or not isinstance(answer.get("distribution"), Mapping):
        return None
    try:
        found = weights(answer["distribution"], labels=BINS.labels)
    except (InvalidResponse, TypeError, ValueError, AttributeError):
        return None
    total = sum(found)
    tokens = [label.token for label in BINS.labels]
    named = str(answer.get("label", "")).strip().upper()
    if not MIN_TOTAL <= total <= MAX_TOTAL or named not in tokens:
        return None
    return StatedDistribution(tuple(p / total for p in found), tokens.index(named))


def parse_fastest(text: str, count: int) -> int | None:
    """The candidate that a reply names, from 0; None where it names none of the `count`."""
    number = (_answer(text) or {}).get("fastest")
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= count:
        return None
    return number - 1


def _answer(text: str) -> dict[str, Any] | None:
    if "<|channel|>" in text:
        final = _FINAL_CHANNEL.findall(text)
        text = final[-1] if final else ""
    try:
        found = extract_json(text)
    except InvalidResponse:
        return None
    return found if isinstance(found, dict) else None
