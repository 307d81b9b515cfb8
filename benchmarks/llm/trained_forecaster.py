"""Claim: one command trains a small language model to forecast kernel times, in 20 minutes on one H200.

    python -m benchmarks.llm.trained_forecaster --model DIR --name smollm2-135m|qwen2.5-coder-0.5b --out DIR \
        [--seconds 780] [--grpo 60 [--grpo-seeds 3] [--start ADAPTER]] [--variants MEASURED.jsonl]

From the recorded tables to a shipped adapter: examples with sides of disjoint kernel families (a leak stops
it), supervised training with the exact bin loss for `--seconds`, a calibration fitted to validation families,
half-precision export, and on held-out families the table of the paper: the model as it comes, trained, the
learned surrogate fitted to the same training side, and the ensemble of both. `--grpo` compares rewards from
the trained model, or, without any other training, from the adapter `--start`; `--variants` judges the
recorded variants with what `variant_ranking.py --measure` wrote.

Everything lies in `--out`: `results.json` grows by stage, and the same command goes on where it was ended.
It needs torch, transformers, peft, safetensors, scikit-learn and LightGBM; neither trl nor datasets nor
pyarrow.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.lib.environment import ROOT, environment
from benchmarks.lib.processes.child_processes import module_command
from benchmarks.lib.result_files import say
from benchmarks.lib.training import surrogate_comparison as judging
from benchmarks.lib.training import training_stages as stages
from benchmarks.lib.training.surrogate_comparison import TRAINED
from benchmarks.lib.training.training_stages import MOST_BYTES, TrainingWorkspace
from forecast_train.llm.settings import SftRun

CONFIGS = ROOT / "train" / "configs"
NEEDED_PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "numpy",
    "sklearn",
    "lightgbm",
    "threadpoolctl",
)
SHOWN_FIGURES = (
    "accuracy",
    "off_by_one",
    "ece",
    "brier",
    "crps",
    "spearman",
    "spearman_families",
    "recovery",
    "regret",
    "aurc",
)


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program, saying why, for what cannot work: before anything is computed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the base model, safetensors")
    parser.add_argument("--name", required=True, help="train/configs/NAME.toml, and the adapter's name")
    parser.add_argument("--out", type=Path, required=True, help="folder for everything")
    parser.add_argument("--seconds", type=float, default=780.0, help="of training; the rest comes on top")
    parser.add_argument("--config", type=Path, help="instead of the named one")
    parser.add_argument("--tables", type=Path, nargs="+", help="instead of the corpus")
    parser.add_argument("--limit", type=int, default=0, help="at most so many problems")
    parser.add_argument("--hold-out", nargs="*", help="families that are tested on (default: see HELD_OUT)")
    parser.add_argument("--shares", type=float, nargs=2, default=(0.15, 0.2), help="validation, test")
    parser.add_argument("--moments", type=int, default=6, help="examples per problem")
    parser.add_argument("--steps", type=int, default=0, help="training steps at the most (0: by the clock)")
    parser.add_argument("--tokens", type=int, default=0, help="of a sequence, instead of the configuration's")
    parser.add_argument("--learned", type=Path, help="learned surrogate of the same training side (.npz)")
    parser.add_argument("--grpo", type=int, default=0, help="steps of every reward that is compared; 0: none")
    parser.add_argument("--grpo-seeds", type=int, default=3)
    parser.add_argument("--start", type=Path, help="adapter to compare rewards from; nothing else is trained")
    parser.add_argument("--variants", type=Path, help="measured variants, of variant_ranking.py --measure")
    parser.add_argument("--judge-seeds", type=int, default=1, help="seeds of every decision")
    parser.add_argument("--draws", type=int, default=1000, help="of every bootstrap")
    parser.add_argument("--jobs", type=int, default=min(12, os.cpu_count() or 1), help="judging processes")
    parser.add_argument("--seed", type=int, default=0)
    found = parser.parse_args(argv)
    found.out = found.out.absolute()
    found.config = found.config or CONFIGS / f"{found.name}.toml"
    if not found.config.is_file():
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.toml") if "grpo" not in p.stem))
        parser.error(f"--name {found.name}: no {found.config.name} in train/configs; there are {names}")
    if not (found.model / "config.json").is_file():
        parser.error(f"--model {found.model}: no folder with a config.json; get_weights or the hub gives one")
    if missing := [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]:
        parser.error(f"{', '.join(missing)} cannot be imported: install them")
    for path in (found.learned, found.variants, *(found.tables or [])):
        if path is not None and not path.is_file():
            parser.error(f"{path}: no such file")
    if found.start is not None and not (found.start / "adapter_config.json").is_file():
        parser.error(f"--start {found.start}: no folder with an adapter_config.json")
    if found.start is not None and (not found.grpo or found.variants):
        parser.error("--start compares rewards alone: give --grpo STEPS with it, and no --variants")
    if min(found.seconds, found.moments) <= 0 or found.grpo_seeds < 1:
        parser.error("--seconds, --moments and --grpo-seeds must be positive")
    return found


def run_identity(o: argparse.Namespace) -> dict[str, Any]:
    """What may not differ between the sittings of one run."""
    names = ("name", "seconds", "limit", "moments", "steps", "tokens", "seed")
    return {
        **{n: getattr(o, n) for n in names},
        "shares": list(o.shares),
        "hold_out": o.hold_out,
        "config": o.config.read_text(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    o = options(argv)
    begin = time.perf_counter()
    work = TrainingWorkspace.opened(o, run_identity(o))
    work.results["environment"] = environment(o.seed)
    say(f"{o.name} on {work.results['environment']['device']}, training for {o.seconds:.0f} s, into {o.out}")
    rank = SftRun.load(o.config).lora.rank
    size = stages.adapter_bytes(o.model, rank)
    if size > MOST_BYTES:
        raise SystemExit(
            f"rank {rank} gives an adapter of {size / 1e6:.1f} MB, more than "
            f"{MOST_BYTES / 1e6:.0f} MB: lower it"
        )
    say(f"adapter: rank {rank}, {size / 1e6:.1f} MB")
    work.split()
    with ProcessPoolExecutor(1, get_context("spawn")) as aside:
        # Trees to compare with grow while those grow that training goes by.
        growing = _fit_learned_aside(work, aside)
        work.stage("data", lambda: stages.build_data(work, growing.result))
        if o.start is None:
            done = work.stage("training", lambda: stages.train_model(work))
            say(
                f"{done['steps']} steps, {done['seconds_per_step']:.2f} s/step, "
                f"{done['tokens_per_s']:,.0f} tokens/s, peak {done['peak_bytes'] / 2**30:.1f} GiB; "
                f"loss {done['loss_first']:.3f} -> {done['loss_last']:.3f}"
            )
            work.stage("export", lambda: stages.export_adapter(work))
        work.stage("learned", lambda: {"fit_s": growing.result()})
    if o.start is None:
        work.stage("evaluation", lambda: evaluate_models(work))
    if o.variants:
        work.stage("variants", lambda: judge_variants(work))
    if o.grpo:
        from benchmarks.lib.training.reward_comparison import compare_rewards

        work.stage("rewards", lambda: compare_rewards(work, o.start or o.out / "adapter"))
    results_text(work.results["stages"])
    say(f"done in {time.perf_counter() - begin:.0f} s: {o.out / 'results.json'}")
    return 0


def _fit_learned_aside(work: TrainingWorkspace, aside: ProcessPoolExecutor) -> Future[float]:
    path, given = work.out / "learned.npz", work.options.learned
    if not path.is_file() and given is None:
        return aside.submit(
            stages.fit_learned, work.sides["train"], str(path), work.options.seed, work.options.jobs
        )
    if given is not None:
        path.write_bytes(given.read_bytes())
    ready: Future[float] = Future()
    ready.set_result(0.0)
    return ready


def evaluate_models(work: TrainingWorkspace) -> dict[str, Any]:
    """Ask both models, calibrate them, judge all four on the test side."""
    from forecast_train.llm.calibration.bin_scores import (
        model_bin_scores,
        paired_differences,
        statistics_table,
    )

    o, draws = work.options, work.options.draws
    heard = {
        judging.ZERO: stages.collect_model_answers(work, judging.ZERO, None, work.judged),
        judging.TRAINED: stages.collect_model_answers(
            work, judging.TRAINED, work.out / "adapter", work.judged
        ),
    }
    found: dict[str, Any] = {"calibration": {}, "words": {}}
    words: dict[str, Any] = {}
    for name, said in heard.items():
        found["calibration"][name] = stages.calibrate_model(
            work, name, said, replayed=name == judging.TRAINED
        )
        test, fitted = stages.side_of(work, said, "test"), stages.calibration_of(work, name)
        for title, calibration in ((f"{name}, as stated", None), (name, fitted)):
            words[title] = [w for h in test if (w := model_bin_scores(h, calibration)) is not None]
    found["adapter"] = stages.weights_of(work)
    known = {name: (said, stages.calibration_of(work, name)) for name, said in heard.items()}
    makings = judging.SurrogateParts(
        work.out / "learned.npz", known[judging.ZERO], known[judging.TRAINED], tuple(range(o.judge_seeds))
    )
    told = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal told
        if time.monotonic() - told > 10 or done == total:
            told = time.monotonic()
            say(f"judged {done} of {total} problems")

    rows, others = judging.judge_tables(
        work.sides["test"], makings, work.out / "judged.jsonl", jobs=o.jobs, progress=progress
    )
    words |= others
    found["words"] = {name: statistics_table(some, draws=draws) for name, some in words.items()}
    found["trained_minus_zero_shot"] = paired_differences(
        words[judging.TRAINED], words[judging.ZERO], draws=draws
    )
    found["ensemble_minus_learned"] = paired_differences(
        words[judging.ENSEMBLE], words[judging.LEARNED], draws=draws
    )
    summary, found["decisions"] = judging.decision_figures(rows, makings.seeds, draws)
    found["ensemble_does_not_beat"] = judging.unbeaten_baselines(summary)
    return found


def judge_variants(work: TrainingWorkspace) -> dict[str, Any]:
    """The recorded variants, forecast with the adapter by the script that is there for them, and joined."""
    script = module_command(str(ROOT / "benchmarks" / "forecasting" / "variant_ranking.py"))
    said = work.out / "variants.json"
    spec = f"{TRAINED}=transformers:{work.options.model}?adapter={work.out / 'adapter'}"
    command = [*script, "--out", str(said), "--llm", spec, "--llm-only", "--shapes", "1"]
    subprocess.run(command, check=True, cwd=ROOT)
    return variants_report(said, work.options.variants, work.results["split"]["families"])


def variants_report(said: Path, measured: Path, families: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Figures over all variants, and over those whose kernels' families no model of this run has seen.

    `families` are those of each side. A base that is of no recorded family counts as unseen. Raises
    `ValueError` where nothing joins.
    """
    from benchmarks.lib.variants.variant_report import join_forecasts, report

    pairs = join_forecasts([said], measured)
    cases = json.loads(said.read_text(encoding="utf-8"))["raw"]["cases"]
    family = {case["case"].partition("/")[0]: case["family"] for case in cases}
    seen = {*families["train"], *families["validation"]}
    apart = [pair for pair in pairs if family[pair.kernel] not in seen]
    return {"all": report(pairs), "held_out": report(apart) if apart else None}


