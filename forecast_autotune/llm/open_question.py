"""A question to a language model as data: its key, by which an answer that was recorded elsewhere is found again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.llm.prompt import FORECAST_VERSION, Prompt
from forecast_autotune.records.codec import Record

SCHEMA = 1
"""Schema of files of questions and of answers."""


def question_key(version: str, prefix: str, suffixes: Sequence[str] = ()) -> str:
    """SHA-256 of a question's canonical JSON; of one that is answered with a text, `suffixes` is empty."""
    text = json.dumps([version, prefix, list(suffixes)], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def version_of_labels(labels: Sequence[AnswerLabel]) -> str:
    """The version of the prompt that asks for these labels; empty where none does."""
    return FORECAST_VERSION if tuple(labels) == BINS.labels else ""


@dataclass(frozen=True)
class OpenQuestion(
    Record,
    tag="question",
    schema=SCHEMA,
    lenient=True,
    order=("key", "kind", "version", "kernel", "label", "prefix", "suffixes"),
    derived={"key": attrgetter("key")},
):
    """One question that somebody may answer offline."""

    kind: str
    """By the name on the command line: `forecast`, ..."""
    version: str
    """Version of the prompt."""
    kernel: str
    """The kernel's name."""
    prefix: str
    label: str = ""
    """The problem, for people."""
    suffixes: tuple[str, ...] = ()
    """One per candidate; empty where the answer is a text."""

    @classmethod
    def of_prompt(cls, kind: str, prompt: Prompt, kernel: str, label: str = "") -> OpenQuestion:
        """The question that a prompt asks."""
        return cls(kind, prompt.version, kernel, prompt.prefix, label, prompt.suffixes)

    @property
    def key(self) -> str:
        """See `question_key`."""
        return question_key(self.version, self.prefix, self.suffixes)
