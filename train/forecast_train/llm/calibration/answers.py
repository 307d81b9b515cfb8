"""Ask a language model about recorded problems, and keep every answer: calibrations and scores are made of them.

Each family's problems are asked about with a learned surrogate that has not seen the family, so that the model's
value beside it is not measured on the data that it was fitted to.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.errors import RecordError
from forecast_autotune.features.candidate_list import CandidateList
from forecast_autotune.llm.backend import Backend
from forecast_autotune.llm.open_question import OpenQuestion
from forecast_autotune.records import digest
from forecast_autotune.records.codec import Record, json_option
from forecast_autotune.records.named_lines import read_document
from forecast_autotune.records.table import Table
from forecast_autotune.store.files import append
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.questions import (
    ForecastQuestion,
    build_formula_question,
    select_candidates,
)
from forecast_autotune.surrogates.prior import Prior
from forecast_autotune.surrogates.protocol import Query
from forecast_train.splits import family_of, kernel_of, make_folds
from forecast_train.surrogate.fit import fit

Array = npt.NDArray[np.float64]
Rows = npt.NDArray[np.intp]
FitSurrogate = Callable[[Sequence[Table]], AnalyticSurrogate]
"""Training tables -> the surrogate that a model is compared with."""


def _read_array(value: Any) -> Array:
    # null becomes NaN.
    return np.array(value, dtype=float)


def _rounded_json(values: Any) -> Any:
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [_rounded_json(v) for v in values]
    return round(values, 6) if math.isfinite(values) else None


_ARRAY = json_option(read=_read_array, write=_rounded_json)
"""Six digits; failures are null."""


@dataclass(frozen=True, eq=False)
class ModelAnswers(
    Record,
    label="answer of a model",
    remedy="delete it, and ask again",
):
    """A model's answers about one problem, and the truth. The model was asked about m of n candidates."""

    problem: str
    label: str
    kernel: str
    family: str
    device: str
    """Slug."""
    language: str
    learned: Array = field(metadata=_ARRAY)
    """log2 milliseconds as the learned surrogate has it, [n]."""
    log2_ms: Array = field(metadata=_ARRAY)
    """The truth, [n]; NaN for failures."""
    rows: Rows = field(
        metadata=json_option(
            read=lambda value: np.array(value, dtype=np.intp), write=lambda rows: rows.tolist()
        )
    )
    """Rows of the candidates that were asked about, [m]."""
    stated: Array = field(metadata=_ARRAY)
    """Probabilities of the labels, [m, labels]; rows of zeros where the model said nothing."""
    mass: Array = field(metadata=_ARRAY)
    """[m]"""
    ratios: Array = field(metadata=_ARRAY)
    """True log2(time / reference time), [m]; NaN for failures."""
    reference: str
    """`Candidate.id` of what times were compared with."""
    reference_log2_ms: float
    """Its time as it was shown."""
    model: str
    prompt: str
    characters: int
    """Length of the longest prompt: prefix and one suffix."""
    tokens: int
    seconds: float
    candidates: tuple[str, ...] = ()
    """`Candidate.id` of each of `rows`: a decision lists candidates in an order of its own, [m]."""

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Whether the model said anything of each candidate that it was asked about, [m]."""
        return np.asarray(self.stated.sum(axis=1) > 0.5)


def collect_answers(
    tables: Sequence[Table],
    backend: Backend,
    *,
    learn: FitSurrogate = fit,
    timeout_s: float = 600.0,
    kept: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[ModelAnswers]:
    """Ask about every table, in the order of their families.

    With `kept`, answers are appended to that JSON Lines file as they
    come, and those found there are not asked for again. Raises `SplitError` for a single family, `LLMError`
    when the model fails, and `RecordError` for a damaged file.
    """
    answers_by_name = _read_collected(kept)
    answers: list[ModelAnswers] = []
    identity = backend.identity()
    for count, (table, surrogate) in enumerate(_cross_fitted(tables, learn), 1):
        question = question_about(table, surrogate.prior)
        name = digest(identity, question.question.prompt.prefix, *question.question.prompt.suffixes)
        if name not in answers_by_name:
            answers_by_name[name] = question.ask(backend, timeout_s)
            if kept is not None:
                line = json.dumps({"asked": name, **answers_by_name[name].to_json()}, allow_nan=False)
                append(kept, f"{line}\n".encode(), exclusive=True)
        answers.append(answers_by_name[name])
        if progress is not None:
            progress(count, len(tables), answers_by_name[name].label)
    return answers


def _read_collected(path: Path | None) -> dict[str, ModelAnswers]:
    if path is None or not path.is_file():
        return {}
    results = {}
    for line in read_document(path).splitlines():
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut off by a kill: it is asked for again
        if not isinstance(data, dict):
            raise RecordError(f"{path}: a line is no JSON object: name another file for --answers")
        name = str(data.pop("asked", ""))
        results[name] = ModelAnswers.from_json(data)
    return results


def _cross_fitted(tables: Sequence[Table], learn: FitSurrogate) -> Iterator[tuple[Table, AnalyticSurrogate]]:
    """Every table with a surrogate that was fitted without its family."""
    for fold in make_folds(tables, "family"):
        surrogate = learn(fold.train)
        for table in fold.test:
            yield table, surrogate


@dataclass(frozen=True, eq=False)
class TableQuestion:
    """A question about a table, ready to be asked."""

    table: Table
    prior: Prior
    question: ForecastQuestion

    def ask(self, backend: Backend, timeout_s: float) -> ModelAnswers:
        """The model's answer beside the truth. Raises `LLMError`."""
        prompt, problem = self.question.prompt, self.table.problem
        answer = backend.forecast(prompt.prefix, prompt.suffixes, prompt.labels, timeout_s=timeout_s)
        log2_ms = np.array(self.table.log2_ms())
        usage, candidates = answer.usage, list(self.table.by_candidate())
        return ModelAnswers(
            problem.id,
            str(problem.extra.get("label") or f"{problem.kernel.name}/{problem.id}"),
            kernel_of(problem),
            family_of(problem),
            problem.device.slug,
            problem.kernel.language,
            self.prior.mean,
            log2_ms,
            self.question.rows,
            answer.probabilities,
            answer.mass,
            self.question.ratios(log2_ms),
            self.question.against,
            self.question.log2_ms,
            backend.name,
            prompt.version,
            len(prompt.prefix) + max(map(len, prompt.suffixes)),
            usage.prompt_tokens + usage.output_tokens,
            usage.seconds,
            tuple(candidates[row].id for row in self.question.rows),
        )


def question_about(table: Table, believe: Callable[[Query], Prior]) -> TableQuestion:
    """The question that an ensemble would ask about a problem of which nothing is known yet."""
    candidates = CandidateList(table.by_candidate())
    query = Query(table.problem, candidates, table.grids(), ttir=table.problem.ttir)
    before = believe(query)
    rows = select_candidates(before, before.mean)
    return TableQuestion(table, before, build_formula_question(query, among=rows, believed=before.mean))


def calibration_questions(options: argparse.Namespace) -> Iterator[OpenQuestion]:
    """The questions of `train calibrate-llm`, for answers given offline (`llm ask --export --kind calibration`).

    Raises `SplitError` for a single family.
    """
    for table, surrogate in _cross_fitted(load_tables(options), fit):
        question = question_about(table, surrogate.prior).question
        label = str(table.problem.extra.get("label") or table.problem.id)
        yield OpenQuestion.of_prompt("calibration", question.prompt, table.problem.kernel.name, label)
