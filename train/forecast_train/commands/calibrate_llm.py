"""`train calibrate-llm`: what a language model's forecasts are worth, found out on recorded problems."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import Output, UsageError, output_path
from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.llm.providers import provider
from forecast_autotune.settings import Settings

if TYPE_CHECKING:
    from forecast_autotune.llm.calibration import LLMCalibration
    from forecast_autotune.records.table import Table
    from forecast_train.llm.calibration.answers import ModelAnswers


def calibrate(options: argparse.Namespace, output: Output) -> int:
    """Ask a model about tables, fit its calibration, replay what it saves, and write one JSON file."""
    from dataclasses import replace

    from forecast_autotune.llm.calibration import probe_digest
    from forecast_autotune.surrogates.factory import calibration_paths
    from forecast_train.llm.calibration.fit import fit_calibration
    from forecast_train.llm.calibration.saving import estimate_saving, replay_pairs
    from forecast_train.splits import SplitError

    settings = Settings.from_environment()
    kept = None if options.answers is None else output_path("--answers", options.answers, ".jsonl")
    provider().check(options.llm)
    tables = load_tables(options)
    start = time.perf_counter()
    try:
        answers = ask_about_tables(tables, options.llm, output, kept=kept)
        calibration, saving = fit_calibration(answers), None
        if calibration.skilled:
            with output.progress("replaying with and without it"):
                pairs = replay_pairs(tables, answers, seeds=range(options.seeds))
                saving = estimate_saving(pairs)
                calibration = replace(calibration, saved=saving.expected)
    except SplitError as error:
        raise UsageError(str(error)) from error
    seconds = round(time.perf_counter() - start, 1)
    places = calibration_paths(options.llm, answers[0].model, settings.cache_dir)
    about = {**calibration.about, "seconds": seconds, "saving": saving.to_json() if saving else None}
    about["probe"] = probe_digest(places)
    path = _output_path(options, answers[0].model, settings)
    _write(replace(calibration, about=about), path, output)
    return 0


def _write(calibration: LLMCalibration, path: Path, output: Output) -> None:
    """Write a calibration, and say what the model is worth."""
    from forecast_autotune.llm.calibration import write
    from forecast_autotune.report.table import shown_text

    write(path, calibration)
    about = {"path": str(path), "skilled": calibration.skilled, **calibration.to_json()}
    output.emit(about, shown_text(_summary_text(calibration, path), lines=True))


def ask_about_tables(
    tables: list[Table], spec: str, output: Output, *, kept: Path | None = None
) -> list[ModelAnswers]:
    """Everything that a model says of these tables, with its progress. Raises as `collect_answers` does."""
    from forecast_autotune.surrogates.factory import open_backend
    from forecast_train.llm.calibration.answers import collect_answers

    backend = open_backend(spec, Settings.from_environment().cache_dir)
    with output.progress(f"asking {backend.name}") as progress:
        return collect_answers(tables, backend, kept=kept, progress=progress)


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


def _summary_text(calibration: LLMCalibration, path: Path) -> str:
    """The weight, with what it is fitted to and gains; what asking saves; the file."""
    about = calibration.about
    worth = "it knows nothing that the learned surrogate does not: it will not be asked"
    if calibration.skilled:
        worth = (
            f"weight {calibration.weight.mean:.2f} beside the learned surrogate; "
            f"saves {calibration.saved:.0%} of the measurements"
        )
    lines = [
        f"{calibration.model}: {worth}",
        f"fitted to {about['problems']} problems of {len(about['families'])} families; "
        f"log score gained: {about['log_score']:.4f} nats per candidate",
    ]
    if calibration.pace.answer_s:
        lines.append(f"an answer takes {calibration.pace.answer_s:.3g} s (median)")
    return "\n".join([*lines, f"written: {path}"])
