"""Kinds of questions that `llm ask --export` can write; each is the very question that the tuner would ask."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from forecast_autotune import plugins
from forecast_autotune.commands.output import UsageError, require_packages
from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.commands.store_access import open_named_store
from forecast_autotune.llm.backend import BackendResponse
from forecast_autotune.llm.bins import AnswerLabel
from forecast_autotune.llm.calibration import LLMCalibration
from forecast_autotune.llm.open_question import OpenQuestion, version_of_labels
from forecast_autotune.llm.prompt import FORECAST_VERSION
from forecast_autotune.numerics import single_threaded_blas
from forecast_autotune.records.table import Table
from forecast_autotune.settings import Settings
from forecast_autotune.surrogates.default import DefaultSurrogate, default_surrogate
from forecast_autotune.surrogates.formula import AnalyticSurrogate
from forecast_autotune.surrogates.language_model.ensemble import EnsembleSurrogate, forced_trust
from forecast_autotune.surrogates.language_model.surrogate import LLMSurrogate
from forecast_autotune.tuning.loop import TaskForecaster
from forecast_autotune.tuning.replays.replay import task_of

GROUP = "forecast_autotune.questions"
QuestionSource = Callable[[argparse.Namespace], Iterator[OpenQuestion]]
"""The parsed command -> questions, as they are found."""


class QuestionCatcher:
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

    def ready(self) -> bool:
        """There is nothing to load."""
        return True

    def prepare(self) -> None:
        """There is nothing to load."""

    def close(self) -> None:
        """Nothing is held."""


def forecast_questions(options: argparse.Namespace) -> Iterator[OpenQuestion]:
    """What a decision asks about each problem before anything is measured, with no relatives known."""
    require_packages("writing questions", "jinja2")
    settings = Settings.from_environment()
    plain = default_surrogate(settings.model)
    if options.surrogate == "analytic":
        plain = DefaultSurrogate(AnalyticSurrogate())
    calibration, gate = forced_trust(LLMCalibration(QuestionCatcher.name, FORECAST_VERSION))
    for table in asked_tables(options):
        catcher = QuestionCatcher()
        model = LLMSurrogate(catcher, calibration)
        surrogate = EnsembleSurrogate(plain, model, patient=True, gate=gate)
        # As a decision does: the first forecast is made with the traces of all or many.
        forecaster = TaskForecaster(task_of(table), surrogate)
        forecaster.traces.trace_initial()
        with single_threaded_blas():
            forecaster.forecast((), ())
        kernel, label = table.problem.kernel.name, str(table.problem.extra.get("label") or table.problem.id)
        for version, prefix, suffixes in catcher.asked:
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
