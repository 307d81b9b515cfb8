"""`train surrogate`, `train data`, `train llm`, `train grpo`, `train export`, ...: from measurements to models."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.commands.output import Output, UsageError, output_path, require_packages
from forecast_autotune.commands.recorded_tables import load_tables
from forecast_autotune.file_access import open_named_output

if TYPE_CHECKING:
    from forecast_autotune.records.table import Table


def surrogate(options: argparse.Namespace, output: Output) -> int:
    """Fit the learned surrogate to tables, and write it as one npz file."""
    from forecast_autotune.report.table import shown_text
    from forecast_train.splits import hand_of, rows_by_tool, tools_text
    from forecast_train.surrogate import fit_model
    from forecast_train.surrogate.fit import FitSettings

    require_packages("fitting", "sklearn", "lightgbm")
    out = output_path("--out", options.out, ".npz")
    tables = load_tables(options)
    begin = time.perf_counter()
    recipe = FitSettings(trees=options.trees)
    with output.progress("fitting"):
        model = fit_model(tables, seed=options.seed, recipe=recipe)
    model.save(out)
    seconds = time.perf_counter() - begin
    about = dict(model.about or {})
    about["tools"] = rows_by_tool(hand_of(t.problem) for t in tables for _ in t.measurements)
    results = {**about, "path": str(out), "bytes": out.stat().st_size, "seconds": round(seconds, 2)}
    output.emit(
        results,
        shown_text(
            f"fitted to {about['rows']} rows of {about['problems']} problems of {about['kernels']} kernels "
            f"in {seconds:.1f} s: {out} ({out.stat().st_size / 1e6:.2f} MB)\n"
            f"{tools_text(about['tools'])}; those without IR, or facts of it, teach a surrogate nothing\n"
            f"use it with FORECAST_AUTOTUNE_MODEL={out}",
            lines=True,
        ),
    )
    return 0


def data(options: argparse.Namespace, output: Output) -> int:
    """Turn tables, caches of others or the store into a data set: three Parquet files and a card."""
    from forecast_autotune import __version__
    from forecast_autotune.report.table import shown_text
    from forecast_train.llm.data.build import (
        ExampleSettings,
        SurrogateFor,
        build_examples,
        cross_fit_sides,
        formula_surrogate,
    )
    from forecast_train.llm.data.examples import dataset_card, dataset_summary, write_examples
    from forecast_train.splits import SplitError, split_sides, tools_text

    require_packages("a data set", "pyarrow")
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: that is a file; name a directory")
    tables = _store_tables(options) if options.from_store else _tables_given(options)
    recipe = ExampleSettings(moments=options.moments, most=options.most)
    hold_out = [name for name in (options.hold_out or "").split(",") if name]
    try:
        sides = split_sides(tables, hold_out=hold_out, seed=options.seed)
    except SplitError as error:
        raise UsageError(str(error)) from error
    out.mkdir(parents=True, exist_ok=True)  # before work of minutes, which would be lost without it
    examples = {}
    believe: dict[str, SurrogateFor] = dict.fromkeys(sides, formula_surrogate)
    if options.guess == "learned":
        with output.progress("fitting what guesses") as progress:
            believe = cross_fit_sides(sides, progress=lambda n, of: progress(n, of, "families left out"))
    with output.progress("building") as progress:
        count = 0
        for side, side_tables in sides.items():
            # What is known of other shapes must come from the same side.
            def step(table: Table) -> None:
                nonlocal count
                count += 1
                progress(count, len(tables), table.problem.kernel.name)

            examples[side] = build_examples(
                side_tables, recipe, believe=believe[side], seed=options.seed, progress=step
            )
    rows = {side: write_examples(out / f"{side}.parquet", part) for side, part in examples.items()}
    about = {"hold_out": hold_out, "seed": options.seed, "recipe": vars(recipe)}
    about |= {
        "guess": options.guess,
        "release": __version__,
        "problems": sorted(t.problem.id for t in tables),
    }
    with open_named_output(out / "README.md") as stream:
        stream.write(dataset_card(examples, about).encode("utf-8", "replace"))
    summary = dataset_summary(examples)
    text = ", ".join(
        f"{side}: {n} rows of {len(summary[side]['kernels'])} kernels ({tools_text(summary[side]['tools'])})"
        for side, n in rows.items()
    )
    output.emit({"path": str(out), "sides": summary}, shown_text(f"{text}\nwritten: {out}", lines=True))
    return 0


def llm(options: argparse.Namespace, output: Output) -> int:
    """Train a language model on a data set, supervised; or take a run up again."""
    from forecast_train.llm.settings import SftRun

    run = _settings(SftRun, options)
    require_packages("training", "torch", "transformers", "peft")
    from forecast_train.llm.sft import train

    return _print_training_result(train(run, resume=options.resume), Path(run.out), output)


def grpo(options: argparse.Namespace, output: Output) -> int:
    """Train a model that speaks by the paper's rewards."""
    from forecast_train.llm.grpo import GrpoRun, train

    run = _settings(GrpoRun, options)
    require_packages("training", "torch", "trl", "datasets", "peft")
    return _print_training_result(train(run, resume=options.resume), Path(run.out), output)


def export(options: argparse.Namespace, output: Output) -> int:
    """Write a finished run's adapter, calibration and card to a folder."""
    from forecast_autotune.report.table import shown_text
    from forecast_train.llm.export import export_model

    if not Path(options.run).exists():
        raise UsageError(f"{options.run}: there is no such folder; name a run of `train llm` or `train grpo`")
    calibration = None if options.calibration is None else Path(options.calibration)
    result = export_model(Path(options.run), Path(options.out), calibration=calibration)
    fields = (
        "" if result["calibrated"] else "; not calibrated: it will not be asked before `train calibrate-llm`"
    )
    output.emit(result, shown_text(f"{result['path']}: {result['bytes'] / 1e6:.1f} MB{fields}"))
    return 0


def _tables_given(options: argparse.Namespace) -> list[Table]:
    """The tables of the files given, ours or another tuner's; by default the shipped ones."""
    from forecast_autotune.store.formats import read_file

    if not options.tables:
        return load_tables(options)
    return [t for name in options.tables for t in read_file(Path(name), options.device_name)]


def _store_tables(options: argparse.Namespace) -> list[Table]:
    from forecast_autotune.commands.store_access import open_store

    return [t for t in open_store(options, to_read=True).tables(None, None) if len(t.by_candidate()) > 1]


def _settings(kind: Any, options: argparse.Namespace) -> Any:
    """The run of the file, with what was given on the command line in its place."""
    run = kind.load(Path(options.config))
    overrides = {name: getattr(options, name) for name in ("model", "data", "out", "seed")}
    return replace(run, **{name: value for name, value in overrides.items() if value is not None})


def _print_training_result(record: dict[str, Any], out: Path, output: Output) -> int:
    from forecast_autotune.report.table import shown_text
    from forecast_train.splits import tools_text

    results = {"path": str(out), **{k: v for k, v in record.items() if k != "log"}}
    tools = f"\n{tools_text(record['tools'])}" if "tools" in record else ""
    text = f"{record['steps']} steps: {out}{tools}\nexport it with `forecast-autotune train export {out} --out FOLDER`"
    output.emit(json.loads(json.dumps(results, default=str)), shown_text(text, lines=True))
    return 0
