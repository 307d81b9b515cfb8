"""Files of open questions, and how answers to them become a file for `recorded:FILE`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.llm.bins import BINS
from forecast_autotune.llm.open_question import SCHEMA, OpenQuestion
from forecast_autotune.llm.prompt import COMPARE_VERSION, FORECAST_VERSION, PAIR_LABELS
from forecast_autotune.records.json_fields import decode_json
from forecast_autotune.records.named_lines import read_document
from forecast_integrations.models.recorded import SUFFIXES, RecordedAnswer, RecordedAnswers, write_json_lines

INSTRUCTIONS = (
    "Answer each question with one line of JSON, its key copied. A question with suffixes asks for one forecast per "
    "suffix, in their order: "
    '{"type": "answer", "key": "...", "log2_slowdown": [...], "sd": [...], "p_fail": [...]}. '
    "log2_slowdown is log2(time of the candidate / time of the reference that the prefix states): 0 is as fast, 1 "
    "twice as slow, -1 twice as fast. sd is how unsure you are of it, in the same unit, a number per suffix or one for "
    "all. p_fail is the probability that the candidate fails to compile or to run. Differences between the fastest "
    "candidates matter most. In place of the three there may be probabilities: a row per suffix with one number per "
    "letter of the prefix's table, summing to 1. A question without suffixes asks for a text: "
    '{"type": "answer", "key": "...", "text": "..."}. '
    "Look at no measurement of the problem: answers count as a forecast."
)
_LABELS = {FORECAST_VERSION: len(BINS.labels), COMPARE_VERSION: len(PAIR_LABELS)}


def write_questions(path: Path, questions: Iterable[OpenQuestion]) -> int:
    """Write a file of questions in one step, each question once; returns how many."""
    found = {q.key: q for q in questions}
    head = {"type": "questions", "schema": SCHEMA, "instructions": INSTRUCTIONS}
    write_json_lines(path, [head, *(q.to_json() for q in found.values())])
    return len(found)


def read_questions(path: Path) -> dict[str, OpenQuestion]:
    """The questions of a file by key. Raises `SettingsError` naming the line that is none."""
    found = {}
    for number, entry in _entries(path):
        if isinstance(entry, dict) and entry.get("type") == "questions":
            continue
        try:
            if not isinstance(entry, dict) or entry.get("type") != "question":
                raise RecordError("it is no question")
            told = {
                name: str(entry.get(name, "")) for name in ("kind", "version", "kernel", "prefix", "label")
            }
            question = OpenQuestion(**told, suffixes=tuple(map(str, entry.get("suffixes") or ())))
            if question.key != entry.get("key"):
                raise RecordError("its key is not that of its content")
        except (RecordError, TypeError) as error:
            raise SettingsError(
                f"{path}, line {number}: {error}: export the questions again with `forecast-autotune llm ask --export`"
            ) from None
        found[question.key] = question
    return found


@dataclass
class AnswerImport:
    """What came of taking answers into a file."""

    taken: list[RecordedAnswer] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Lines, and why."""


def read_answers(path: Path, questions: Mapping[str, OpenQuestion] | None) -> AnswerImport:
    """The answers in a file, each judged by itself; without `questions`, their keys and lengths are not.

    Raises `SettingsError` for a file that cannot be read.
    """
    found = AnswerImport()
    for number, entry in _entries(path, broken_lines=True):
        try:
            if not isinstance(entry, dict):
                raise RecordError("it is no JSON object")
            if entry.get("type") in ("questions", "answers"):
                continue
            if entry.get("type", "answer") != "answer":
                raise RecordError(f"its type must be 'answer', not {entry.get('type')!r:.40}")
            found.taken.append(_checked(entry, questions))
        except RecordError as error:
            found.refused.append((number, str(error)))
    return found


def _checked(entry: Mapping[str, Any], questions: Mapping[str, OpenQuestion] | None) -> RecordedAnswer:
    if questions is None:
        return RecordedAnswer.from_json(entry)
    question = questions.get(str(entry.get("key")))
    if question is None:
        raise RecordError(f"no question has the key {entry.get('key')!r:.70}")
    answer = RecordedAnswer.from_json({**entry, "version": question.version, "kernel": question.kernel})
    if (answer.text is None) != bool(question.suffixes):
        raise RecordError("its question asks for " + ("numbers" if question.suffixes else "a `text`"))
    if len(answer) != len(question.suffixes):
        raise RecordError(f"it answers {len(answer)} suffixes, and its question has {len(question.suffixes)}")
    width = len(answer.rows[0]) if answer.rows else 0
    if width and width != _LABELS.get(question.version, width):
        raise RecordError(
            f"rows of probabilities need {_LABELS[question.version]} numbers, and these have {width}"
        )
    if answer.log2_slowdown is not None and question.version != FORECAST_VERSION:
        raise RecordError("its question asks for `probabilities`")
    return answer


def extend(
    path: Path, model: str, provenance: Mapping[str, Any], answers: Iterable[RecordedAnswer]
) -> RecordedAnswers:
    """Add answers to a file, which is made where it is not there; later answers to a question count.

    Raises `SettingsError` for a file of another model or another provenance, or that cannot be read.
    """
    if not path.name.endswith(SUFFIXES):
        raise SettingsError(f"a file of answers is named *{' or *'.join(SUFFIXES)}, and {path} is not")
    kept = RecordedAnswers(model, dict(provenance))
    if path.exists():
        old = RecordedAnswers.read(str(path))
        same = ("author", "how", "blind")
        if old.model != model or any(old.provenance.get(n) != provenance.get(n) for n in same):
            raise SettingsError(
                f"a file holds the answers of one model, and {path} holds those of {old.model} by "
                f"{old.provenance['author']}, which came about otherwise: give another file"
            )
        kept = RecordedAnswers(model, old.provenance | dict(provenance), dict(old.answers))
    kept.answers.update({a.key: a for a in answers})
    kept.write(path)
    return kept


def _entries(path: Path, *, broken_lines: bool = False) -> Iterator[tuple[int, Any]]:
    """Number and value of every line; with `broken_lines`, None for one that is no JSON."""
    try:
        text = read_document(path)
    except (OSError, RecordError) as error:
        raise SettingsError(f"{path} cannot be read ({error}): give a file of JSON Lines") from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, decode_json(line)
        except (ValueError, RecursionError) as error:
            if not broken_lines:
                raise SettingsError(f"{path}, line {number}: not JSON ({error}): write it again") from None
            yield number, None
