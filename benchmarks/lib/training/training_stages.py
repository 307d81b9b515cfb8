"""The stages of `trained_forecaster.py`: data, the surrogates that are compared, what a model says, export."""

from __future__ import annotations

import json
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT
from benchmarks.lib.result_files import say
from forecast_autotune import __version__
from forecast_autotune.llm.calibration import FILE, read, write
from forecast_autotune.records.table import Table
from forecast_autotune.surrogates.learned import LearnedModel, LearnedSurrogate
from forecast_autotune.tuning.replays.replay import load, shipped_tables
from forecast_train.evaluation.splits import SplitError, family_of, kernel_of, spread_over_kernels
from forecast_train.llm.calibration.answer_collection import ModelAnswers, collect_answers
from forecast_train.llm.calibration.saving_estimate import estimate_saving, replay_pairs
from forecast_train.llm.data.build import ExampleSettings, build_examples
from forecast_train.llm.data.cross_fitting import cross_fit
from forecast_train.llm.data.dataset_card import dataset_card, dataset_summary
from forecast_train.llm.data.examples import JSON_LINES_SUFFIX
from forecast_train.llm.data.examples import write_examples as write_examples
from forecast_train.llm.data.split import Sides, split
from forecast_train.llm.export import add_calibration, export_model
from forecast_train.llm.run_folder import write_json
from forecast_train.llm.settings import SftRun
from forecast_train.surrogate.fit import FitSettings as Growing
from forecast_train.surrogate.fit import fit, fit_model

CORPUS_TABLES = ("corpus_h200.jsonl.gz", "corpus_h200_2.jsonl.gz", "corpus_h200_near.jsonl.gz")
"""Beside the tables of the package."""
TEST_FAMILIES = ("attention_backward", "gemv", "quantise", "rope", "scan", "softmax", "stencil")
"""Families of the corpus that are tested on, chosen before any training: products and none, one pass and
several, sequential and not. The large families stay for learning."""
FAMILIES = 3
"""Kernel families that validation and test have at least: fewer carry neither a calibration nor a claim."""
MOST_BYTES = 15_000_000
"""Of an adapter that is shipped."""
MOST_REPLAYED = 40
"""Validation problems that are replayed with and without the model, at the most."""


