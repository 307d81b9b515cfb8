"""`train data`, `train llm`, `train grpo`, `train export`, `train online`: from measurements to models."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forecast_autotune.commands.output import Failure, Output, Usage, at_least_one
from forecast_autotune.commands.tables import recorded

if TYPE_CHECKING:
    from forecast_autotune.records.table import Table
    from forecast_train.surrogate.online import Refresh


def data(options: argparse.Namespace, output: Output) -> int:
    """Turn tables, caches of others or the store into a data set: three Parquet files and a card."""
    from rich.text import Text

    from forecast_autotune import __version__
    from forecast_train.evaluation.splits import LeakageError, SplitError
    from forecast_train.llm.believing import Believe, by_formula, for_sides
    from forecast_train.llm.build import Recipe, examples
    from forecast_train.llm.card import card, summary
    from forecast_train.llm.examples import write
    from forecast_train.llm.split import split

    at_least_one(options, "moments", "most")
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise Usage(f"--out {out}: that is a file; name a directory")
    tables = _stored(options) if options.from_store else _given(options)
    recipe = Recipe(moments=options.moments, most=options.most, per_bin=options.per_bin)
    hold_out = [name for name in (options.hold_out or "").split(",") if name]
    try:
        sides = split(tables, options.by, hold_out=hold_out, seed=options.seed)
    except (SplitError, LeakageError) as error:
        raise Usage(str(error)) from error
    made = {}
    believe: dict[str, Believe] = dict.fromkeys(sides, by_formula)
    if options.guess == "learned":
        with output.progress("fitting what guesses", 1) as progress:
            believe = for_sides(sides, progress=lambda n, of: progress(n, of, "families left out"))
    with output.progress("building", len(tables)) as progress:
        done = 0
        for side, some in sides.items():
            # What is known of other shapes must come from the same side.
            def step(table: Table) -> None:
                nonlocal done
                done += 1
                progress(done, len(tables), table.problem.kernel.name)

            # Even bins are for learning; what is judged stays as it is met.
            plain = recipe if side == "train" else Recipe(moments=options.moments, most=options.most)
            made[side] = examples(some, plain, believe=believe[side], seed=options.seed, progress=step)
    out.mkdir(parents=True, exist_ok=True)
    rows = {side: write(out / f"{side}.parquet", found) for side, found in made.items()}
    about = {"by": options.by, "hold_out": hold_out, "seed": options.seed, "recipe": vars(recipe)}
    about |= {
        "guess": options.guess,
        "release": __version__,
        "problems": sorted(t.problem.id for t in tables),
    }
    (out / "README.md").write_text(card(made, about), encoding="utf-8")
    counted = summary(made)
    shown = ", ".join(
        f"{side}: {n} rows of {len(counted[side]['kernels'])} kernels" for side, n in rows.items()
    )
    output.emit({"path": str(out), "sides": counted}, Text(f"{shown}\nwritten: {out}"))
    return 0


def llm(options: argparse.Namespace, output: Output) -> int:
    """Train a language model on a data set, supervised; or take a run up again."""
    from forecast_train.llm.settings import Run

    run = _settings(Run, options)
    _needs("transformers", "peft")
    from forecast_train.llm.sft import train

    return _trained(train(run, resume=options.resume), Path(run.out), output)


def grpo(options: argparse.Namespace, output: Output) -> int:
    """Train a model that speaks by the paper's rewards."""
    from forecast_train.llm.grpo import GrpoRun, train

    run = _settings(GrpoRun, options)
    _needs("trl", "datasets", "peft")
    return _trained(train(run, resume=options.resume), Path(run.out), output)


def export(options: argparse.Namespace, output: Output) -> int:
    """Write a finished run's adapter, calibration and card to a folder."""
    from rich.text import Text

    from forecast_train.llm.export import export as write

    calibration = None if options.calibration is None else Path(options.calibration)
    found = write(Path(options.run), Path(options.out), calibration=calibration, half=options.half)
    told = (
        "" if found["calibrated"] else "; not calibrated: it will not be asked before `train calibrate-llm`"
    )
    output.emit(found, Text(f"{found['path']}: {found['bytes'] / 1e6:.1f} MB{told}"))
    return 0


