"""`eval`: surrogates on kernels that they have not seen, from tables and without a GPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from forecast_autotune.commands.output import Output, UsageError
from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.llm.providers import provider
from forecast_autotune.settings import Settings

if TYPE_CHECKING:
    from forecast_autotune.records.table import Table
    from forecast_train.evaluation.methods import FitSurrogate


def evaluate(options: argparse.Namespace, output: Output) -> int:
    """Evaluate methods on tables, print the report, and write it to a folder if asked to."""
    from forecast_train.evaluation import evaluate as run
    from forecast_train.evaluation import summarize
    from forecast_train.evaluation.methods import LEARNED_WITH_LLM, LLM_ONLY, methods_by_name
    from forecast_train.evaluation.summary import shown
    from forecast_train.splits import SplitError, spread_over_kernels

    methods = _methods(options.methods)
    models = (LLM_ONLY, LEARNED_WITH_LLM) if options.llm is not None else ()
    if options.subject is not None and options.subject not in (*methods, *models):
        raise UsageError(f"--subject {options.subject}: it must be one of --methods {','.join(methods)}")
    out = None if options.out is None else Path(options.out)
    if out is not None and out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: that is a file; name a directory")
    if options.llm is not None:
        provider().check(options.llm)
    tables = load_tables(options)
    if options.limit is not None:
        tables = spread_over_kernels(tables, options.limit)
    fits = methods_by_name(methods)
    if options.llm is not None:
        fits |= _language_model_fits(tables, options.llm, output, out)
    try:
        with output.progress("evaluating") as progress:
            result = run(
                tables,
                leave_out=options.leave_out,
                methods=fits,
                seeds=options.seeds,
                jobs=options.jobs,
                out=out,
                settings=Settings.from_environment(),
                progress=progress,
            )
    except SplitError as error:
        raise UsageError(f"--leave-out {options.leave_out}: {error}") from error
    summary = summarize(result, subject=options.subject)
    width = 0 if output.as_json else output.console.width
    output.emit(summary.to_json(), *(() if output.as_json else (shown(summary, width=width),)))
    if out is not None:
        output.remark(f"written: {summary.write(out)}")
    return 0


def _methods(text: str | None) -> list[str]:
    from forecast_train.evaluation.methods import methods, methods_by_name

    names = list(methods) if text is None else [name.strip() for name in text.split(",") if name.strip()]
    try:
        return list(methods_by_name(names))
    except ValueError as error:
        raise UsageError(f"--methods {text}: {error}") from error


def _language_model_fits(
    tables: list[Table], llm: str, output: Output, out: Path | None
) -> dict[str, FitSurrogate]:
    """The language model's methods; it is asked first, and its answers are kept with the results."""
    from forecast_train.commands.calibrate_llm import ask_about_tables
    from forecast_train.evaluation.methods import llm_methods

    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    return llm_methods(
        ask_about_tables(tables, llm, output, kept=None if out is None else out / "answers.jsonl")
    )
