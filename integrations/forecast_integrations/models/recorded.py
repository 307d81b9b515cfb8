"""`recorded:FILE`: answers that were given offline, found by the content of the question.

A file is JSON Lines (`.jsonl` or `.jsonl.gz`) and nothing but data. Its first line says who answered and how:

    {"type": "answers", "schema": 1, "model": "NAME",
     "provenance": {"author": "...", "how": "...", "date": "2026-01-31", "blind": true}}

Every other line is one answer, whose `key` is the `question_key` of what was asked:

    {"type": "answer", "key": "...", "version": "forecast-2", "kernel": "...",
     "log2_slowdown": [0.1, -0.4], "sd": 0.2, "p_fail": [0.0, 0.9]}

In place of `log2_slowdown` (log2 of time / reference time, one per suffix), `sd` and `p_fail` there may be
`probabilities`, a row of all labels per suffix, or a `text` for questions without suffixes.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.errors import RecordError, SettingsError
from forecast_autotune.file_access import open_named_output
from forecast_autotune.llm.backend import Backend, BackendResponse, LLMError, TextGenerator
from forecast_autotune.llm.bins import BINS, AnswerLabel
from forecast_autotune.llm.open_question import SCHEMA, OpenQuestion, question_key, version_of_labels
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.records.json_fields import decode_json
from forecast_autotune.records.named_lines import read_document
from forecast_autotune.store.files import append

Array = npt.NDArray[np.float64]

SUFFIXES = (".jsonl", ".jsonl.gz")
LEAST_SD = 0.01
"""Smallest spread (log2) that an answer may state: a clock has less than 1 % of noise only on good days."""
MOST_OCTAVES = 64.0
"""Largest log2 ratio, either way."""
_SUM_ERROR = 1e-3
_FORMS = ("log2_slowdown", "probabilities", "text")


def write_json_lines(path: Path, entries: Iterable[Any]) -> None:
    """Write a line per entry in one step, packed if the name ends in .gz: the same entries give the same bytes."""
    data = "".join(f"{json.dumps(entry, allow_nan=False)}\n" for entry in entries).encode()
    with open_named_output(path) as stream:
        stream.write(gzip.compress(data, mtime=0) if path.name.endswith(".gz") else data)


@dataclass(frozen=True)
class RecordedAnswer:
    """One answer. Raises `RecordError` in its making where it cannot be one."""

    key: str
    version: str
    kernel: str
    text: str | None = None
    rows: tuple[tuple[float, ...], ...] | None = None
    """Probabilities as they were stated."""
    log2_slowdown: tuple[float, ...] | None = None
    sd: tuple[float, ...] = ()
    p_fail: tuple[float, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RecordedAnswer:
        """Read a line. Raises `RecordError` saying what is wrong with it."""
        key = data.get("key")
        if not (isinstance(key, str) and len(key) == 64):
            raise RecordError("an answer needs the `key` of its question, 64 hexadecimal digits")
        forms = [name for name in _FORMS if data.get(name) is not None]
        if len(forms) != 1:
            raise RecordError(
                f"an answer holds one of {', '.join(_FORMS)}, and this {forms or 'none of them'}"
            )
        identity = (key, str(data.get("version", "")), str(data.get("kernel", "")))
        if forms == ["text"]:
            if not isinstance(data["text"], str):
                raise RecordError("`text` must be a text")
            return cls(*identity, text=data["text"])
        if forms == ["probabilities"]:
            return cls(*identity, rows=_distributions(data["probabilities"]))
        means = _numbers(data, "log2_slowdown", None, -MOST_OCTAVES, MOST_OCTAVES)
        n = len(means)
        return cls(
            *identity,
            log2_slowdown=means,
            sd=_numbers(data, "sd", n, LEAST_SD, MOST_OCTAVES),
            p_fail=_numbers({"p_fail": 0.0, **data}, "p_fail", n, 0.0, 1.0),
        )

    def to_json(self) -> dict[str, Any]:
        """One line of a file."""
        data: dict[str, Any] = {
            "type": "answer",
            "key": self.key,
            "version": self.version,
            "kernel": self.kernel,
        }
        if self.text is not None:
            return data | {"text": self.text}
        if self.rows is not None:
            return data | {"probabilities": [list(row) for row in self.rows]}
        return data | {
            "log2_slowdown": list(self.log2_slowdown or ()),
            "sd": list(self.sd),
            "p_fail": list(self.p_fail),
        }

    def __len__(self) -> int:
        """Return the number of suffixes that it answers; 0 for a text."""
        return len(self.rows if self.rows is not None else self.log2_slowdown or ())

    def probabilities(self) -> Array:
        """Probabilities of each label per suffix, [n, labels]; times are spread over the bins as normals."""
        if self.rows is not None:
            return np.array(self.rows)
        forecasts = zip(self.log2_slowdown or (), self.sd, self.p_fail, strict=True)
        return np.concatenate([_bin_probabilities(mean, sd, fails) for mean, sd, fails in forecasts])


def _bin_probabilities(mean: float, sd: float, p_fail: float) -> Array:
    row = (1.0 - p_fail) * BINS.soft_targets(mean, sd)
    row[:, BINS.failure_index] = p_fail
    return np.asarray(row)


def _numbers(
    data: Mapping[str, Any], name: str, count: int | None, low: float, high: float
) -> tuple[float, ...]:
    """`count` numbers in a range; one number stands for all."""
    value = data.get(name)
    if count is not None and isinstance(value, int | float):
        value = [value] * count
    rule = f"`{name}` must be {'' if count is None else f'{count} '}numbers from {low:g} to {high:g}"
    if not isinstance(value, list) or not value or len(value) != (count or len(value)):
        raise RecordError(rule)
    fine = all(isinstance(v, int | float) and not isinstance(v, bool) and low <= v <= high for v in value)
    if not fine:  # NaN is in no range
        raise RecordError(rule)
    return tuple(map(float, value))


def _distributions(value: Any) -> tuple[tuple[float, ...], ...]:
    if not isinstance(value, list) or not value:
        raise RecordError("`probabilities` must be a list of rows")
    rows = tuple(_numbers({"probabilities": row}, "probabilities", None, 0.0, 1.0) for row in value)
    if len({len(row) for row in rows}) != 1 or any(abs(math.fsum(r) - 1.0) > _SUM_ERROR for r in rows):
        raise RecordError("rows of `probabilities` must have the same length, and sum to 1 each")
    return rows


@dataclass
class RecordedAnswers:
    """A file of answers."""

    model: str
    provenance: dict[str, Any]
    """`author` and, if they are told, `how`, `date` and `blind`: whether the measurements were unknown."""
    answers: dict[str, RecordedAnswer] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> RecordedAnswers:
        """Read a file. Raises `SettingsError` naming the line and what to do."""
        path = Path(name).expanduser()
        if not path.name.endswith(SUFFIXES):
            raise SettingsError(f"a file of answers is named *{' or *'.join(SUFFIXES)}, and {name} is not")
        try:
            state = path.stat()
        except OSError as error:
            raise SettingsError(
                f"a file of answers must be there, and {name} does not exist ({error.strerror}): correct the "
                "path, or write it with `forecast-autotune llm ask --import`"
            ) from None
        return _read_file(path, state.st_mtime_ns, state.st_size)

    def write(self, path: Path) -> None:
        """Put it there, in one step."""
        head = {"type": "answers", "schema": SCHEMA, "model": self.model, "provenance": self.provenance}
        write_json_lines(path, [head, *(a.to_json() for a in self.answers.values())])

    def find(self, versions: Sequence[str], prefix: str, suffixes: Sequence[str]) -> RecordedAnswer:
        """The answer to a question in one of these versions of its prompt. Raises `LLMError` where there is none."""
        keys = [question_key(version, prefix, suffixes) for version in versions]
        for key in keys:
            if key in self.answers:
                return self.answers[key]
        raise LLMError(
            f"no recorded answer for this question (key {keys[0][:12]}...): `forecast-autotune llm ask --export` "
            "writes open questions"
        )


@lru_cache(maxsize=8)
def _read_file(path: Path, _mtime_ns: int, _size: int) -> RecordedAnswers:
    """Read a file as it was changed at a time; the result is shared."""
    answers: RecordedAnswers | None = None
    for number, entry in _entries(path, _WRITE):
        try:
            if answers is None:
                answers = _header(entry)
            else:
                _require_type(entry, "answer")
                answer = RecordedAnswer.from_json(entry)
                answers.answers[answer.key] = answer
        except RecordError as error:
            raise SettingsError(f"{path}, line {number}: {error}: {_WRITE}") from None
    if answers is None:
        raise SettingsError(f"{path} is empty: write it with `forecast-autotune llm ask --import`")
    return answers


def _header(entry: Any) -> RecordedAnswers:
    _require_type(entry, "answers")
    if entry.get("schema") != SCHEMA:
        raise RecordError(f"schema must be {SCHEMA}, not {entry.get('schema')!r:.20}")
    model, provenance = entry.get("model"), entry.get("provenance")
    if not (isinstance(model, str) and model):
        raise RecordError("the first line must name the `model` that answered")
    if not isinstance(provenance, dict) or not provenance.get("author"):
        raise RecordError("the first line must state the `provenance`, with its `author`")
    return RecordedAnswers(model, dict(provenance))


def _require_type(entry: Any, kind: str) -> None:
    if not isinstance(entry, dict):
        raise RecordError("a line must be a JSON object")
    if entry.get("type") != kind:
        raise RecordError(f"the line's type must be {kind!r}, not {entry.get('type')!r:.40}")


class RecordedBackend(Backend):
    """A backend with the answers of its file alone; a file that grows is read again."""

    def __init__(self, location: str, left: str | None = None) -> None:
        """`left`: a file of questions to which those without an answer are added.

        Raises `SettingsError` for a file that cannot be read.
        """
        self.location = location
        self._questions = None if left is None else Path(left).expanduser()
        self._question_keys: set[str] = set()
        """Keys of the questions that this process has added."""
        self.name = f"recorded:{RecordedAnswers.read(location).model}"

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """See `Backend`. Raises `LLMError` for a question that nobody answered."""
        answers = RecordedAnswers.read(self.location)
        version = version_of_labels(labels)
        try:
            answer = answers.find([version], prefix, suffixes)
        except LLMError as error:
            self._note(OpenQuestion("forecast", version, "", prefix, suffixes=tuple(suffixes)), error)
            raise
        if answer.text is not None:
            raise LLMError("the recorded answer to this question is a text: probabilities are needed")
        rows = answer.probabilities()
        if rows.shape != (len(suffixes), len(labels)):
            raise LLMError(f"a recorded answer has shape {rows.shape}, not {(len(suffixes), len(labels))}")
        return BackendResponse(rows / rows.sum(axis=1, keepdims=True), np.ones(len(rows)))

    def _note(self, question: OpenQuestion, error: LLMError) -> None:
        """Add a question without an answer to the file of questions, if there is one."""
        if self._questions is None or question.key in self._question_keys:
            return
        try:
            append(self._questions, f"{json.dumps(question.to_json())}\n".encode(), exclusive=True)
        except OSError as problem:
            raise LLMError(
                f"{error}, and it cannot be kept in {self._questions}: {problem.strerror}"
            ) from problem
        self._question_keys.add(question.key)


def recorded_generator(location: str) -> TextGenerator:
    """The recorded text of a prompt, once, however many are asked for. Raises as `RecordedAnswers.read` does."""
    RecordedAnswers.read(location)

    def write(prompt: str, n: int) -> list[str]:
        answers = RecordedAnswers.read(location)
        versions = sorted({a.version for a in answers.answers.values() if a.text is not None})
        answer = answers.find(["", *filter(None, versions)], prompt, ())
        if answer.text is None:
            raise LLMError("the recorded answer to this question is no text")
        return [answer.text][:n]

    return write


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
_LABELS = {FORECAST_VERSION: len(BINS.labels)}


def write_questions(path: Path, questions: Iterable[OpenQuestion]) -> int:
    """Write a file of questions in one step, each question once; returns how many."""
    by_key = {q.key: q for q in questions}
    head = {"type": "questions", "schema": SCHEMA, "instructions": INSTRUCTIONS}
    write_json_lines(path, [head, *(q.to_json() for q in by_key.values())])
    return len(by_key)


def read_questions(path: Path) -> dict[str, OpenQuestion]:
    """The questions of a file by key. Raises `SettingsError` naming the line that is none."""
    questions = {}
    for number, entry in _entries(path, _EXPORT):
        if isinstance(entry, dict) and entry.get("type") == "questions":
            continue
        try:
            question = OpenQuestion.from_json(entry)
            if question.key != entry.get("key"):
                raise RecordError("its key is not that of its content")
        except RecordError as error:
            raise SettingsError(f"{path}, line {number}: {error}: {_EXPORT}") from None
        questions[question.key] = question
    return questions


@dataclass
class AnswerImport:
    """The result of taking answers into a file."""

    taken: list[RecordedAnswer] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Lines, and why."""


