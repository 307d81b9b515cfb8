"""`train calibrate-llm`: what a language model's forecasts are worth, found out on recorded problems."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import Output, Usage, at_least_one
from forecast_autotune.commands.tables import recorded
from forecast_autotune.settings import Settings

if TYPE_CHECKING:
    from forecast_autotune.records.table import Table
    from forecast_train.llm.hearing import Heard


def calibrate(options: argparse.Namespace, output: Output) -> int:
    """Ask a model about tables, fit its calibration, replay what it saves, and write one JSON file."""
    from dataclasses import replace

    from rich.text import Text

    from forecast_autotune.llm.calibration import write
    from forecast_train.evaluation.splits import SplitError
    from forecast_train.llm.calibrate import calibrate as fitted
    from forecast_train.llm.saving import play, summarize
    from forecast_train.surrogate.fit import fit

    at_least_one(options, "sample", "seeds")
    settings = Settings.from_environment()
    if options.noted:
        return _again(options, settings, output)
    tables = recorded(options)
    begin = time.perf_counter()
    try:
        heard = ask(tables, options.llm, output, sample=options.sample, kept=_kept(options))
        made = fitted(heard)
        saving = None
        if made.skilled:
            with output.progress("replaying with and without it"):
                saving = summarize(play(tables, heard, learn=fit, seeds=range(options.seeds)))
    except SplitError as error:
        raise Usage(str(error)) from error
    seconds = round(time.perf_counter() - begin, 1)
    about = {**made.about, "seconds": seconds, "saving": saving.to_json() if saving else None}
    made = replace(made, saved=saving.sure if saving else 0.0, about=about)
    out = _out(options, heard[0].model, settings)
    write(out, made)
    found = {"path": str(out), "skilled": made.skilled, **made.to_json()}
    output.emit(found, Text(_told(found, made.weights["pooled"].mean, made.saved)))
    return 0


def _again(options: argparse.Namespace, settings: Settings, output: Output) -> int:
    """Fit the calibration anew to what was noted with measurements; nothing is asked."""
    from rich.text import Text

    from forecast_autotune.llm.calibration import find, write
    from forecast_autotune.llm.prompt import FORECAST
    from forecast_autotune.surrogates.selection import opened, places
    from forecast_train.evaluation.splits import SplitError
    from forecast_train.llm.noted import noted, recalibrated

    if not options.tables:
        raise Usage("--noted needs TABLE files of your own measurements, as `export` writes them")
    name = opened(options.llm, settings.cache_dir).name
    old = find(name, FORECAST, places(options.llm, name, settings.cache_dir))
    if not old.weights:
        raise Usage(f"--noted: {name} has no calibration to correct: run this without --noted first")
    heard = noted(recorded(options), name)
    if not heard:
        raise Usage(f"--noted: {name} was asked about none of these measurements")
    try:
        made = recalibrated(heard, old)
    except SplitError as error:
        raise Usage(f"--noted: {error}") from error
    out = _out(options, name, settings)
    write(out, made)
    found = {"path": str(out), "skilled": made.skilled, **made.to_json()}
    output.emit(found, Text(_told(found, made.weights["pooled"].mean, made.saved)))
    return 0


def ask(
    tables: list[Table], spec: str, output: Output, *, sample: int | None = None, kept: Path | None = None
) -> list[Heard]:
    """Everything that a model says of these tables, with a progress bar. Raises as `hear` does."""
    from forecast_autotune.surrogates.selection import opened
    from forecast_train.llm.hearing import hear

    backend = opened(spec, Settings.from_environment().cache_dir)
    with output.progress(f"asking {backend.name}", len(tables)) as progress:
        return hear(tables, backend, sample=sample, kept=kept, progress=progress)


def _kept(options: argparse.Namespace) -> Path | None:
    if options.answers is None:
        return None
    path = Path(options.answers)
    if path.suffix != ".jsonl" or not path.absolute().parent.is_dir():
        raise Usage(f"--answers {path}: the name must end in .jsonl, in a directory that exists")
    return path


def _out(options: argparse.Namespace, model: str, settings: Settings) -> Path:
    """The file given, else beside the adapter, else in the cache directory: where it is looked for."""
    from forecast_autotune.llm.calibration import FILE
    from forecast_autotune.llm.spec import parsed
    from forecast_autotune.surrogates.selection import places

    if options.out is not None:
        return Path(options.out)
    adapter = parsed(options.llm).options.get("adapter")
    if adapter and Path(adapter).is_dir():
        return Path(adapter) / FILE
    return places(options.llm, model, settings.cache_dir)[-1]


def _told(found: dict[str, object], weight: float, saved: float) -> str:
    if not found["skilled"]:
        worth = "it knows nothing that the learned surrogate does not: it will not be asked"
    else:
        worth = f"weight {weight:.2f} beside the learned surrogate; saves {saved:.0%} of the measurements"
    return f"{found['model']}: {worth}\nwritten: {found['path']}"
