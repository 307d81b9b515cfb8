"""`llm ask`: questions to a language model that is served nowhere near, and its answers, as files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from forecast_autotune import plugins
from forecast_autotune.commands.output import Output, UsageError, output_path, require_packages
from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.commands.store_access import check_folder, open_named_store
from forecast_autotune.llm.backend import Backend, BackendResponse
from forecast_autotune.llm.bins import AnswerLabel
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.open_question import OpenQuestion, version_of_labels
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.printable import printable
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.default import DefaultSurrogate, default_surrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate, forced_trust
from forecast_autotune.surrogates.language_model.surrogate import LLMSurrogate
from forecast_autotune.tuning.loop import TaskForecaster, in_row_order
from forecast_autotune.tuning.replays.replay import task_of
from forecast_integrations.models.recorded import (
    SUFFIXES,
    RecordedAnswers,
    extend,
    read_answers,
    read_questions,
    write_questions,
)

_MAX_SHOWN_REFUSALS = 20


def ask(options: argparse.Namespace, output: Output) -> int:
    """Write the open questions, or take answers to them; the exit status is 1 where an answer was refused."""
    return _export(options, output) if options.export is not None else _import(options, output)


def _export(options: argparse.Namespace, output: Output) -> int:
    from forecast_autotune.report.table import shown_text

    path, source = output_path("--export", options.export, *SUFFIXES), questions_of(options.kind)
    if options.store is not None:
        check_folder("--store", options.store)
    known = _known_answers(options.to)
    count = write_questions(path, _open(source(options), known, output))
    answered = f"; left out what {options.to} answers" if options.to else ""
    text = f"{count} open question{'' if count == 1 else 's'} written to {path}{answered}\n"
    text += f"answers: forecast-autotune llm ask --import ANSWERS.jsonl --questions {path} --model NAME --author NAME "
    text += f"--to {options.to or 'FILE.jsonl'}"
    output.emit({"path": str(path), "kind": options.kind, "questions": count}, shown_text(text, lines=True))
    return 0


def _open(questions: Iterable[OpenQuestion], keys: Iterable[str], output: Output) -> Iterator[OpenQuestion]:
    seen_keys = set(keys)
    with output.progress("asking") as progress:
        for number, question in enumerate(questions, 1):
            progress(number, number, question.label)
            if question.key not in seen_keys:
                yield question


def _import(options: argparse.Namespace, output: Output) -> int:
    from forecast_autotune.report.table import shown_text

    if missing := [f"--{name}" for name in ("model", "author", "to") if not getattr(options, name)]:
        raise UsageError(
            f"--import needs {' and '.join(missing)}: who answered, who vouches, and where to keep it"
        )
    path = output_path("--to", options.to, *SUFFIXES)
    questions = None if options.questions is None else read_questions(Path(options.questions))
    answers = read_answers(Path(options.imported), questions)
    if answers.taken:
        provenance = {
            "author": options.author,
            "how": options.how or "",
            "date": datetime.now(UTC).date().isoformat(),
            "blind": options.blind,
        }
        extend(path, options.model, provenance, answers.taken)
    refused = [{"line": number, "why": why} for number, why in answers.refused]
    lines = [f"{len(answers.taken)} answers taken into {path}, {len(refused)} refused"]
    lines += [f"{options.imported}, line {n}: {why}" for n, why in answers.refused[:_MAX_SHOWN_REFUSALS]]
    if len(refused) > _MAX_SHOWN_REFUSALS:
        lines.append(f"and {len(refused) - _MAX_SHOWN_REFUSALS} more")
    if answers.taken:
        lines.append(f"use: FORECAST_AUTOTUNE_LLM=recorded:{path}")
    data = {"path": str(path), "taken": len(answers.taken), "refused": refused}
    output.emit(data, shown_text("\n".join(map(printable, lines)), lines=True))
    return 1 if refused or not answers.taken else 0


def _known_answers(name: str | None) -> list[str]:
    return (
        []
        if name is None or not Path(name).expanduser().exists()
        else list(RecordedAnswers.read(name).answers)
    )


GROUP = "forecast_autotune.questions"
QuestionSource = Callable[[argparse.Namespace], Iterator[OpenQuestion]]
"""The parsed command -> questions, as they are found."""


class QuestionRecorder(Backend):
    """A backend that says nothing and remembers what it was asked."""

    name = "nobody"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []
        """Version, prefix and suffixes."""

    def forecast(
        self, prefix: str, suffixes: Sequence[str], labels: Sequence[AnswerLabel], *, timeout_s: float
    ) -> BackendResponse:
        """See `Backend`: abstains."""
        self.asked.append((version_of_labels(labels), prefix, tuple(suffixes)))
        return BackendResponse(np.zeros((len(suffixes), len(labels))), np.zeros(len(suffixes)))


def forecast_questions(options: argparse.Namespace) -> Iterator[OpenQuestion]:
    """The questions of a decision about each problem before anything is measured, with no relatives known."""
    require_packages("writing questions", "jinja2")
    settings = Settings.from_environment()
    plain = default_surrogate(settings.model)
    if options.surrogate == "analytic":
        plain = DefaultSurrogate(AnalyticSurrogate())
    calibration, gate = forced_trust(LLMCalibration(QuestionRecorder.name, FORECAST_VERSION))
    for table in asked_tables(options):
        recorder = QuestionRecorder()
        model = LLMSurrogate(recorder, calibration)
        surrogate = EnsembleSurrogate(plain, model, patient=True, gate=gate)
        # As a decision does: the first forecast is made with the traces of all or many.
        forecaster = TaskForecaster(in_row_order(task_of(table)), surrogate)
        forecaster.traces.trace_initial()
        with single_threaded_blas():
            forecaster.forecast((), ())
        kernel, label = table.problem.kernel.name, str(table.problem.extra.get("label") or table.problem.id)
        for version, prefix, suffixes in recorder.asked:
            yield OpenQuestion("forecast", version, kernel, prefix, label, suffixes)


def asked_tables(options: argparse.Namespace) -> list[Table]:
    """The tables that a command names: files, a store, or what ships."""
    if options.store is None:
        return load_tables(options)
    if options.tables:
        raise UsageError("--store and TABLE files exclude each other: give one")
    return [t for t in open_named_store(options).tables() if len(t.by_candidate()) > 1]


KINDS: dict[str, QuestionSource] = {"forecast": forecast_questions}
"""Kinds by name; other packages add theirs as entry points of `GROUP`."""


def questions_of(kind: str) -> QuestionSource:
    """The source of a kind. Raises `UsageError` naming the known ones."""
    if kind in KINDS:
        return KINDS[kind]
    known = sorted({*KINDS, *plugins.names(GROUP)})
    if kind not in known:
        raise UsageError(f"--kind {kind}: choose from {', '.join(known)}")
    source: QuestionSource = plugins.load(GROUP, kind)
    return source