def read_answers(path: Path, questions: Mapping[str, OpenQuestion] | None) -> AnswerImport:
    """The answers in a file, each judged by itself; without `questions`, their keys and lengths are not.

    Raises `SettingsError` for a file that cannot be read.
    """
    result = AnswerImport()
    for number, entry in _entries(path):
        try:
            if not isinstance(entry, dict):
                raise RecordError("it is no JSON object")
            if entry.get("type") in ("questions", "answers"):
                continue
            if entry.get("type", "answer") != "answer":
                raise RecordError(f"its type must be 'answer', not {entry.get('type')!r:.40}")
            result.taken.append(_valid_answer(entry, questions))
        except RecordError as error:
            result.refused.append((number, str(error)))
    return result


def _valid_answer(entry: Mapping[str, Any], questions: Mapping[str, OpenQuestion] | None) -> RecordedAnswer:
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
    result = RecordedAnswers(model, dict(provenance))
    if path.exists():
        old = RecordedAnswers.read(str(path))
        fields = ("author", "how", "blind")
        if old.model != model or any(old.provenance.get(n) != provenance.get(n) for n in fields):
            raise SettingsError(
                f"a file holds the answers of one model, and {path} holds those of {old.model} by "
                f"{old.provenance['author']}, which came about otherwise: give another file"
            )
        result = RecordedAnswers(model, old.provenance | dict(provenance), dict(old.answers))
    result.answers.update({a.key: a for a in answers})
    result.write(path)
    return result


_WRITE = "correct the line, or write the file with `forecast-autotune llm ask --import`"
_EXPORT = "export the questions again with `forecast-autotune llm ask --export`"


def _entries(path: Path, remedy: str = "") -> Iterator[tuple[int, Any]]:
    """Number and value of every line; without a `remedy`, None for one that is no JSON."""
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
            if remedy:
                raise SettingsError(f"{path}, line {number}: not JSON ({error}): {remedy}") from None
            yield number, None