def traces(options: argparse.Namespace, output: Output) -> int:
    """Choose the shortest correct trace per problem, for training kernel writers."""
    from rich.text import Text

    from forecast_train.llm.traces import concise, load, write_chats

    at_least_one(options, "keep")
    every = [trace for name in options.files for trace in load(Path(name))]
    chosen = concise(every, slack=options.slack, keep=options.keep)
    if not chosen:
        raise Failure(f"none of {len(every)} traces is correct: there is nothing to train a writer on")
    count = write_chats(Path(options.out), chosen)
    found = {"path": options.out, "traces": count, "of": len(every)}
    output.emit(found, Text(f"kept {count} of {len(every)} traces: {options.out}"))
    return 0


def online(options: argparse.Namespace, output: Output) -> int:
    """Refresh the learned surrogate whenever the store has grown enough; once, or until interrupted."""
    from forecast_autotune.surrogates.learned import Model, shipped_model
    from forecast_train.surrogate.online import State, due, refresh, roll_back

    at_least_one(options, "every")
    path = Path(options.out) if options.out else _model_path(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.roll_back:
        roll_back(path)
        output.emit({"path": str(path), "rolled_back": True}, f"the model before is in use again: {path}")
        return 0
    state_path = path.with_suffix(".json")
    while True:
        tables = _stored(options)
        if due(tables, State.read(state_path), options.every):
            current = Model.load(path) if path.is_file() else shipped_model()
            found = refresh(tables, path, current, seed=options.seed)
            State(found.measurements).write(state_path)
            _told(found, path, output)
        elif options.once:
            known = State.read(state_path).measurements
            output.emit(
                {"path": str(path), "kept": False, "reason": "not due", "measurements": known},
                f"fewer than {options.every} measurements since the last refresh: nothing done",
            )
        if options.once:
            return 0
        time.sleep(options.wait)


def _told(found: Refresh, path: Path, output: Output) -> None:
    figures = ""
    if found.before is not None and found.after is not None:
        figures = f" (first tenth off by {found.before.tenth:.3f} -> {found.after.tenth:.3f} log2)"
    use = f"; use it with FORECAST_AUTOTUNE_MODEL={path}" if found.kept else ""
    output.emit({"path": str(path), **found.to_json()}, f"{found.reason}{figures}{use}")


def _model_path(options: argparse.Namespace) -> Path:
    from forecast_autotune.commands.show import open_store

    root = open_store(options).root
    if root is None:
        raise Usage("this store is in memory only: give --out FILE.npz for the model")
    return root / "models" / "online.npz"


def _given(options: argparse.Namespace) -> list[Table]:
    """The tables of the files given, ours or another tuner's; by default the shipped ones."""
    from forecast_autotune.commands.exchange import tables_of

    if not options.tables:
        return recorded(options)
    return [t for name in options.tables for t in tables_of(Path(name), options.device_name)]


def _stored(options: argparse.Namespace) -> list[Table]:
    from forecast_autotune.commands.show import open_store

    return [t for t in open_store(options).tables(None, None) if len(t.by_candidate()) > 1]


def _settings(kind: Any, options: argparse.Namespace) -> Any:
    """The run of the file, with what was given on the command line in its place."""
    from dataclasses import replace

    run = kind.load(Path(options.config))
    given = {name: getattr(options, name) for name in ("model", "data", "out", "seed")}
    return replace(run, **{name: value for name, value in given.items() if value is not None})


def _needs(*names: str) -> None:
    import importlib.util

    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise Failure(f"training needs {', '.join(missing)}: pip install 'forecast-autotune[train]'")


def _trained(done: dict[str, Any], out: Path, output: Output) -> int:
    from rich.text import Text

    from forecast_train.llm.curves import draw

    draw(out / "curves.png", done["log"])
    found = {"path": str(out), **{k: v for k, v in done.items() if k != "log"}}
    shown = (
        f"{done['steps']} steps: {out}\nexport it with `forecast-autotune train export {out} --out FOLDER`"
    )
    output.emit(json.loads(json.dumps(found, default=str)), Text(shown))
    return 0