@dataclass
class TrainingWorkspace:
    """One run of the script: options, tables, and results that are written as they come."""

    options: Namespace
    out: Path
    results: dict[str, Any]
    sides: Sides = field(default_factory=dict)

    @classmethod
    def opened(cls, options: Namespace, about: Mapping[str, Any]) -> TrainingWorkspace:
        """Take a run up, or begin one. Raises `ValueError` for a folder with a run of other settings."""
        out: Path = options.out
        out.mkdir(parents=True, exist_ok=True)
        path = out / "results.json"
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"settings": dict(about)}
        if found["settings"] != json.loads(json.dumps(about)):
            raise ValueError(
                f"{out} holds a run with other settings: {found['settings']}, not {dict(about)}; "
                "take another --out"
            )
        return cls(options, out, {"stages": {}, **found})

    def stage(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The results of a stage: those on file, or made now and filed with their seconds."""
        stages = self.results["stages"]
        if name in stages:
            say(f"{name}: taken up from an earlier sitting")
        else:
            begin = time.perf_counter()
            made = make()
            stages[name] = {"wall_s": round(time.perf_counter() - begin, 1), **made}
            write_json(self.out / "results.json", self.results)
            say(f"{name}: {stages[name]['wall_s']} s")
        return dict(stages[name])

    def split(self) -> None:
        """Read the tables and part them by family; a later sitting gets the same sides."""
        o = self.options
        paths = o.tables or [
            *shipped_tables(),
            *(ROOT / "benchmarks" / "data" / name for name in CORPUS_TABLES),
        ]
        tables = load(paths)
        if o.limit:
            tables = spread_over_kernels(tables, o.limit)
        named = TEST_FAMILIES if o.hold_out is None and not o.tables else (o.hold_out or ())
        self.sides, seed = split_by_family(tables, o.seed, tuple(o.shares), named)
        told = {side: sorted({family_of(t.problem) for t in some}) for side, some in self.sides.items()}
        for side, some in self.sides.items():
            kernels = len({kernel_of(t.problem) for t in some})
            say(f"{side}: {len(some)} problems, {kernels} kernels, families {', '.join(told[side])}")
        found = {"families": told, "seed": seed, "problems": sorted(t.problem.id for t in tables)}
        if self.results.setdefault("split", found) != found:
            raise ValueError(f"{self.out} was begun with other tables: take another --out")

    @property
    def judged(self) -> list[Table]:
        """What no model of this run has seen: both sides, as their answers are asked for together."""
        return [*self.sides["validation"], *self.sides["test"]]


def split_by_family(
    tables: Sequence[Table], seed: int, shares: tuple[float, float], hold_out: Sequence[str] = ()
) -> tuple[Sides, int]:
    """Sides by family, and the first seed from `seed` on that gives validation and test families enough.

    `hold_out` is the test side, if it names families; else that is drawn as well. The rule looks at the
    number of families alone. Leakage is checked by `split`. Raises `SplitError` where a hundred seeds give
    none.
    """
    for number in range(seed, seed + 100):
        try:
            sides = split(tables, "family", shares=shares, hold_out=hold_out, seed=number)
        except SplitError:
            continue
        if all(len({family_of(t.problem) for t in sides[s]}) >= FAMILIES for s in ("validation", "test")):
            return sides, number
    raise SplitError(
        f"no split of {len(tables)} tables leaves {FAMILIES} families for validation and for test each: "
        "give more tables, larger --shares, or families that there are to --hold-out"
    )


def build_data(work: TrainingWorkspace, fitted: Callable[[], float]) -> dict[str, Any]:
    """Write the three sides' examples, with their card; `fitted` waits for the learned surrogate's file.

    Guesses on the training side come of surrogates that have not seen the family, on the others of the one
    fitted to the training side.
    """
    believe = cross_fit(
        work.sides["train"],
        learn=lambda tables: fit(tables, seed=work.options.seed, recipe=Growing(jobs=work.options.jobs)),
        progress=lambda done, of: say(f"data: {done} of {of} surrogates fitted to guess by"),
    )
    fitted()
    whole = learned_of(work)
    folder, recipe = work.out / "data", ExampleSettings(moments=work.options.moments)
    folder.mkdir(exist_ok=True)
    made = {}
    for side, some in work.sides.items():
        by = believe if side == "train" else lambda _: whole
        made[side] = build_examples(some, recipe, believe=by, seed=work.options.seed)
        write_examples(folder / f"{side}{JSON_LINES_SUFFIX}", made[side])
        say(f"data: {side}: {len(made[side])} examples")
    about = {"by": "family", "seed": work.options.seed, "recipe": vars(recipe), "release": __version__}
    (folder / "README.md").write_text(dataset_card(made, about), encoding="utf-8")
    counted = dataset_summary(made)
    return {side: {k: counted[side][k] for k in ("examples", "rows", "problems")} for side in made}


def settings_of(work: TrainingWorkspace) -> SftRun:
    """The run of the configuration, in this folder and under this clock."""
    o = work.options
    run = SftRun.load(o.config)
    steps = replace(run.steps, seconds=float(o.seconds), most=o.steps)
    if o.tokens:
        steps = replace(steps, tokens=o.tokens)
    data, out = str(work.out / "data"), str(work.out / "run")
    return replace(run, model=str(o.model), data=data, out=out, seed=o.seed, steps=steps)


def train_model(work: TrainingWorkspace) -> dict[str, Any]:
    """The supervised run, taken up where it was ended."""
    from forecast_train.llm.sft import train

    done = train(settings_of(work), resume=True, say=say)
    losses = [row["loss"] for row in done["log"] if "loss" in row]
    checked = [row["eval_loss"] for row in done["log"] if "eval_loss" in row]
    told = ("steps", "seconds_per_step", "tokens_per_s", "peak_bytes", "trainable", "tokens", "versions")
    tenth = max(1, len(losses) // 10)
    return {
        **{name: done[name] for name in told},
        "loss_first": sum(losses[:tenth]) / tenth,
        "loss_last": sum(losses[-tenth:]) / tenth,
        "validation_losses": checked,
        "trained_s": max((row.get("elapsed_s", 0.0) for row in done["log"]), default=0.0),
    }


def export_adapter(work: TrainingWorkspace) -> dict[str, Any]:
    """Half-precision weights and a card; the calibration is fitted to what this folder says."""
    folder = work.out / "adapter"
    shutil.rmtree(folder, ignore_errors=True)  # half of one, from a sitting that was ended
    return export_model(work.out / "run", folder, half=True, most_bytes=MOST_BYTES)


def adapter_bytes(model: Path, rank: int) -> int:
    """Bytes of a half-precision adapter of this rank on every linear layer but the last, before training.

    Two factors per layer: rank x (inputs + outputs) numbers (Hu et al., arXiv 2106.09685).
    """
    import torch
    import transformers

    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model))
    last = made.get_output_embeddings()
    layers = [m for m in made.modules() if isinstance(m, torch.nn.Linear) and m is not last]
    return sum(2 * rank * (m.in_features + m.out_features) for m in layers)


def fit_learned(train: Sequence[Table], path: str, seed: int, jobs: int) -> float:
    """Fit the learned surrogate to the training side and save it; returns seconds."""
    begin = time.perf_counter()
    fit_model(train, seed=seed, recipe=Growing(jobs=jobs)).save(Path(path))
    return round(time.perf_counter() - begin, 1)


def learned_of(work: TrainingWorkspace) -> LearnedSurrogate:
    """The learned surrogate of this run."""
    return LearnedSurrogate(LearnedModel.load(work.out / "learned.npz"))


def collect_model_answers(
    work: TrainingWorkspace, name: str, adapter: Path | None, tables: Sequence[Table]
) -> list[ModelAnswers]:
    """Ask the model, or what training made of it, about tables; answers on file are not asked for again."""
    from forecast_integrations.models.transformers.backend import TransformersBackend

    folder = work.out / "heard"
    folder.mkdir(exist_ok=True)
    learned = learned_of(work)
    backend = TransformersBackend(str(work.options.model), None if adapter is None else str(adapter))
    told = time.monotonic()

    def progress(done: int, total: int, label: str) -> None:
        nonlocal told
        if time.monotonic() - told > 10 or done == total:
            told = time.monotonic()
            say(f"{name}: asked about {done} of {total} problems")

    try:
        # The surrogate that questions go by has seen the training side alone, whatever is asked about.
        return collect_answers(
            tables, backend, learn=lambda _: learned, kept=folder / f"{name}.jsonl", progress=progress
        )
    finally:
        backend.close()


def side_of(work: TrainingWorkspace, heard: Sequence[ModelAnswers], side: str) -> list[ModelAnswers]:
    """What was said of one side's problems."""
    ids = {t.problem.id for t in work.sides[side]}
    return [h for h in heard if h.problem in ids]


def calibrate_model(
    work: TrainingWorkspace, name: str, heard: Sequence[ModelAnswers], *, replayed: bool
) -> dict[str, Any]:
    """Fit a calibration to the validation side; `replayed` also finds out what the model saves there."""
    from forecast_train.llm.calibration.calibrate import fit_calibration

    known = side_of(work, heard, "validation")
    made = fit_calibration(known, {"side": "validation"})
    saving = None
    # What is saved is found out with each family left out, and a calibration takes three others.
    if replayed and made.skilled and len({h.family for h in known}) > 3:
        learned, some = learned_of(work), spread_over_kernels(work.sides["validation"], MOST_REPLAYED)
        saving = estimate_saving(replay_pairs(some, known, learn=lambda _: learned, seeds=(0,)))
        made = replace(made, saved=saving.lower_bound, about={**made.about, "saving": saving.to_json()})
    write(work.out / f"calibration-{name}.json", made)
    if replayed:
        add_calibration(work.out / "adapter", work.out / f"calibration-{name}.json")
    weight = made.weights["pooled"].mean
    say(f"{name}: temperature {made.temperature:.2f}, weight beside the learned surrogate {weight:.2f}")
    return {
        "temperature": round(made.temperature, 4),
        "weight": weight,
        "saved": made.saved,
        "saving": None if saving is None else saving.to_json(),
    }


def weights_of(work: TrainingWorkspace) -> dict[str, int]:
    """Sizes of what is shipped: safetensors, and calibration if it is there."""
    folder = work.out / "adapter"
    files = [*folder.glob("*.safetensors"), *(p for p in [folder / FILE] if p.is_file())]
    return {path.name: path.stat().st_size for path in files}


def calibration_of(work: TrainingWorkspace, name: str) -> Any:
    """The calibration of a model of this run."""
    return read(work.out / f"calibration-{name}.json")