def results_text(found: dict[str, Any]) -> None:
    """The table, as text."""
    judged = found.get("evaluation", {})
    words, decided = judged.get("words", {}), judged.get("decisions", {})
    say("held-out families, bins of time / reference time (95 % intervals over kernels):")
    for name, row in words.items():
        cells = [f"{key} {_cell(row[key])}" for key in SHOWN_FIGURES]
        say(f"  {name} ({row['problems']} problems): {', '.join(cells)}")
    say("held-out families, decisions:")
    for name, row in decided.items():
        say(f"  {name}: " + ", ".join(f"{key} {_cell(value)}" for key, value in row.items()))
    for which, row in found.get("variants", {}).items():
        if isinstance(row, dict):
            told = row[TRAINED]
            say(
                f"  variants, {which}: {told['variants']}, recovery within a kernel "
                f"{told['recovers_within_kernel']}, faster: {told['faster']}, AURC {told['aurc']}"
            )
    for arm, row in found.get("rewards", {}).get("arms", {}).items():
        cells = [
            f"{k} {row[k]['mean']} +- {row[k]['standard_error']}"
            for k in ("accuracy", "ece", "crps", "spearman")
        ]
        say(f"  reward {arm}: {', '.join(cells)}")


def _cell(interval: Sequence[float | None]) -> str:
    value, low, high = interval
    return f"{value}" if low is None else f"{value} [{low}, {high}]"


if __name__ == "__main__":
    sys.exit(main())
