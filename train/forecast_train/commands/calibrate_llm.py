"""`train calibrate-llm`: what a language model's forecasts are worth, found out on recorded problems."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import Output, UsageError
from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.llm.providers import provider
from forecast_autotune.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forecast_autotune.llm.calibration import LLMCalibration
    from forecast_autotune.records.table import Table
    from forecast_autotune.surrogates.formula import AnalyticSurrogate
    from forecast_train.llm.calibration.answer_collection import FitSurrogate, ModelAnswers


def calibrate(options: argparse.Namespace, output: Output) -> int:
    """Ask a model about tables, fit its calibration, replay what it saves, and write one JSON file."""
    from dataclasses import replace

    from forecast_autotune.llm.calibration import write
    from forecast_autotune.report.table import shown_text
    from forecast_train.evaluation.splits import SplitError
    from forecast_train.llm.calibration.calibrate import fit_calibration as fitted
    from forecast_train.llm.calibration.measured_evidence import measured_evidence
    from forecast_train.llm.calibration.saving_estimate import replay_pairs, with_saving

    settings = Settings.from_environment()
    if options.noted:
        return _refit(options, settings, output)
    kept = _answers_path(options)
    provider().check(options.llm)
    tables = load_tables(options)
    begin = time.perf_counter()
    try:
        heard = ask_about_tables(tables, options.llm, output, sample=options.sample, kept=kept)
        learn, saving = _fit_once(), None
        with output.progress("comparing them after measurements"):
            made = fitted(heard, later=measured_evidence(tables, heard, learn))
        if made.skilled:
            with output.progress("replaying with and without it"):
                seeds = range(options.seeds)
                made, saving = with_saving(made, replay_pairs(tables, heard, learn=learn, seeds=seeds))
    except SplitError as error:
        raise UsageError(str(error)) from error
    seconds = round(time.perf_counter() - begin, 1)
    about = {**made.about, "seconds": seconds, "saving": saving.to_json() if saving else None}
    made = replace(made, about=about)
    out = _output_path(options, heard[0].model, settings)
    write(out, made)
    found = {"path": str(out), "skilled": made.skilled, **made.to_json()}
    output.emit(found, shown_text(_summary_text(made, out), lines=True))
    return 0


def _refit(options: argparse.Namespace, settings: Settings, output: Output) -> int:
    """Fit the calibration anew to what was noted with measurements; nothing is asked."""
    from forecast_autotune.llm.calibration import find_calibration, write
    from forecast_autotune.llm.prompt import FORECAST_VERSION
    from forecast_autotune.report.table import shown_text
    from forecast_autotune.surrogates.factory import calibration_paths, open_backend
    from forecast_train.evaluation.splits import SplitError
    from forecast_train.llm.calibration.stored_answers import recalibrate, stored_answers

    if not options.tables:
        raise UsageError("--noted needs TABLE files of your own measurements, as `export` writes them")
    provider().check(options.llm, contact=False)
    name = open_backend(options.llm, settings.cache_dir).name
    old = find_calibration(name, FORECAST_VERSION, calibration_paths(options.llm, name, settings.cache_dir))
    if not old.weights:
        raise UsageError(f"--noted: {name} has no calibration to correct: run this without --noted first")
    heard = stored_answers(load_tables(options), name)
    if not heard:
        raise UsageError(f"--noted: {name} was asked about none of these measurements")
    try:
        made = recalibrate(heard, old)
    except SplitError as error:
        raise UsageError(f"--noted: {error}") from error
    out = _output_path(options, name, settings)
    write(out, made)
    found = {"path": str(out), "skilled": made.skilled, **made.to_json()}
    output.emit(found, shown_text(_summary_text(made, out), lines=True))
    return 0


def ask_about_tables(
    tables: list[Table], spec: str, output: Output, *, sample: int | None = None, kept: Path | None = None
) -> list[ModelAnswers]:
    """Everything that a model says of these tables, with a progress bar. Raises as `collect_answers` does."""
    from forecast_autotune.surrogates.factory import open_backend
    from forecast_train.llm.calibration.answer_collection import collect_answers

    backend = open_backend(spec, Settings.from_environment().cache_dir)
    with output.progress(f"asking {backend.name}", len(tables)) as progress:
        return collect_answers(tables, backend, sample=sample, kept=kept, progress=progress)


def _answers_path(options: argparse.Namespace) -> Path | None:
    if options.answers is None:
        return None
    path = Path(options.answers)
    if path.suffix != ".jsonl" or not path.absolute().parent.is_dir():
        raise UsageError(f"--answers {path}: the name must end in .jsonl, in a directory that exists")
    return path


def _output_path(options: argparse.Namespace, model: str, settings: Settings) -> Path:
    """The file given, else beside the adapter, else in the cache directory: where it is looked for."""
    from forecast_autotune.llm.calibration import FILE
    from forecast_autotune.llm.spec import parsed
    from forecast_autotune.surrogates.factory import calibration_paths

    if options.out is not None:
        return Path(options.out)
    adapter = parsed(options.llm).options.get("adapter")
    if adapter and Path(adapter).is_dir():
        return Path(adapter) / FILE
    return calibration_paths(options.llm, model, settings.cache_dir)[-1]


def _fit_once() -> FitSurrogate:
    """`fit`, once per training side."""
    from forecast_train.surrogate.fit import fit

    made: dict[frozenset[str], AnalyticSurrogate] = {}

    def learn(tables: Sequence[Table]) -> AnalyticSurrogate:
        key = frozenset(t.problem.id for t in tables)
        if key not in made:
            made[key] = fit(tables)
        return made[key]

    return learn


def _summary_text(made: LLMCalibration, path: Path) -> str:
    """The weights by kind of question, with what they are fitted to and gain; what asking saves; the file."""
    if not made.skilled:
        worth = "it knows nothing that the learned surrogate does not: it will not be asked"
    else:
        weight = made.weights["pooled"].mean
        worth = (
            f"weight {weight:.2f} beside the learned surrogate; saves {made.saved:.0%} of the measurements"
        )
    lines = [f"{made.model}: {worth}"]
    if made.questions:
        lines.append("question        weight  problems  families  log score gained  measurements saved")
    for name, q in made.questions.items():
        saved = "" if q.saved is None else f"{q.saved:.0%}"
        row = f"{name:<14}{q.mean:>8.3f}{q.problems:>10}{q.families:>10}{q.log_score:>18.4f}{saved:>20}"
        lines.append(row.rstrip())
    if made.known:
        factors = ", ".join(f"{made.weights['pooled'].mean * f:.3f}" for f in made.known)
        lines.append(f"weight with 0, 1 to 3, and more measurements known: {factors}")
    if made.pace.answer_s:
        lines.append(f"an answer takes {made.pace.answer_s:.3g} s (median)")
    return "\n".join([*lines, f"written: {path}"])
